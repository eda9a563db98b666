"""Test the loss scale against hand-worked sequences, alone and in steps of an optimizer."""

from __future__ import annotations

import pytest
import torch
from update_oracle import build, rate_table, step

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.errors import CheckpointError
from common.optim.momentum import SGD
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.precision import LossScale
from common.step.train_step import Losses, TrainStep, accumulate

NO, YES = torch.tensor(False), torch.tensor(True)


def small(**options: float) -> LossScale:
    return LossScale("cpu", initial=8.0, growth_interval=3, **options)


def test_it_grows_after_an_interval_without_overflow_and_falls_at_each():
    scale, seen = small(), []
    for overflow in (0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0):
        scale.update(torch.tensor(bool(overflow)), NO)
        seen.append((scale.value.item(), scale.good_steps.item()))
    assert seen == [
        (8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (8, 0), (8, 1), (4, 0), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1)
    ]  # fmt: skip


def test_with_hysteresis_it_falls_from_the_second_overflow_in_a_row_on():
    scale, seen = small(hysteresis=2), []
    for overflow in (1, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0):
        scale.update(torch.tensor(bool(overflow)), NO)
        seen.append((scale.value.item(), scale.good_steps.item()))
    assert seen == [
        (8, -1), (8, 1), (8, -1), (4, -1), (2, -1), (2, 1), (2, 2), (2, -1), (2, 1), (2, 2), (4, 0)
    ]  # fmt: skip


def test_the_defaults_are_1024_doubled_after_2000_updates():
    scale = LossScale("cpu")
    for _ in range(1999):
        scale.update(NO, NO)
    assert scale.value.item() == 1024.0
    scale.update(NO, NO)
    assert scale.value.item() == 2048.0


@pytest.mark.parametrize("overflow", [NO, YES])
def test_a_skipped_iteration_leaves_it(overflow):
    scale = small()
    scale.update(NO, NO)
    scale.update(overflow, YES)
    assert (scale.value.item(), scale.good_steps.item()) == (8.0, 1)


def test_it_never_grows_beyond_what_is_finite():
    scale = LossScale("cpu", initial=2.0**127, growth_interval=1)
    scale.update(NO, NO)
    assert scale.value.item() == 2.0**127


def test_factors_of_one_make_it_constant():
    scale = LossScale("cpu", initial=20480.0, growth_interval=1, growth=1.0, backoff=1.0)
    for overflow in (NO, YES, NO):
        scale.update(overflow, NO)
        assert scale.value.item() == 20480.0


@pytest.mark.parametrize(
    "options",
    [
        {"initial": 0.0},
        {"growth_interval": 0},
        {"backoff": 1.5},
        {"growth": 0.5},
        {"hysteresis": 0},
        {"predivide": 0.0},
        {"predivide": -4.0},
        {"predivide": float("inf")},
        {"predivide": float("nan")},
    ],
)
def test_factors_without_sense_are_refused(options):
    with pytest.raises(ValueError, match="loss scale"):
        LossScale("cpu", **options)


class Tiny:
    """One fp16 weight of 8 elements whose loss is the sum of x * w."""

    def __init__(self, clip: ClipNorm | None = None) -> None:
        self.weight = torch.nn.Parameter(torch.ones(8, dtype=torch.float16))
        self.scale = small()
        groups = [ParameterGroup({"w": self.weight})]
        self.optimizer = Optimizer(
            groups, SGD(0.0), rate_table([1.0] * 9), Layout(), grad_divisor=1.0, loss_scale=self.scale, clip=clip
        )
        self.step = TrainStep(accumulate(self.loss, self.scale), [self.optimizer], Layout())

    def loss(self, batch: Batch) -> Losses:
        loss = (self.weight.float() * batch.tensors["x"]).sum()
        return Losses(loss, {"loss": loss})

    def iterate(self, x: float) -> bool:
        """Run one step, and return whether it overflowed."""
        result = self.step([Batch({"x": torch.full((8,), x)}, 1)])
        return self.step.read(result.names, result.values.tolist()).overflow


def test_a_gradient_too_small_for_fp16_survives():
    tiny = Tiny()
    x = 2.0**-26  # below half of fp16's smallest number, 2^-24; times 8 it is 2^-23
    tiny.iterate(x)
    assert tiny.optimizer.state_dict()["momentum"]["w"].tolist() == [-x] * 8


def test_overflow_halves_the_scale_and_writes_nothing_else():
    tiny = Tiny()
    tiny.iterate(0.25)
    before = tiny.optimizer.state_dict()
    assert tiny.iterate(60000.0)  # finite in fp16, but not times 8
    after = tiny.optimizer.state_dict()
    assert tiny.optimizer.metrics["loss_scale"].item() == 4.0
    assert after["step"].item() == before["step"].item() == 1
    assert torch.equal(after["masters"]["w"], before["masters"]["w"])
    assert torch.equal(after["momentum"]["w"], before["momentum"]["w"])


@pytest.mark.parametrize("when", ["before_reduction", "after_reduction"])
def test_clipping_sees_the_gradient_without_the_scale(when):
    unclipped, clipped = Tiny(ClipNorm(100.0, when)), Tiny(ClipNorm(1.0, when))
    for tiny in (unclipped, clipped):
        tiny.iterate(2.0)  # norm 2 * sqrt(8) = 5.66; times the scale of 8 it would be 45.3
    assert unclipped.optimizer.state_dict()["masters"]["w"].tolist() == [-1.0] * 8
    expected = 1.0 - 2.0 / (2.0 * 8**0.5 + 1e-6)
    assert clipped.optimizer.state_dict()["masters"]["w"].tolist() == pytest.approx([expected] * 8, rel=1e-3)


def test_scale_and_count_go_into_the_state_and_come_back():
    first, second = Tiny(), Tiny()
    for x in (0.25, 60000.0, 0.25):
        first.iterate(x)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert (second.scale.value.item(), second.scale.good_steps.item()) == (4.0, 1)
    assert {"loss_scale", "loss_scale_good_steps"} <= {name for name, _ in second.optimizer.named_state()}


def test_without_a_scale_the_state_has_none():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = build([ParameterGroup({"w": weight})], SGD(0.0), [1.0])
    step(optimizer, {weight: torch.ones(2)})
    assert set(optimizer.state_dict()) == {"step", "momentum"}
    assert "loss_scale" not in optimizer.metrics


def test_a_state_with_a_scale_does_not_fit_an_optimizer_without_one():
    optimizer = build([ParameterGroup({"w": torch.nn.Parameter(torch.ones(8, dtype=torch.float16))})], SGD(0.0), [1.0])
    with pytest.raises(CheckpointError, match="unexpected: loss_scale, loss_scale_good_steps"):
        optimizer.load_state_dict(Tiny().optimizer.state_dict())
