"""The named network settings as NCCL's variables, which the NCCL user guide defines."""

from __future__ import annotations

import pytest

from common.config.schema import NetworkConfig
from common.launch.nccl_settings import variables


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (NetworkConfig(), {}),
        (NetworkConfig(sharp=True), {"NCCL_COLLNET_ENABLE": "1"}),
        (
            NetworkConfig(sharp=True, sharp_nodes=4),
            {"NCCL_COLLNET_ENABLE": "1", "NCCL_COLLNET_NODE_THRESHOLD": "4"},
        ),
        (NetworkConfig(user_buffers=True), {"NCCL_GRAPH_REGISTER": "1", "NCCL_LOCAL_REGISTER": "1"}),
        (NetworkConfig(nvls=False), {"NCCL_NVLS_ENABLE": "0"}),
    ],
)
def test_a_setting_becomes_its_variables(settings: NetworkConfig, expected: dict[str, str]) -> None:
    assert variables(settings, {}) == expected


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_buffers_of_expandable_segments_are_registered_only_on_demand(name: str) -> None:
    environment = {name: "max_split_size_mb:64, expandable_segments:True"}
    assert variables(NetworkConfig(), environment) == {"NCCL_GRAPH_REGISTER": "0"}
    asked = {"NCCL_GRAPH_REGISTER": "1", "NCCL_LOCAL_REGISTER": "1"}
    assert variables(NetworkConfig(user_buffers=True), environment) == asked
    assert variables(NetworkConfig(), {name: "expandable_segments:False"}) == {}
