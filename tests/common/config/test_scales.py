"""Nodes and ranks of a scale follow from its name, and one of GPUs never runs on a CPU by accident."""

from __future__ import annotations

import pytest

from benchmarks import WORKLOADS
from common import cli
from common.config.composition import compose, scales_of
from common.config.workload_files import scale_of
from common.errors import ConfigError, DeviceError


def test_the_values_of_a_scale_can_be_overridden():
    assert compose(["scale=64xH100"])["scale"] == {"nodes": 8, "gpus_per_node": 8, "gpu": True}
    assert compose(["scale=64xH100", "scale.nodes=4"])["scale"] == {"nodes": 4, "gpus_per_node": 8, "gpu": True}
    assert compose(["scale=test"])["scale"] == {"nodes": 1, "gpus_per_node": 1}


@pytest.mark.parametrize(
    ("name", "nodes", "gpus"),
    [
        ("1xGPU", 1, 1),
        ("4xH200", 1, 4),
        ("8xA100", 1, 8),
        ("72xH100", 9, 8),
        ("11616xH100", 1452, 8),
        ("12xB200", 3, 4),
    ],
)
def test_a_scale_of_gpus_has_as_many_as_its_name_says(name, nodes, gpus):
    assert scale_of(name) == {"nodes": nodes, "gpus_per_node": gpus, "gpu": True}


def test_the_scales_without_gpus_are_for_tests_demos_and_small_boards():
    names = {scale for name in WORKLOADS for scale in scales_of(name)}
    assert {name for name in names if "gpu" not in scale_of(name)} == {"demo", "test", "mini9"}


def test_an_unknown_scale_is_named_with_the_known_ones():
    scales = ", ".join(scales_of("resnet"))  # the default benchmark
    with pytest.raises(ConfigError, match=rf"^scale=9xH100: unknown; resnet has {scales}; .*did you mean 8xH100\?$"):
        compose(["scale=9xH100"])


def test_an_unknown_scale_of_a_benchmark_is_named_with_those_that_it_has():
    scales = "112xA100, 1xH200, 8xA100, demo, test"
    with pytest.raises(ConfigError, match=rf"^scale=9xH100: unknown; dlrm has {scales}; `mlperf-suite list` has"):
        compose(["benchmark=dlrm", "scale=9xH100"])


def test_a_scale_takes_no_other_key():
    with pytest.raises(ConfigError, match=r"^scale\.gpus: unknown configuration key"):
        compose(["scale.gpus=1"])


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("scale", ["1xGPU", "8xH200", "64xH100"])
def test_without_a_gpu_the_error_names_the_setting_for_the_cpu(scale, capsys):
    assert cli.run(["train", "benchmark=resnet", f"scale={scale}"]) == DeviceError.exit_code
    message = capsys.readouterr().err
    assert "CUDA_VISIBLE_DEVICES='' shows none" in message
    assert "device=cpu" in message


@pytest.mark.usefixtures("without_gpu")
def test_on_a_cpu_that_was_asked_for_it_starts(capsys):
    refused = cli.run(["train", "benchmark=resnet", "scale=64xH100", "device=cpu"])
    assert refused == ConfigError.exit_code
    assert "8 nodes need a launcher that starts 64 ranks" in capsys.readouterr().err
