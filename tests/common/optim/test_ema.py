"""Test averages of weights against the recursion in float64 NumPy, on one rank and sharded over two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sharded_ranks import ITERATIONS, LANES, Trainee, difference
from torch import Tensor

from common.distributed.layout import Layout
from common.errors import CheckpointError
from common.optim.ema import WeightAverage
from common.run import checkpoint
from common.run.checkpoint import Progress
from common.step.train_step import TrainStep, accumulate
from tests.capturable import Capturable
from tests.gloo_ranks import on_ranks, results

DECAY = 0.75
SHARDS: dict[str, dict[str, Any]] = {"none": {}, "all": {"shard": "all"}, "late": {"shard": "all", "blocks": False}}
RESUMED = {"float64": torch.float64, "bfloat16": torch.bfloat16}


class Averaged(Trainee):
    """A trainee whose step averages the weights after the optimizer's update."""

    def __init__(self, layout: Layout, rule: str = "lamb", dtype: torch.dtype = torch.float64, **options: Any) -> None:
        super().__init__(layout, rule, dtype, **options)
        self.average = WeightAverage(self.optimizer, DECAY)
        self.step = TrainStep(accumulate(self.loss), [self.optimizer, self.average], layout)

    def averages(self) -> dict[str, Tensor]:
        """Return copies of the averages."""
        return {name: weight.clone() for name, weight in self.average.weights().items()}

    def everything(self) -> dict[str, Tensor]:
        kept = {f"{name} of the average": tensor.clone() for name, tensor in self.average.named_state()}
        return super().everything() | kept


def averaged(layout: Layout, **options: Any) -> dict[str, Tensor]:
    """Return the averages after some steps."""
    trainee = Averaged(layout, **options)
    for iteration in range(ITERATIONS):
        trainee.iterate(iteration)
    return trainee.averages()


def changed(layout: Layout, how: str, **options: Any) -> list[str]:
    """Return the names of the tensors that a step changed which was skipped, or in which the last micro-batch
    overflowed."""
    trainee = Averaged(layout, **options)
    trainee.iterate(0)
    before = trainee.everything() | trainee.averages()
    trainee.step.skip.fill_(how == "skip")
    trainee.iterate(1, lambda lane, x_BC: x_BC * float("inf") if how == "overflow" and lane == LANES - 1 else x_BC)
    after = trainee.everything() | trainee.averages()
    return [name for name in before if not torch.equal(after[name], before[name])]


def save(layout: Layout, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Write a checkpoint after two steps. Return the averages then, and after one more step."""
    trainee = Averaged(layout, dtype=dtype, shard="all")
    for iteration in range(2):
        trainee.iterate(iteration)
    at = trainee.averages()
    checkpoint.save(folder, Progress(step=2, position=2), 7, {}, trainee.model, trainee.step.updaters, layout)
    trainee.iterate(2)
    return _two_points(at, trainee.averages())


def resume(layout: Layout, folder_of_case: Path, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Return the averages of a checkpoint, and after one more step."""
    trainee = Averaged(layout, dtype=dtype, **options)
    trainee.iterate(9)  # what was there before must not matter
    content = checkpoint.read(folder_of_case, {}, layout)
    progress = checkpoint.restore(content, trainee.model, trainee.step.updaters, layout)
    at = trainee.averages()
    trainee.iterate(progress.step)
    return _two_points(at, trainee.averages())


def _two_points(at: dict[str, Tensor], later: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"at.{n}": t for n, t in at.items()} | {f"later.{n}": t for n, t in later.items()}


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Return the results of all cases on one of ``world`` ranks."""
    layout = Layout({"dp": world}, rank, seed=7)
    found: dict[str, Any] = {f"averaged/{name}": averaged(layout, **options) for name, options in SHARDS.items()}
    for how in ("skip", "overflow"):
        found[how] = changed(layout, how, shard="all", dtype=torch.bfloat16)
    for name, dtype in RESUMED.items():
        folder_of_case = Path(folder, name)
        found[f"saved/{name}"] = save(layout, folder_of_case, dtype)
        found[f"resumed/{name}"] = resume(layout, folder_of_case / "step_00000002", dtype, shard="all")
    return found


TOLERANCE = 1e-12  # of float64 sums in another order, relative to the norm


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results and checkpoints of two ranks."""
    folder: Path = tmp_path_factory.mktemp("averages")
    on_ranks(run_rank, 2, folder)
    return folder


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[str, Any]]:
    """Return the results of each of two ranks, by case."""
    return results(2, root)


def equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Return whether all tensors have the same bits."""
    assert ours.keys() == expected.keys()
    return all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


def masters(trainee: Averaged) -> dict[str, np.ndarray]:
    """Return the averaged tensors in float64: the masters of half-precision weights, or the weights."""
    kept = trainee.optimizer.state_dict().get("masters") or trainee.weights()
    return {name: weight.double().numpy().copy() for name, weight in kept.items()}


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)], ids=str
)
def test_the_average_follows_the_recursion(dtype, rtol):
    trainee = Averaged(Layout(seed=7), dtype=dtype)
    expected = masters(trainee)
    for iteration in range(4):
        trainee.iterate(iteration)
        now = masters(trainee)
        expected = {name: DECAY * average + (1.0 - DECAY) * now[name] for name, average in expected.items()}
    ours = trainee.average.state_dict()["average"]
    assert ours.keys() == expected.keys()
    for name, average in expected.items():
        assert ours[name].dtype == torch.promote_types(dtype, torch.float32)
        np.testing.assert_allclose(ours[name].double().numpy(), average, rtol=rtol, atol=rtol * np.abs(average).max())
    evaluated = trainee.average.weights()
    assert all(torch.equal(evaluated[name], average.to(dtype)) for name, average in ours.items())


def test_it_starts_as_a_copy_of_the_initial_weights():
    trainee = Averaged(Layout(seed=7), dtype=torch.bfloat16)
    assert equal(trainee.averages(), trainee.weights())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_is_evaluated_is_not_the_memory_of_the_weights_in_training(dtype):
    trainee, plain = Averaged(Layout(seed=7), dtype=dtype), Averaged(Layout(seed=7), dtype=dtype)
    for iteration in range(2):
        trainee.iterate(iteration)
        plain.iterate(iteration)
        for weight in trainee.average.weights().values():
            assert not any(weight.data_ptr() == p.data_ptr() for p in trainee.model.parameters())
    assert equal(trainee.weights(), plain.weights())
    assert difference(trainee.averages(), trainee.weights()) > 1e-3, "an average is not the last weight"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["skip", "overflow"])
def test_an_iteration_that_may_write_nothing_leaves_the_average(how, dtype):
    assert changed(Layout(seed=7), how, dtype=dtype) == []


def test_an_iteration_that_may_write_nothing_leaves_every_shard(found):
    assert [(rank["skip"], rank["overflow"]) for rank in found] == [([], [])] * 2


def test_writing_nothing_leaves_the_sign_of_a_zero():
    trainee = Averaged(Layout(seed=7))
    with torch.no_grad():
        for parameter in trainee.model.parameters():
            parameter.fill_(-0.0)
    average = WeightAverage(trainee.optimizer, DECAY)
    before = [tensor.signbit() for _, tensor in average.named_state()]
    average.write(torch.zeros((), dtype=torch.bool))
    assert all(
        torch.equal(tensor.signbit(), sign) for (_, tensor), sign in zip(average.named_state(), before, strict=True)
    )


def test_a_graph_can_hold_its_part_of_the_step():
    trainee = Averaged(Layout(seed=7))
    allowed = torch.ones((), dtype=torch.bool)
    with Capturable():
        trainee.average.begin()
        trainee.average.measure()
        trainee.average.write(allowed)


@pytest.mark.parametrize("name", list(SHARDS))
def test_two_ranks_average_what_one_does(found, name):
    expected = averaged(Layout(seed=7))
    for rank in found:
        assert difference(rank[f"averaged/{name}"], expected) < TOLERANCE
    assert equal(found[0][f"averaged/{name}"], found[1][f"averaged/{name}"])


@pytest.mark.parametrize("name", list(RESUMED))
def test_a_checkpoint_goes_on_with_the_same_bits(found, name):
    for rank in found:
        assert equal(rank[f"resumed/{name}"], rank[f"saved/{name}"])


@pytest.mark.parametrize("name", list(RESUMED))
def test_a_checkpoint_of_two_ranks_gives_one_rank_the_same_bits(root, found, name):
    resumed = resume(Layout(seed=7), root / name / "step_00000002", RESUMED[name])
    saved = found[0][f"saved/{name}"]
    at = {weight: tensor for weight, tensor in saved.items() if weight.startswith("at.")}
    assert equal({weight: resumed[weight] for weight in at}, at)
    later = {weight: tensor.double() for weight, tensor in saved.items() if weight.startswith("later.")}
    close = TOLERANCE if name == "float64" else 1e-2  # a bfloat16 gradient has 8 bits
    assert difference({weight: resumed[weight].double() for weight in later}, later) < close


def test_a_state_that_does_not_fit_changes_nothing():
    trainee = Averaged(Layout(seed=7))
    trainee.iterate(0)
    before, state = trainee.everything(), trainee.average.state_dict()
    del state["average"]["gain"]
    with pytest.raises(CheckpointError, match=r"missing: average\.gain"):
        trainee.average.load_state_dict(state)
    with pytest.raises(CheckpointError, match="missing"):
        trainee.average.load_state_dict({})
    assert equal(trainee.everything(), before)


def test_the_first_update_that_is_allowed_copies_the_weights():
    trainee = Averaged(Layout(seed=7))
    average = WeightAverage(trainee.optimizer, DECAY, copies_first=True)
    initial, weights = masters(trainee), []
    for iteration, allowed in enumerate((False, True, True)):
        trainee.iterate(iteration)
        weights.append(masters(trainee))
        average.measure()
        average.write(torch.tensor(allowed))
        for name, found in average.weights().items():
            later = DECAY * weights[min(iteration, 1)][name] + (1.0 - DECAY) * weights[-1][name]
            expected = (initial[name], weights[-1][name], later)[iteration]
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-14, atol=1e-14)


def test_the_number_of_updates_is_part_of_the_state_if_the_first_one_copies():
    trainee = Averaged(Layout(seed=7))
    average, resumed = (WeightAverage(trainee.optimizer, DECAY, copies_first=True) for _ in range(2))
    average.measure()
    average.write(torch.tensor(True))
    saved = average.state_dict()
    assert saved["updates"] == 1
    resumed.load_state_dict(saved)
    trainee.iterate(0)
    for each in (average, resumed):
        each.measure()
        each.write(torch.tensor(True))
    assert equal(resumed.weights(), average.weights())
    assert difference(resumed.weights(), trainee.weights()) > 1e-3, "the second update of the average is no copy"
    with pytest.raises(CheckpointError, match="missing: updates"):
        resumed.load_state_dict({"average": saved["average"]})
    with pytest.raises(CheckpointError, match="unexpected: updates"):
        trainee.average.load_state_dict(saved)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_without_sense_is_refused(decay):
    with pytest.raises(ValueError, match="decay="):
        WeightAverage(Averaged(Layout(seed=7)).optimizer, decay)
