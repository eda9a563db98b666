"""Whole runs of Llama 3.1: on ranks that have other rows, share rows, share layers, or only evaluate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.decoder_runs import (
    SHARED_BY_FOUR,
    STEPS,
    check_that_a_layout_ends_with_the_weights_of_one,
    check_that_shards_go_on_from_one_rank_and_one_rank_from_them,
    run_on_one,
)
from tests.conftest import Finished, suite

NAME = "llama31_8b"


def run(data: Path, output: Path, *overrides: str) -> Finished:
    """Some steps of the ``test`` recipe in float64."""
    return suite(
        "train", f"benchmark={NAME}", "scale=test", "device=cpu", "seed=1234", "precision=fp64", "checkpoint_every=1",
        "keep_checkpoints=99", f"benchmark.schedule.last_samples={4 * STEPS}",
        f"benchmark.schedule.interval={4 * STEPS}", f"data_dir={data}", f"output_dir={output}", *overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(data_of, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one rank, through PyTorch's operations and autograd."""
    return run_on_one(run, data_of(NAME), tmp_path_factory.mktemp("whole"))


@pytest.mark.slow_cases("dp2-sharded", "cp2-sharded-recomputed")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["scale.gpus_per_node=2", "optimizer.shard=all", "optimizer.bucket_mb=0.01"], id="dp2-sharded"),
        pytest.param(["scale.gpus_per_node=2", "layout.cp=2", "optimizer.shard=all", "model.recomputed_gate_up=1"],
                     id="cp2-sharded-recomputed"),
        pytest.param(["scale.gpus_per_node=2", "layout.tp=2"], id="tp2"),
        pytest.param(["scale.gpus_per_node=2", "layout.tp=2", "model.blocks=autograd"], id="tp2-autograd",
                     marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=2", "evaluation.ranks=1"], id="evaluating", marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=4", "layout.cp=2"], id="dp2xcp2", marks=pytest.mark.slow),
        pytest.param(SHARED_BY_FOUR, id="dp2xcp2-sharded"),
        pytest.param(["scale.gpus_per_node=4", "layout.cp=2", "layout.tp=2"], id="cp2xtp2", marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=4", "layout.cp=2", "layout.tp=2", "optimizer.shard=node"],
                     id="cp2xtp2-sharded", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ranks_end_with_the_weights_of_one(layout, whole, data_of, tmp_path):
    check_that_a_layout_ends_with_the_weights_of_one(run, layout, data_of(NAME), whole, tmp_path)


@pytest.mark.slow
def test_shards_over_replicas_and_rows_go_on_from_one_rank_and_one_rank_from_them(whole, data_of, tmp_path):
    check_that_shards_go_on_from_one_rank_and_one_rank_from_them(run, data_of(NAME), whole, tmp_path)


def test_losses_rates_and_norms_are_reported(whole):
    records = [json.loads(line) for line in (whole / "metrics_rank0.jsonl").read_text().splitlines()]
    assert [record["learning_rate"] for record in records] == pytest.approx(
        [0.008 * n / 3 for n in (1, 2, 3)], rel=1e-6
    )
    assert all(5.0 < record["loss"] < 6.0 for record in records)  # near ln 256
    assert all(record["gradient_norm"] > 1.0 for record in records)  # so that every update here is clipped
