"""Whole runs of Llama-2 LoRA: on ranks that share rows or layers, from a stored base, and with another one later."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.benchmarks.decoder_runs import (
    SHARED_BY_FOUR,
    STEPS,
    TOLERANCE,
    check_that_a_layout_ends_with_the_weights_of_one,
    check_that_shards_go_on_from_one_rank_and_one_rank_from_them,
    largest_difference,
    run_on_one,
    state_of,
)
from tests.conftest import Finished, checkpoint, flatten, prepared, suite

NAME = "llama2_70b_lora"


def run(data: Path, output: Path, *overrides: str) -> Finished:
    """Some steps of the ``test`` recipe in float64, from the stored base, dropout included."""
    return suite(
        "train", f"benchmark={NAME}", "scale=test", "device=cpu", "seed=1234", "precision=fp64", "checkpoint_every=1",
        "keep_checkpoints=99", f"hparams.training_steps={STEPS}", f"benchmark.schedule.interval={4 * STEPS}",
        f"data_dir={data}", f"assets_dir={data}-assets", f"output_dir={output}", *overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(data_of, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one rank, through PyTorch's operations and autograd."""
    return run_on_one(run, data_of(NAME), tmp_path_factory.mktemp("whole"))


@pytest.mark.slow_cases("cp2", "tp2")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["scale.gpus_per_node=2", "layout.cp=2"], id="cp2"),
        pytest.param(SHARED_BY_FOUR, id="dp2xcp2-sharded"),
        pytest.param(["scale.gpus_per_node=2", "layout.tp=2"], id="tp2"),
        pytest.param(["scale.gpus_per_node=3", "evaluation.ranks=2", "evaluation.layout.tp=2"], id="evaluating-tp2"),
        pytest.param(["scale.gpus_per_node=3", "evaluation.ranks=1", "layout.cp=2"], id="cp2-evaluating",
                     marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=4", "layout.tp=2", "layout.cp=2"], id="tp2xcp2", marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=4", "layout.tp=2", "layout.cp=2", "optimizer.shard=node"],
                     id="tp2xcp2-sharded", marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=2", "layout.cp=2", "model.blocks=autograd"], id="cp2-autograd",
                     marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=2", "layout.tp=2", "model.recomputed_qkv=1"], id="tp2-recomputed",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ranks_that_share_rows_or_layers_end_with_the_weights_of_one(layout, whole, data_of, tmp_path):
    check_that_a_layout_ends_with_the_weights_of_one(run, layout, data_of(NAME), whole, tmp_path)


def test_dropout_and_the_stored_base_matter(whole, data_of, tmp_path):
    for name, override in (("kept", "benchmark.facts.lora_dropout=0.0"), ("drawn", "assets_dir=null")):
        done = run(data_of(NAME), tmp_path / name, override)
        assert done.code == 10, done.errors
        assert largest_difference(state_of(tmp_path / name), state_of(whole)) > 1e-3


def test_the_learning_rate_follows_half_a_cosine_from_the_first_step(whole):
    records = [json.loads(line) for line in (whole / "metrics_rank0.jsonl").read_text().splitlines()]
    expected = [0.02 * 0.5 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)]
    assert [record["learning_rate"] for record in records] == pytest.approx(expected, rel=1e-6)


def test_every_update_of_these_runs_is_clipped(whole):
    records = [json.loads(line) for line in (whole / "metrics_rank0.jsonl").read_text().splitlines()]
    assert len(records) == STEPS
    assert all(record["gradient_norm"] > 0.3 for record in records)  # benchmark.facts.max_grad_norm


def test_a_checkpoint_holds_the_adapters_alone_and_goes_on_at_another_layout(whole, data_of, tmp_path):
    saved = whole / "checkpoints" / "step_00000001"
    held = flatten(checkpoint(whole, 1)["model"])
    assert held
    assert all(".lora_" in name for name in held)
    done = run(data_of(NAME), tmp_path, "scale.gpus_per_node=2", "layout.tp=2", f"resume={saved}")
    assert done.code == 10, done.errors
    assert largest_difference(state_of(tmp_path), state_of(whole)) < TOLERANCE


def test_shards_over_replicas_and_rows_go_on_from_one_rank_and_one_rank_from_them(whole, data_of, tmp_path):
    check_that_shards_go_on_from_one_rank_and_one_rank_from_them(run, data_of(NAME), whole, tmp_path)


def test_adapters_of_another_base_are_refused(whole, data_of, tmp_path):
    other = prepared(NAME, tmp_path / "other", ["--seed", "5"])
    saved = whole / "checkpoints" / "step_00000001"
    done = run(data_of(NAME), tmp_path / "run", f"resume={saved}", f"assets_dir={other}-assets")
    assert done.code == 4, done.errors
    assert "Traceback" not in done.errors
    stored = torch.load(saved / "rank_0.pt", weights_only=True)["base"]
    assert stored in done.errors
