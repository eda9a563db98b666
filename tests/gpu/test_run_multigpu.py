"""Test process groups of NCCL, and whole runs on two GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.config.system import Ctas
from common.distributed.layout import Layout
from tests.conftest import suite

pytestmark = pytest.mark.multigpu


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    found: dict[str, Any] = {}
    stages = Layout({"pp": world}, rank, device, ctas={"pp": Ctas(max=2)})
    groups = {f"link {first}": group for first, group in stages.links("pp", "purpose", around=True).items()}
    limited = Layout({"dp": world}, rank, device, ctas={"dp": Ctas(min=1, max=4)})
    groups["limited"] = limited.group("dp")
    groups["pairs"] = limited.subgroup("dp", 2)
    everyone = Layout({"dp": world}, rank, device).group("dp")
    assert everyone is dist.group.WORLD
    assert everyone.bound_device_id == device
    for name, group in groups.items():
        members = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(members, torch.tensor([rank], device=device), group=group)
        large = torch.full((1 << 22,), float(rank), device=device)
        dist.all_reduce(large, group=group)
        found[name] = members.tolist(), float(large[0]), float(large[-1])
    return found


def test_members_find_each_other_and_sums_are_right(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    for rank, found in enumerate(ranks):
        assert found["limited"][0] == list(range(world))
        for first in ((rank - 1) % world, rank):
            assert found[f"link {first}"][0] == sorted((first, (first + 1) % world))
        for members, first_sum, last_sum in found.values():
            assert first_sum == last_sum == sum(members)


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
