"""Convert the network settings of ``configs/system`` to environment variables of NCCL.

The NCCL user guide documents the variables; docs/launching.md lists those that MLPerf submissions use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from common.config.schema import NetworkConfig

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of PyTorch's allocator: the current and the old name."""


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
