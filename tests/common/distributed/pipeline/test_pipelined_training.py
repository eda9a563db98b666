"""Stages of a small model with a tied embedding train, evaluate and resume as one rank that has all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from staged_ranks import LAYOUTS, MAX_NORM, SAMPLES_OF_A_STEP, SAVED_AFTER, STEPS, B, Trainee, place_of, run_rank

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.pipeline.links import Handed
from common.distributed.pipeline.order import most_in_flight, order
from common.errors import CheckpointError
from common.optim.groups import ParameterGroup, check_groups
from common.step.passes import Chunk
from common.step.pipeline import Pipeline
from common.step.train_step import Losses
from tests.gloo_ranks import on_ranks, results

CASES = [(world, name) for world, layouts in LAYOUTS.items() for name in layouts]
SHARDED = [(4, f"{name}, shards") for name, (axes, _) in LAYOUTS[4].items() if "dp" in axes]
RESUMED = [
    (world, f"{written} to {name}")
    for world, layouts in LAYOUTS.items()
    for index, name in enumerate(layouts)
    for written in ("single", *list(layouts)[: index + 1])
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the ranks of every layout have left what they found."""
    folder = tmp_path_factory.mktemp("stages")
    trainee = Trainee(Layout(seed=7))
    trainee.train(0, SAVED_AFTER)
    trainee.save(folder / "single")
    for world in LAYOUTS:
        on_ranks(run_rank, world, folder / f"of_{world}")
    return str(folder)


@pytest.fixture(scope="module")
def wanted() -> dict:
    """What one rank comes to."""
    trainee = Trainee(Layout(seed=7))
    metrics = trainee.train(0, STEPS)
    return {"metrics": metrics, "weights": trainee.weights(), "evaluated": trainee.evaluate(6)}


def found_by(folder: str, world: int, case: str) -> list[dict]:
    return [found[case] for found in results(world, Path(folder, f"of_{world}"))]


