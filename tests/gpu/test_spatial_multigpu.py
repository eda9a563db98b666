"""Test volumes split over GPUs: each transport of halos, eager and captured, gives the results of the whole volume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.unet3d.model import UNet3D, UNet3DArchitecture
from benchmarks.unet3d.ops.dice_cross_entropy import dice_cross_entropy_reference
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.spatial.halo import TRANSPORTS, build_exchange
from common.distributed.spatial.split import VolumeSplit
from common.errors import UnsupportedImplementation
from common.ops.operation import AUTO
from common.optim.learning_rate import constant
from common.optim.momentum import SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from common.step.capture import capturing
from common.step.graphs import StepRunner
from common.step.train_step import Losses, TrainStep, accumulate
from tests.gpu.support import relative_error

pytestmark = pytest.mark.multigpu

ARCHITECTURE = UNet3DArchitecture(classes=3, filters=(8, 12, 16, 20, 24), norm_epsilon=1e-5)
SIZE = (64, 64, 64)
SAMPLES = 2
STEPS = 3
REPLAYS = 50
IN_FLIGHT = 3
ROUNDING = 1e-8
"""Largest difference of float64 weights, relative to a tensor's change in training."""

FP32_ROUNDING = 1e-3
"""Largest difference of fp32 logits, relative to their norm."""

MODES = {
    f"{transport}-{'captured' if captured else 'eager'}": (transport, captured)
    for transport in TRANSPORTS
    for captured in (False, True)
}


