"""The named network settings as NCCL's variables, which the NCCL user guide defines, and variables that are refused."""

import os
import re
from unittest import mock

import pytest
import torch

from common import cli
from common.config.composition import compose
from common.config.system import NetworkConfig
from common.errors import ConfigError
from common.launch.nccl_settings import check_windows, variables
from common.run import start


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
def test_a_setting_becomes_its_variables(settings, expected):
    assert variables(settings, {}) == expected


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_buffers_of_expandable_segments_are_registered_only_on_demand(name):
    environment = {name: "max_split_size_mb:64, expandable_segments:True"}
    assert variables(NetworkConfig(), environment) == {"NCCL_GRAPH_REGISTER": "0"}
    asked = {"NCCL_GRAPH_REGISTER": "1", "NCCL_LOCAL_REGISTER": "1"}
    assert variables(NetworkConfig(user_buffers=True), environment) == asked
    assert variables(NetworkConfig(), {name: "expandable_segments:False"}) == {}


WINDOWS = [
    ("TORCH_SYMMMEM", "nccl"),
    ("NCCL_CTA_POLICY", "2"),
    ("NCCL_CTA_POLICY", "EFFICIENCY|ZERO"),
]


@pytest.mark.parametrize("version", [(2, 28, 9), (2, 30, 4), (2, 30)], ids=["2.28.9", "2.30.4", "2.30"])
@pytest.mark.parametrize(("name", "value"), WINDOWS)
def test_symmetric_windows_of_an_nccl_that_does_not_wait_are_refused(name, value, version):
    used = ".".join(str(part) for part in version)
    with pytest.raises(ConfigError, match=f"(?s)^{name}={re.escape(value)} .*PyTorch uses NCCL {used}.*Unset {name}"):
        check_windows({"HOME": "/root", name: value}, version)


@pytest.mark.parametrize("version", [(2, 30, 7), (2, 31, 0), (3, 0, 1)], ids=["2.30.7", "2.31.0", "3.0.1"])
@pytest.mark.parametrize(("name", "value"), WINDOWS)
def test_symmetric_windows_of_a_later_nccl_are_allowed(name, value, version):
    check_windows({name: value}, version)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_SYMMMEM", "CUDA"),
        ("NCCL_CTA_POLICY", "1"),
        ("NCCL_CTA_POLICY", "EFFICIENCY"),
        ("NCCL_SYM_CTAS", "8"),  # has an effect only on windows
        ("NCCL_LOCAL_REGISTER", "1"),
        ("NCCL_GRAPH_REGISTER", "1"),
    ],
)
def test_variables_without_windows_are_allowed_with_every_nccl(name, value):
    check_windows({name: value}, (2, 28, 9))


def test_a_run_checks_the_variables_of_its_system_before_it_builds_anything(monkeypatch):
    monkeypatch.setattr(start, "pick_device", lambda requested, local_rank: torch.device("cuda", local_rank))
    monkeypatch.setattr(start, "initialise", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    printed = []
    monkeypatch.setattr(start, "print_error", printed.append)
    tree = compose([
        "benchmark=resnet", "scale=test", "scale.gpus_per_node=2", "device=cpu",
        "+system.environment.TORCH_SYMMMEM=NCCL",
    ])  # fmt: skip
    of_rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, of_rank):
        code = start.on_ranks("train", [], tree, cli.workload_class, lambda start: pytest.fail("the rank has started"))
    assert code == ConfigError.exit_code
    assert [str(error).partition(" ")[0] for error in printed] == ["TORCH_SYMMMEM=NCCL"]
