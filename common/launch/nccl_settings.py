"""The named network settings of ``configs/system`` as variables of NCCL.

Names and meanings: NCCL user guide, section on environment variables; which of them MLPerf submissions use:
docs/launching.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from common.config.schema import NetworkConfig

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of PyTorch's allocator, by its newer and its older name."""


def variables(network: NetworkConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """NCCL's variables for ``network``; what is None stays NCCL's own choice, with one exception.

    NCCL registers the buffers of captured collectives by itself, and takes each for part of one allocation. Expandable
    segments are of many: on two H200 the first replays of a graph with all-to-alls never ended (NCCL 2.28; so also
    pytorch/pytorch issue 158029). With them nothing is registered unless ``network`` asks for it.

    Args:
        network: the settings.
        environment: of this process, with what the recipe adds to it.
    """
    chosen = {}
    if network.sharp:
        chosen["NCCL_COLLNET_ENABLE"] = "1"
    if network.sharp_nodes is not None:
        chosen["NCCL_COLLNET_NODE_THRESHOLD"] = str(network.sharp_nodes)
    if network.user_buffers is not None:
        chosen["NCCL_GRAPH_REGISTER"] = chosen["NCCL_LOCAL_REGISTER"] = str(int(network.user_buffers))
    elif _expandable_segments(environment):
        chosen["NCCL_GRAPH_REGISTER"] = "0"
    if network.nvls is not None:
        chosen["NCCL_NVLS_ENABLE"] = str(int(network.nvls))
    return chosen


def _expandable_segments(environment: Mapping[str, str]) -> bool:
    settings = ",".join(environment.get(name, "") for name in ALLOCATOR)
    return re.search(r"\bexpandable_segments\s*:\s*true\b", settings, re.IGNORECASE) is not None