class Trainee:
    """The network, whole or split over ``cp``."""

    def __init__(
        self,
        layout: Layout,
        halo: str = AUTO,
        captured: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.layout, self.split, self.dtype = layout, VolumeSplit.from_layout(layout), dtype
        generator, device = torch.Generator().manual_seed(11), layout.device
        self.model = UNet3D(ARCHITECTURE, generator, halo=halo, device=device, dtype=dtype, split=self.split)
        redundant = self.model.redundant_parameters()
        named = dict(self.model.named_parameters())
        groups = [
            ParameterGroup({name: p for name, p in named.items() if name not in redundant}),
            ParameterGroup({name: p for name, p in named.items() if name in redundant}, replicated_over=("cp",)),
        ]
        optimizer = Optimizer(
            [group for group in groups if group.parameters], SGD(0.9, nesterov=True), constant(0.1), layout,
            grad_divisor=1.0,
        )  # fmt: skip
        self.step = TrainStep(accumulate(self.loss), [optimizer], layout)
        self.runner = StepRunner(self.step, self.model, 1, captured)

    def loss(self, batch: Batch) -> Losses:
        logits_NKDHW = self.model(batch.tensors["image"])
        value = dice_cross_entropy_reference(logits_NKDHW, batch.tensors["label"], 1e-6, self.split)
        return Losses(value, {"loss": value})

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        image = torch.randn(SAMPLES, 1, *SIZE, generator=generator).to(self.dtype)
        label = torch.randint(0, 3, (SAMPLES, *SIZE), dtype=torch.uint8, generator=generator)
        if self.split is not None:
            image, label = self.split.slab(image), self.split.slab(label, 1)
        tensors = {"image": image.contiguous(), "label": label.contiguous()}
        return Batch({name: tensor.to(self.layout.device) for name, tensor in tensors.items()}, SAMPLES)

    def logits(self) -> Tensor:
        """Return the logits of this rank's slab on the CPU."""
        with torch.no_grad():
            logits_NKDHW: Tensor = self.model(self.batch(0).tensors["image"])
        return logits_NKDHW.cpu()

    def train(self) -> dict[str, Tensor]:
        """Return the changes of the weights in some steps."""
        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.runner.warm_up([self.batch(0)])
        for step in range(STEPS):
            batch = self.batch(step)
            with self.runner.on_stream():
                self.runner([batch])
        with self.runner.on_stream():
            self.step.materialize()
        torch.cuda.synchronize()
        assert not self.runner.uncaptured
        self.runner.close()
        return {name: (p.detach() - before[name]).cpu() for name, p in self.model.named_parameters()}


def planes(rank: int, exchange: int, device: torch.device) -> Tensor:
    """Return a slab whose values encode rank, exchange and position. The second exchange has larger planes."""
    edge = 320 if exchange == 1 else 16
    slab = torch.arange(2 * 4 * edge * edge * 8, device=device, dtype=torch.float32).view(2, 8, 4, edge, edge)
    return (slab + 1000.0 * rank + 10.0 * exchange).contiguous(memory_format=torch.channels_last_3d)


def wrong_halos(split: VolumeSplit, device: torch.device, transport: str) -> int:
    """Return the number of wrong halo elements in many replays of a graph with several exchanges in flight."""
    exchange = build_exchange(split, device, transport)
    factor = torch.ones((), device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def exchange_all() -> None:
        pending = [exchange.start(planes(split.index, at, device) * factor) for at in range(IN_FLIGHT)]
        for at, one in enumerate(pending):
            with one.received() as halos:
                for halo, rank, plane in ((halos.low, split.index - 1, -1), (halos.high, split.index + 1, 0)):
                    if halo is not None:
                        wrong.add_((halo != planes(rank, at, device).select(2, plane) * factor).sum())

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        exchange_all()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream):
            exchange_all()
        for _ in range(REPLAYS):
            factor.add_(1)
            graph.replay()
    torch.cuda.synchronize()
    found = int(wrong)
    graph.reset()
    return found


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda", rank)
    layout = Layout({"cp": world}, rank, device=device)
    split = VolumeSplit.from_layout(layout)
    assert split is not None
    results: dict[str, Any] = {"auto": build_exchange(split, device).transport.name}
    for transport in TRANSPORTS:
        try:
            build_exchange(split, device, transport)
        except UnsupportedImplementation as error:
            results[f"{transport} unsupported"] = str(error)
            continue
        results[f"{transport} wrong halos"] = wrong_halos(split, device, transport)
        results[f"{transport} logits"] = Trainee(layout, transport, dtype=torch.float32).logits()
    for mode, (transport, captured) in MODES.items():
        if f"{transport} unsupported" not in results:
            trainee = Trainee(layout, transport, captured)
            results[mode] = trainee.train()
    if rank == 0:
        results["whole"] = Trainee(Layout(device=device)).train()
        results["whole logits"] = Trainee(Layout(device=device), dtype=torch.float32).logits()
    return results


def supported(ranks: list[dict[str, Any]], transport: str) -> None:
    reason = ranks[0].get(f"{transport} unsupported")
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_halos_are_the_neighbours_in_every_replay(ranks, transport):
    supported(ranks, transport)
    assert [rank[f"{transport} wrong halos"] for rank in ranks] == [0] * len(ranks)


def test_auto_takes_the_first_that_these_gpus_support(ranks):
    expected = next(name for name in TRANSPORTS if f"{name} unsupported" not in ranks[0])
    assert {rank["auto"] for rank in ranks} == {expected}


@pytest.mark.parametrize("mode", list(MODES))
def test_training_over_slabs_equals_the_whole(ranks, mode):
    supported(ranks, MODES[mode][0])
    for rank in ranks:
        for name, expected in ranks[0]["whole"].items():
            assert relative_error(rank[mode][name], expected) < ROUNDING, name


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fp32_logits_of_the_slabs_equal_the_whole(ranks, transport):
    supported(ranks, transport)
    found, expected = torch.cat([rank[f"{transport} logits"] for rank in ranks], dim=2), ranks[0]["whole logits"]
    assert relative_error(found, expected) < FP32_ROUNDING


@pytest.mark.parametrize("mode", list(MODES))
def test_ranks_agree_bit_for_bit(ranks, mode):
    supported(ranks, MODES[mode][0])
    for rank in ranks[1:]:
        assert all(torch.equal(tensor, rank[mode][name]) for name, tensor in ranks[0][mode].items())
