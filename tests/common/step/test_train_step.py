"""The order of an iteration and what its result takes from the updaters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.optim.adaptive import AdamW
from common.optim.learning_rate import constant
from common.optim.momentum import SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from common.optim.precision import LossScale
from common.step.train_step import SAMPLES, Losses, TrainStep, accumulate


class Recorder:
    """An updater that records its calls."""

    loss_scale = None

    def __init__(self, calls: list[str], overflow: bool = False, **metrics: float) -> None:
        self._calls = calls
        self._overflow = torch.tensor(overflow)
        self.metrics = {name: torch.tensor(value) for name, value in metrics.items()}

    def begin(self) -> None:
        self._calls.append("begin")

    def arm(self) -> None:
        self._calls.append("arm")

    def collect(self) -> None:
        self._calls.append("collect")

    def measure(self) -> Tensor:
        self._calls.append("measure")
        return self._overflow

    def write(self, allowed: Tensor) -> None:
        self._calls.append("write" if allowed else "write nothing")

    def materialize(self) -> None:
        self._calls.append("materialize")


class Doubling(torch.autograd.Function):
    """Notes forward and backward passes."""

    @staticmethod
    def forward(ctx, x, calls):
        ctx.calls = calls
        calls.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.calls.append(f"backward {gradient.item():g}")
        return gradient * 2, None


def test_an_iteration_arms_before_the_last_backward_and_collects_after_each():
    calls = []
    weight = torch.tensor(1.0, requires_grad=True)

    def loss(batch: Batch) -> Losses:
        return Losses(Doubling.apply(weight, calls), {"loss": batch.tensors["x"]})

    step = TrainStep(accumulate(loss), [Recorder(calls, learning_rate=0.5)], Layout())
    result = step([Batch({"x": torch.tensor(x)}, 1) for x in (1.0, 4.0)])
    assert calls == [
        "begin", "forward", "backward 1", "collect", "forward", "arm", "backward 1", "collect", "measure", "write"
    ]  # fmt: skip
    assert step.read(result.names, result.values.tolist()).metrics == {"loss": 2.5, "learning_rate": 0.5}


def test_micro_batches_after_the_first_run_in_a_context_of_their_own():
    calls = []
    weight = torch.tensor(1.0, requires_grad=True)

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        calls.append("enter")
        yield
        calls.append("exit")

    passes = accumulate(lambda _: Losses(Doubling.apply(weight, calls), {}), again=again)
    passes([Batch({}, 1)] * 3, lambda: None, lambda: calls.append("collect"))
    own = ["forward", "backward 1"]
    assert calls == [*own, "collect", *["enter", *own, "exit", "collect"] * 2]


def test_the_loss_is_scaled_before_the_backward_pass_alone():
    calls = []
    weight = torch.tensor(1.0, requires_grad=True)

    def loss(_: Batch) -> Losses:
        total = Doubling.apply(weight, calls)
        return Losses(total, {"loss": total.detach()})

    metrics = accumulate(loss, LossScale("cpu", 256.0))([Batch({}, 1)], lambda: None, lambda: None)
    assert calls == ["forward", "backward 256"]
    assert metrics["loss"].item() == 2.0


def test_real_samples_are_added_up_over_micro_batches():
    weight = torch.tensor(1.0, requires_grad=True)

    def loss(batch: Batch) -> Losses:
        return Losses(weight * 1.0, {"loss": weight.detach(), SAMPLES: batch.tensors["count"]})

    step = TrainStep(accumulate(loss), [Recorder([])], Layout())
    result = step([Batch({"count": torch.tensor(count)}, 4) for count in (3, 5, 2)])
    read = step.read(result.names, result.values.tolist())
    assert read.samples == 10
    assert read.metrics == {"loss": 1.0}


@pytest.mark.parametrize(("replicas", "of_a_sample"), [(4, 1), (2, 2), (3472, 1)])
def test_real_samples_are_added_up_over_replicas_not_over_ranks_that_share_a_sample(replicas, of_a_sample):
    step = TrainStep(lambda *_: {}, [], Layout())
    step.layout = SimpleNamespace(world_size=replicas * of_a_sample, size=lambda axis: {"dp": replicas}[axis])
    # what an all-reduce over all ranks makes of four samples on each: stop, overflow, samples, reached
    read = step.read((SAMPLES,), [0.0, 0.0, 4.0 * replicas * of_a_sample, 0.0])
    assert read.samples == 4 * replicas


def test_a_workload_that_counts_no_samples_reports_none():
    step = TrainStep(lambda *_: {}, [Recorder([])], Layout())
    result = step([])
    assert step.read(result.names, result.values.tolist()).samples is None


def test_waits_of_several_updaters_are_added_and_any_overflow_counts():
    first = Recorder([], learning_rate=0.5, comm_wait_ms=1.0)
    second = Recorder([], overflow=True, learning_rate=0.125, comm_wait_ms=2.0, loss_scale=8.0)
    step = TrainStep(lambda *_: {}, [first, second], Layout())
    result = step([])
    read = step.read(result.names, result.values.tolist())
    assert read.metrics == {"learning_rate": 0.5, "comm_wait_ms": 3.0, "loss_scale": 8.0}
    assert read.overflow
    assert not read.stop


@pytest.mark.parametrize(("first", "second", "skip"), [(False, True, 0.0), (True, False, 0.0), (False, False, 1.0)])
def test_all_updaters_measure_before_any_writes_and_one_decision_holds_for_all(first, second, skip):
    calls = []
    step = TrainStep(lambda *_: {}, [Recorder(calls, first), Recorder(calls, second)], Layout())
    step.skip.fill_(skip)
    step([])
    assert calls == ["begin", "begin", "measure", "measure", "write nothing", "write nothing"]


class Pair:
    """Two fp16 weights of 4 elements with an optimizer each, and one loss scale; the loss is the sum of x * w."""

    def __init__(self) -> None:
        self.scale = LossScale("cpu", initial=8.0, growth_interval=3)
        self.weights = [nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2)]
        self.optimizers = [
            Optimizer(
                [ParameterGroup({"w": weight})], rule, constant(0.5), Layout(), grad_divisor=1.0, loss_scale=self.scale
            )
            for weight, rule in zip(self.weights, (SGD(0.9), AdamW()), strict=True)
        ]
        self.step = TrainStep(accumulate(self.loss, self.scale), self.optimizers, Layout())

    def loss(self, batch: Batch) -> Losses:
        total = sum((w.float() * x).sum() for w, x in zip(self.weights, batch.tensors["x"], strict=True))
        return Losses(total, {"loss": total})

    def iterate(self, *x: float) -> bool:
        """One iteration with these gradients; whether it reports an overflow."""
        result = self.step([Batch({"x": torch.tensor(x)}, 1)])
        return self.step.read(result.names, result.values.tolist()).overflow

    def written(self) -> list[torch.Tensor]:
        """Copies of all that updaters write, without the loss scale."""
        states = [t for o in self.optimizers for name, t in o.named_state() if not name.startswith("loss_scale")]
        return [tensor.detach().clone() for tensor in (*self.weights, *states)]


@pytest.mark.parametrize("gradients", [(float("inf"), 1.0), (1.0, float("nan"))])
def test_an_overflow_of_one_updater_keeps_both_from_writing_and_halves_the_loss_scale_once(gradients):
    pair = Pair()
    assert not pair.iterate(1.0, 1.0)
    before = pair.written()
    assert pair.iterate(*gradients)
    assert all(torch.equal(a, b) for a, b in zip(before, pair.written(), strict=True))
    assert (pair.scale.value.item(), pair.scale.good_steps.item()) == (4.0, 0)


def test_a_loss_scale_of_two_updaters_counts_an_iteration_once():
    pair = Pair()
    for _ in range(4):
        pair.iterate(1.0, 1.0)
    assert (pair.scale.value.item(), pair.scale.good_steps.item()) == (16.0, 1)
    assert [optimizer.state_dict()["step"].item() for optimizer in pair.optimizers] == [4, 4]


def test_materialize_reaches_every_updater():
    calls = []
    TrainStep(lambda *_: {}, [Recorder(calls), Recorder(calls)], Layout()).materialize()
    assert calls == ["materialize", "materialize"]


class Limited(Recorder):
    """An updater whose limits every batch exceeds."""

    def check_limits(self, metrics: MutableMapping[str, float]) -> None:
        if metrics.pop("too_much") > 0:
            raise ConfigError("there is too much")


@pytest.mark.parametrize("too_much", [0.0, 2.0])
def test_an_updater_that_had_too_much_to_do_ends_the_run(too_much):
    parameter = nn.Parameter(torch.ones(()))
    step = TrainStep(
        accumulate(lambda batch: Losses(parameter * 1, {"loss": parameter.detach()})),
        [Recorder([], learning_rate=0.5), Limited([], too_much=too_much)],
        Layout(),
    )
    result = step([Batch({}, 1, 0)])
    if too_much:
        with pytest.raises(ConfigError, match="there is too much"):
            step.read(result.names, result.values.tolist())
    else:
        assert step.read(result.names, result.values.tolist()).metrics == {"loss": 1.0, "learning_rate": 0.5}
