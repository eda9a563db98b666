"""The named network settings of ``configs/system`` as variables of NCCL.

Names and meanings: NCCL user guide, section on environment variables; which of them MLPerf submissions use:
docs/launching.md.
"""

from __future__ import annotations

from common.config.schema import NetworkConfig


def variables(network: NetworkConfig) -> dict[str, str]:
    """NCCL's variables for ``network``; what is None stays NCCL's own choice."""
    chosen = {}
    if network.sharp:
        chosen["NCCL_COLLNET_ENABLE"] = "1"
    if network.sharp_nodes is not None:
        chosen["NCCL_COLLNET_NODE_THRESHOLD"] = str(network.sharp_nodes)
    if network.user_buffers is not None:
        chosen["NCCL_GRAPH_REGISTER"] = chosen["NCCL_LOCAL_REGISTER"] = str(int(network.user_buffers))
    if network.nvls is not None:
        chosen["NCCL_NVLS_ENABLE"] = str(int(network.nvls))
    return chosen
