"""Embeddings exchanged through peer memory: captured and eager training has the bits of NCCL's exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.recommendation.placement import Placement
from common.recommendation.tables import Tables
from common.run.kernel_profile import recorded
from common.step.train_step import Losses
from tests.common.recommendation import embedding_ranks as small

pytestmark = pytest.mark.multigpu

ITERATIONS = 20
SAMPLES = 300  # not a multiple of the samples of a program
DELAY = 1_000_000  # cycles, about 0.5 ms
WIDE = Tables(small.TABLES.tables, 128)
MODES: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": torch.float16, "scale": 64.0, "rule": small.RULES["sgd"]},
    "bf16, adagrad": {"dtype": torch.bfloat16},
}
MICRO_BATCHES = {"fp16": 1, "bf16, adagrad": 2}  # of a rank
WAYS: dict[str, dict[str, Any]] = {
    "nccl": {"captured": True, "early": True},
    "captured": {"captured": True, "early": True, "peer_batch": SAMPLES},
    "eager": {"captured": False, "overlap": False, "peer_batch": SAMPLES},
}


class DelayedTrainee(small.Trainee):
    """A model whose passes are slower on the last rank, so that the other ranks are ahead."""

    def loss(self, batch: Batch) -> Losses:
        losses = super().loss(batch)
        if self.layout.rank == self.layout.world_size - 1:
            torch.cuda._sleep(DELAY)
        return losses


def train(plan: Placement, layout: Layout, **options: Any) -> dict[str, Tensor]:
    """Return x0 of evaluations between the iterations, and the state at the end."""
    trainee, found = DelayedTrainee(plan, layout, **options), {}
    ids_BL = torch.cat([small.micro_batch(9, number)["ids_BL"] for number in range(2)]).to(layout.device)
    bottom_BW = torch.ones(len(ids_BL), small.TABLES.width, dtype=trainee.dtype, device=layout.device)
    for iteration in range(ITERATIONS):
        trainee.iterate(iteration)
        if iteration % 5 == 0:
            with torch.no_grad(), trainee.runner.on_stream():
                found[f"evaluation {iteration}"] = trainee.embeddings.forward(bottom_BW, ids_BL).clone()
    found |= trainee.parts()
    trainee.runner.close()
    return {name: tensor.cpu() for name, tensor in found.items()}


def collectives(layout: Layout) -> list[str]:
    """Return the names of NCCL's all-to-all kernels in a captured iteration."""
    trainee = small.Trainee(small.plans(layout.world_size)["mixed"], layout, **MODES["fp16"], **WAYS["captured"])
    kernels, _ = recorded(lambda: trainee.iterate(0), lambda: trainee.iterate(1))
    trainee.runner.close()
    return [kernel.name for kernel in kernels if "nccl" in kernel.name.lower() and "SendRecv" in kernel.name]


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    layout = Layout({"dp": world}, rank, device=torch.device("cuda", rank), seed=small.SEED)
    found: dict[str, Any] = {}
    for mode, options in MODES.items():
        with mock.patch.multiple(small, TABLES=WIDE, SAMPLES=SAMPLES, MICRO_BATCHES=world * MICRO_BATCHES[mode]):
            for name, plan in small.plans(world).items():
                found[f"{name}, {mode}"] = {way: train(plan, layout, **options, **how) for way, how in WAYS.items()}
            found["all-to-alls"] = collectives(layout)
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


@pytest.mark.parametrize("way", ["captured", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_every_placement_trains_with_the_bits_of_nccl(ranks, mode, way):
    if len(ranks) > 2:
        pytest.skip("NCCL adds dense gradients of more than two ranks in an order of its own")
    for name in small.plans(len(ranks)):
        assert [differing(rank[f"{name}, {mode}"]["nccl"], rank[f"{name}, {mode}"][way]) for rank in ranks] == [[], []]


@pytest.mark.parametrize("mode", MODES)
def test_more_ranks_train_nearly_as_with_nccl(ranks, mode):
    for name in small.plans(len(ranks)):
        for rank in ranks:
            expected, found = rank[f"{name}, {mode}"]["nccl"], rank[f"{name}, {mode}"]["captured"]
            for part, value in expected.items():
                torch.testing.assert_close(found[part].float(), value.float(), rtol=2e-2, atol=2e-3)


def test_a_captured_iteration_has_no_all_to_all(ranks):
    assert [rank["all-to-alls"] for rank in ranks] == [[]] * len(ranks)