@pytest.mark.parametrize(("world", "case"), [*CASES, *SHARDED, *RESUMED])
def test_weights_are_those_of_one_rank(folder, wanted, world, case):
    every = found_by(folder, world, case)
    assert set().union(*(found["weights"] for found in every)) == set(wanted["weights"])
    for found in every:
        for name, weight in found["weights"].items():
            torch.testing.assert_close(weight, wanted["weights"][name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("world", "case"), [*CASES, *SHARDED])
def test_every_rank_reads_the_metrics_of_one(folder, wanted, world, case):
    for found in found_by(folder, world, case):
        for step, (own, of_one) in enumerate(zip(found["metrics"], wanted["metrics"], strict=True)):
            for name in ("loss", "gradient_norm", "learning_rate"):
                assert own[name] == pytest.approx(of_one[name], rel=1e-6), (step, name)
    assert min(metrics["gradient_norm"] for metrics in wanted["metrics"]) > MAX_NORM  # so that clipping counts


@pytest.mark.parametrize("way", ["warm", "graphs"])
@pytest.mark.parametrize(("world", "case"), [*CASES, *SHARDED])
def test_warm_up_with_its_rehearsal_and_graphs_of_chunks_change_no_bit(folder, world, case, way):
    for eager, other in zip(found_by(folder, world, case), found_by(folder, world, f"{case}, {way}"), strict=True):
        for name, weight in other["weights"].items():
            assert torch.equal(weight, eager["weights"][name]), name
        for step, (own, of_eager) in enumerate(zip(other["metrics"], eager["metrics"], strict=True)):
            for name in ("loss", "gradient_norm", "learning_rate"):
                assert own[name] == of_eager[name], (step, name)


@pytest.mark.parametrize(("world", "case"), [*CASES, *SHARDED])
def test_every_pass_of_a_step_is_a_replay_and_forward_passes_share_no_memory(folder, world, case):
    axes, chunks = LAYOUTS[world][case.removesuffix(", shards")]
    micro_batches = SAMPLES_OF_A_STEP // B // axes.get("dp", 1)
    for stage, found in enumerate(found_by(folder, world, f"{case}, graphs")):
        assert found["replays"] == STEPS * 2 * chunks * micro_batches
        pools = [pool for _, pool in found["recorded"]]
        forward = [pool for pool in pools if pool != "backward"]
        assert pools == [*forward, *["backward"] * len(forward)]
        assert len(set(forward)) == len(forward)
        units = order(stage // axes.get("dp", 1), axes["pp"], chunks, micro_batches)
        assert most_in_flight(units) <= len(forward) < chunks * micro_batches or micro_batches <= axes["pp"]


@pytest.mark.parametrize(("world", "case"), [*CASES, *SHARDED])
def test_evaluation_goes_through_the_stages(folder, wanted, world, case):
    for found in found_by(folder, world, case):
        assert found["evaluated"] == pytest.approx(wanted["evaluated"], abs=1e-10)


@pytest.mark.parametrize(("world", "case"), [*CASES, *SHARDED])
def test_a_rehearsal_takes_all_passes_and_waits_for_no_rank(folder, world, case):
    for found in found_by(folder, world, case):
        assert set(found["rehearsed"]) == set(found["weights"])
        assert all(norm > 0 for norm in found["rehearsed"].values())


@pytest.mark.parametrize(("world", "case"), CASES)
def test_both_ends_keep_the_same_bits_of_the_tied_weight(folder, world, case):
    first, *others = [
        found["weights"]["words"] for found in found_by(folder, world, case) if "words" in found["weights"]
    ]
    assert others
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("world", "case"), CASES)
def test_one_rank_goes_on_from_the_checkpoint_of_all_stages(folder, wanted, world, case):
    trainee = Trainee(Layout(seed=7))
    trainee.load(place_of(folder, case))
    trainee.train(SAVED_AFTER, STEPS)
    for name, weight in trainee.weights().items():
        torch.testing.assert_close(weight, wanted["weights"][name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("world", "case"), CASES)
def test_sent_activations_are_freed_before_the_backward_pass(folder, world, case):
    for found in found_by(folder, world, case):
        assert found["alive"] <= 1  # the last one, before the loop comes to the next unit


def test_a_chunk_is_reduced_while_others_have_more_to_do(folder):
    for found in found_by(folder, 4, "pp2 x 2 x dp2"):
        assert found["reduced before the last chunk"] > 0


def test_reductions_start_only_with_the_last_backward_pass_of_one_chunk(folder):
    for found in found_by(folder, 4, "pp2 x dp2"):
        assert found["reduced before the last chunk"] == 0


def alone(forward) -> None:
    layout = Layout()
    weight = torch.nn.Linear(1, 1)
    pipeline = Pipeline(layout, 1, 1, lambda batch: Handed((1,), torch.float32))
    passes = pipeline.forward_backward([Chunk(weight, lambda x, batch: forward(weight))], ["loss"])
    passes([Batch({}, 1)], lambda part=None: None, lambda: None)


def test_a_last_part_without_losses_is_an_error():
    with pytest.raises(ValueError, match="chunk 0 is the last part of the model and has no losses"):
        alone(lambda layer: layer.weight * 1)


def test_metrics_that_other_stages_do_not_know_are_an_error():
    with pytest.raises(ValueError, match=r"the losses report \['accuracy', 'loss'\], .* built for \['loss'\]"):
        alone(lambda layer: Losses(layer.weight.sum(), {"loss": torch.ones(()), "accuracy": torch.ones(())}))


def test_another_number_of_chunks_is_an_error():
    pipeline = Pipeline(Layout(), 1, 1, lambda batch: Handed((1,), torch.float32))
    with pytest.raises(ValueError, match="0 chunks where the pipeline has 1"):
        pipeline.forward_backward([], [])


@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_axes_whose_ranks_all_hold_the_weights_tie_nothing(axis):
    group = ParameterGroup({"w": torch.nn.Parameter(torch.ones(2))}, tied_over=(axis,))
    with pytest.raises(ValueError, match=f"tied_over names '{axis}'"):
        check_groups([group])


def test_a_checkpoint_of_another_depth_is_another_model(folder):
    trainee = Trainee(Layout(seed=7), depth=6)
    with pytest.raises(CheckpointError, match=r"another model: .*layers\.6"):
        trainee.load(place_of(folder, "pp2"))
