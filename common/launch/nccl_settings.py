"""Convert the network settings of ``configs/system`` to environment variables of NCCL, and refuse unsafe variables.

The NCCL user guide documents the variables; docs/launching.md lists those that MLPerf submissions use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from common.config.system import NetworkConfig
from common.errors import ConfigError

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of PyTorch's allocator: the current and the old name."""

SAFE_WINDOWS = (2, 30, 7)
"""First NCCL version whose symmetric kernels wait for the kernel before them, after 2.28.3 had removed this wait."""


def variables(network: NetworkConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return NCCL's environment variables for ``network``.

    A setting of None leaves the choice to NCCL, with one exception: with expandable segments, buffers are not
    registered for captured graphs.

    Args:
        environment: environment of this process, including the variables of the recipe.
    """
    chosen = {}
    if network.sharp:
        chosen["NCCL_COLLNET_ENABLE"] = "1"
    if network.sharp_nodes is not None:
        chosen["NCCL_COLLNET_NODE_THRESHOLD"] = str(network.sharp_nodes)
    if network.user_buffers is not None:
        chosen["NCCL_GRAPH_REGISTER"] = chosen["NCCL_LOCAL_REGISTER"] = str(int(network.user_buffers))
    elif _expandable_segments(environment):
        # NCCL assumes that a registered buffer is part of one allocation; an expandable segment consists of many.
        # On two H200 the first replays of a graph with all-to-alls hung (NCCL 2.28; see pytorch/pytorch issue 158029).
        chosen["NCCL_GRAPH_REGISTER"] = "0"
    if network.nvls is not None:
        chosen["NCCL_NVLS_ENABLE"] = str(int(network.nvls))
    return chosen


def _expandable_segments(environment: Mapping[str, str]) -> bool:
    settings = ",".join(environment.get(name, "") for name in ALLOCATOR)
    return re.search(r"\bexpandable_segments\s*:\s*true\b", settings, re.IGNORECASE) is not None


def check_windows(environment: Mapping[str, str], version: tuple[int, ...]) -> None:
    """Refuse symmetric windows with an NCCL whose symmetric kernels do not wait for the kernel before them.

    A collective in such a kernel may read gradients before they are written, without any error. NCCL restored the
    missing ``cudaGridDependencySynchronize`` in 2.30.7; sglang issue 37768 and nccl issue 1924 describe the effect.

    Args:
        environment: environment of this process, including the variables of the recipe.
        version: version of the NCCL that PyTorch uses.

    Raises:
        ConfigError: a variable asks for windows and ``version`` is older than ``SAFE_WINDOWS``.
    """
    name = next((name for name in sorted(environment) if _asks_for_windows(name, environment[name])), None)
    if name is None or version >= SAFE_WINDOWS:
        return
    used, needed = (".".join(str(part) for part in parts) for parts in (version, SAFE_WINDOWS))
    raise ConfigError(
        f"{name}={environment[name]} (set by system.environment or in the shell) asks NCCL for symmetric windows, and "
        f"PyTorch uses NCCL {used}. Before {needed} a collective on a window does not wait for the kernel before it, "
        f"so it may sum gradients that are not yet written. Unset {name}, or install NCCL {needed} or newer"
    )


def _asks_for_windows(name: str, value: str) -> bool:
    """Return whether a variable makes NCCL or PyTorch use windows."""
    value = value.strip().upper()
    if name == "TORCH_SYMMMEM":  # backend of PyTorch's symmetric memory; that of NCCL registers windows
        return value == "NCCL"
    # Several policies are joined by "|"; ZERO copies between windows.
    return name == "NCCL_CTA_POLICY" and not {"2", "ZERO", "NCCL_CTA_POLICY_ZERO"}.isdisjoint(re.split(r"\W+", value))
