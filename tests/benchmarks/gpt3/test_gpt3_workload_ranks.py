"""Whole runs of GPT-3: on ranks that have other rows, share layers, or have other layers, against one rank."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from small_published import write_published

from common.mlperf.parsed_log import read_log
from tests.benchmarks.decoder_runs import (
    STEPS,
    TOLERANCE,
    check_that_a_layout_ends_with_the_weights_of_one,
    evaluated,
    largest_difference,
    run_on_one,
    state_of,
)
from tests.conftest import Finished, checkpoint, suite

NAME = "gpt3"


def run(data: Path, output: Path, *overrides: str) -> Finished:
    """Some steps of the ``test`` recipe in float64, 8 micro-batches of 2 rows each, and gradients that are clipped."""
    return suite(
        "train", f"benchmark={NAME}", "scale=test", "device=cpu", "seed=1234", "precision=fp64", "checkpoint_every=1",
        "keep_checkpoints=99",
        "hparams.global_batch_size=16", f"benchmark.schedule.last_samples={16 * STEPS}",
        f"benchmark.schedule.interval={16 * STEPS}", "benchmark.facts.warmup_samples=16",
        "benchmark.facts.max_grad_norm=0.5", "benchmark.facts.layers=8",
        f"data_dir={data}", f"output_dir={output}", *overrides,
    )  # fmt: skip


def records(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics_rank0.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(data_of, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one rank, through PyTorch's operations and autograd."""
    return run_on_one(run, data_of(NAME), tmp_path_factory.mktemp("whole"))


@pytest.mark.slow_cases("pp2", "pp4-2chunks", "dp2xpp2-sharded")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["scale.gpus_per_node=2", "layout.pp=2"], id="pp2"),
        pytest.param(["scale.gpus_per_node=2", "layout.pp=2", "model.chunks=2", "reader.eval_micro_batches=3"],
                     id="pp2-2chunks", marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=4", "layout.pp=4", "model.chunks=2", "reader.eval_micro_batches=4",
                      "model.put_off_head=3"],
                     id="pp4-2chunks"),
        pytest.param(["scale.gpus_per_node=4", "layout.pp=2", "layout.tp=2"], id="tp2xpp2"),
        pytest.param(["scale.gpus_per_node=4", "layout.pp=2", "optimizer.shard=all", "optimizer.bucket_mb=0.01"],
                     id="dp2xpp2-sharded"),
        pytest.param(["scale.gpus_per_node=4", "layout.pp=2", "layout.tp=2", "model.blocks=autograd"],
                     id="tp2xpp2-autograd", marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=4", "layout.pp=2", "model.chunks=2", "model.blocks=autograd",
                      "optimizer.shard=all", "optimizer.bucket_mb=0.01"], id="dp2xpp2-2chunks-sharded-autograd",
                     marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=2", "layout.tp=2"], id="tp2", marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=2", "evaluation.ranks=1"], id="evaluating", marks=pytest.mark.slow),
        pytest.param(["scale.gpus_per_node=3", "layout.tp=2", "evaluation.ranks=1"], id="tp2-evaluating",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ranks_end_with_the_weights_of_one(layout, whole, data_of, tmp_path):
    check_that_a_layout_ends_with_the_weights_of_one(run, layout, data_of(NAME), whole, tmp_path)
    for found, expected in zip(records(tmp_path), records(whole), strict=True):
        for name in ("loss", "gradient_norm", "learning_rate"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def test_gradients_were_clipped_and_the_rate_is_that_of_the_samples(whole):
    assert all(record["gradient_norm"] > 0.5 for record in records(whole))
    cosine = [0.0008 + 0.5 * 0.0072 * (1 + math.cos(math.pi * (samples - 16) / (400 - 16))) for samples in (16, 32)]
    assert [record["learning_rate"] for record in records(whole)] == pytest.approx([0.0, *cosine], rel=1e-6)
    assert 5.8 < records(whole)[0]["loss"] < 6.2  # near ln 400


def test_the_log_counts_tokens(whole):
    log = read_log(whole / "mlperf.log")
    (begin,), (evaluation,) = log.all("block_start"), log.all("eval_accuracy")
    assert (begin.metadata["first_epoch_num"], begin.metadata["epoch_count"]) == (0, 48 * 32)
    assert evaluation.metadata["epoch_num"] == 48 * 32
    assert [event.value for event in log.all("eval_samples")] == [7 * 31]


@pytest.mark.slow
def test_a_training_that_goes_on_from_a_published_checkpoint_is_the_one_that_made_it(whole, data_of, tmp_path):
    """Weights, moments, the counter of updates, the place in the rate's cosine and the next rows; on two stages."""
    made = checkpoint(whole, 2)
    (state,) = made["updaters"]
    weights = {name: tensor.float() for name, tensor in made["model"].items()}
    states = {kind: {name: t.float() for name, t in state[kind].items()} for kind in ("exp_avg", "exp_avg_sq")}
    write_published(tmp_path / "assets" / "checkpoint", {"weights": weights, **states}, 8, 2)
    done = run(
        data_of(NAME), tmp_path / "run", "scale.gpus_per_node=2", "layout.pp=2", f"assets_dir={tmp_path / 'assets'}",
        "benchmark.facts.checkpoint_samples=32", "benchmark.facts.checkpoint_steps=2",
        "benchmark.schedule.last_samples=16", "benchmark.schedule.interval=16",
    )  # fmt: skip
    assert done.code == 10, done.errors
    assert largest_difference(state_of(tmp_path / "run", 1), state_of(whole, 3)) < 1e-6  # the checkpoint is in fp32
    (record,) = records(tmp_path / "run")
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert record[name] == pytest.approx(records(whole)[2][name], rel=1e-6), name
    log = read_log(tmp_path / "run" / "mlperf.log")
    assert [event.value for event in log.all("init_checkpoint_step")] == [2]
    (evaluation,) = log.all("eval_accuracy")
    assert evaluation.metadata["epoch_num"] == 16 * 32  # counted from the checkpoint
    assert evaluation.value == pytest.approx(evaluated(whole)[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "onwards"),
    [
        pytest.param([], ["scale.gpus_per_node=2", "layout.pp=2", "model.chunks=2"], id="one-to-pp2"),
        pytest.param(["scale.gpus_per_node=2", "layout.pp=2"], ["scale.gpus_per_node=2", "layout.tp=2"],
                     id="pp2-to-tp2", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_run_goes_on_at_another_layout(layout, onwards, whole, data_of, tmp_path):
    before = whole
    if layout:
        before = tmp_path / "before"
        done = run(data_of(NAME), before, *layout)
        assert done.code == 10, done.errors
    saved = before / "checkpoints" / "step_00000002"
    done = run(data_of(NAME), tmp_path / "onwards", *onwards, f"resume={saved}")
    assert done.code == 10, done.errors
    assert largest_difference(state_of(tmp_path / "onwards"), state_of(whole)) < TOLERANCE
