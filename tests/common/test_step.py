"""The order of an iteration and what its report takes from the updaters."""

from __future__ import annotations

import torch
from torch import Tensor

from common.data.source import Batch
from common.distributed.layout import Layout
from common.precision import LossScale
from common.step import TrainStep, accumulate
from common.workload import Losses


class Recorder:
    """An updater that notes what it is told to do."""

    def __init__(self, calls: list[str], **metrics: float) -> None:
        self._calls = calls
        self.metrics = {name: torch.tensor(value) for name, value in metrics.items()}

    def begin(self) -> None:
        self._calls.append("begin")

    def arm(self) -> None:
        self._calls.append("arm")

    def collect(self) -> None:
        self._calls.append("collect")

    def update(self, skip: Tensor) -> None:
        self._calls.append("update")

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
    calls: list[str] = []
    weight = torch.tensor(1.0, requires_grad=True)

    def loss(batch: Batch) -> Losses:
        return Losses(Doubling.apply(weight, calls), {"loss": batch.tensors["x"]})

    step = TrainStep(accumulate(loss), [Recorder(calls, learning_rate=0.5, overflow=0.0)], Layout())
    report = step([Batch({"x": torch.tensor(x)}, 1) for x in (1.0, 4.0)])
    assert calls == [
        "begin", "forward", "backward 1", "collect", "forward", "arm", "backward 1", "collect", "update"
    ]  # fmt: skip
    assert step.read(report.names, report.values.tolist()).metrics == {"loss": 2.5, "learning_rate": 0.5}


def test_the_loss_is_scaled_before_the_backward_pass_alone():
    calls: list[str] = []
    weight = torch.tensor(1.0, requires_grad=True)

    def loss(_: Batch) -> Losses:
        total = Doubling.apply(weight, calls)
        return Losses(total, {"loss": total.detach()})

    metrics = accumulate(loss, LossScale("cpu", torch.float16, 256.0))([Batch({}, 1)], lambda: None, lambda: None)
    assert calls == ["forward", "backward 256"]
    assert metrics["loss"].item() == 2.0


def test_waits_of_several_updaters_are_added_and_any_overflow_counts():
    first = Recorder([], learning_rate=0.5, overflow=0.0, comm_wait_ms=1.0)
    second = Recorder([], learning_rate=0.125, overflow=1.0, comm_wait_ms=2.0, loss_scale=8.0)
    step = TrainStep(lambda *_: {}, [first, second], Layout())
    report = step([])
    read = step.read(report.names, report.values.tolist())
    assert read.metrics == {"learning_rate": 0.5, "comm_wait_ms": 3.0, "loss_scale": 8.0}
    assert read.overflow
    assert not read.stop


def test_materialize_reaches_every_updater():
    calls: list[str] = []
    TrainStep(lambda *_: {}, [Recorder(calls), Recorder(calls)], Layout()).materialize()
    assert calls == ["materialize", "materialize"]
