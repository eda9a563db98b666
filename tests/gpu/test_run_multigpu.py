"""A whole run on two GPUs, as the command starts it: its processes end, and its metrics tell what it waited for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import suite

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_a_run_on_two_gpus_ends_and_measures_its_communication(tmp_path: Path, data_of) -> None:
    done = suite(
        "train", "benchmark=resnet", "scale=test", "scale.gpus_per_node=2", "micro_batch=8", "precision=fp16",
        f"data_dir={data_of('resnet')}", f"output_dir={tmp_path}/run", CUDA_VISIBLE_DEVICES="0,1",
    )  # fmt: skip
    assert done.code in (0, 10), done.errors
    for rank in (0, 1):
        steps = [json.loads(line) for line in (tmp_path / f"run/metrics_rank{rank}.jsonl").read_text().splitlines()]
        assert all(0 <= step["comm_wait_ms"] < 1e4 for step in steps)
        assert any("power_w" in step for step in steps)
    log = (tmp_path / "run/mlperf.log").read_text()
    assert '"key": "accelerators_per_node", "value": 2' in log


@pytest.mark.parametrize("sigma", [0, 100])
@pytest.mark.parametrize("features", ["peers", "host", "exchange"])
def test_ranks_that_share_a_graph_train_whether_or_not_blocks_fit(tmp_path: Path, data_of, features, sigma) -> None:
    # With no margin about half of the blocks of each rank are too large for the captured graph.
    done = suite(
        "train", "benchmark=rgat", "scale=test", "scale.gpus_per_node=2", "micro_batch=4", "precision=bf16",
        "benchmark.schedule.last_samples=64",
        f"reader.features={features}", "reader.graph=peers", f"reader.capacity_sigma={sigma}",
        f"data_dir={data_of('rgat')}", f"output_dir={tmp_path}/run", CUDA_VISIBLE_DEVICES="0,1",
    )  # fmt: skip
    assert done.code in (0, 10), done.errors
    of_rank = [
        [json.loads(line)["loss"] for line in (tmp_path / f"run/metrics_rank{rank}.jsonl").read_text().splitlines()]
        for rank in (0, 1)
    ]
    assert len(of_rank[0]) == len(of_rank[1]) == 8
    log = (tmp_path / "run/mlperf.log").read_text()
    assert log.count('"key": "eval_accuracy"') >= 1
