"""Test an Evoformer stack over GPUs that share a sample, eager and captured, against one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.openfold.axial import AxialSplit
from benchmarks.openfold.evoformer import BlockSizes, Stack
from benchmarks.openfold.layers import Chooser, Masks
from common.distributed.layout import Layout
from tests.gpu.support import captured, relative_error, start_rank

pytestmark = pytest.mark.multigpu

SIZES = BlockSizes(
    pair=32, multiplication=32, pair_head=16, pair_heads=2, pair_transition=2, pair_dropout=0.25,
    msa=64, msa_head=16, msa_heads=4, msa_transition=2, msa_dropout=0.15, outer=16,
)  # fmt: skip
SEQUENCES, RESIDUES = 16, 32
ROUNDING = 1e-4
"""Largest relative error of fp32 results and gradients after two blocks."""


class Trunk:
    """Two blocks with their inputs, on one rank or split over several."""

    def __init__(self, split: AxialSplit, device: torch.device) -> None:
        self.split = split
        torch.manual_seed(3)
        self.blocks = Stack(SIZES, 2, False, Chooser({}, device, torch.float32), split)
        self.m = torch.randn(1, SEQUENCES, RESIDUES, SIZES.msa)
        self.z = torch.randn(1, RESIDUES, RESIDUES, SIZES.pair)
        self.masks = torch.ones(1, SEQUENCES, RESIDUES), torch.ones(1, RESIDUES, RESIDUES)
        self.weights = torch.randn_like(self.m), torch.randn_like(self.z)
        self.blocks.to(device)
        self.m, self.z = (x.to(device).requires_grad_() for x in (self.m, self.z))
        self.masks = tuple(x.to(device) for x in self.masks)
        self.weights = tuple(x.to(device) for x in self.weights)
        self.dropout = Masks(torch.tensor(77, device=device), 40, True)

    def __call__(self) -> list[Tensor]:
        """Return the results, the gradients of the inputs, and those of the weights, summed over the ranks.

        The results have no graph of autograd, which would tie the inputs to the current stream.
        """
        inputs = (self.split.shard(x, 1) for x in (self.m, self.z))
        results = [self.split.gather(x, 1) for x in self.blocks(*inputs, *self.masks, self.dropout)]
        loss = sum((x * weight).sum() for x, weight in zip(results, self.weights, strict=True))
        found = torch.autograd.grad(loss, [self.m, self.z, *self.blocks.parameters()])
        for gradient in found[2:]:
            if self.split.group is not None:
                dist.all_reduce(gradient, group=self.split.group)
        return [*(x.detach() for x in results), *found]


def run(rank: int, world: int, _: Path) -> dict[str, list[Tensor]]:
    """Return what a rank finds alone, and with the others, eager and from a graph."""
    device = torch.device("cuda", rank)
    alone = Trunk(AxialSplit(), device)()
    trunk = Trunk(AxialSplit.from_layout(Layout({"cp": world}, rank, device)), device)
    eager = trunk()
    graph, replayed = captured(trunk)
    for tensor in replayed:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    found = {"alone": alone, "eager": eager, "captured": replayed}
    return {name: [x.cpu() for x in tensors] for name, tensors in found.items()}


def test_gpus_that_share_a_sample_have_the_results_and_gradients_of_one(tmp_path: Path) -> None:
    world = min(torch.cuda.device_count(), 4) // 2 * 2
    mp.start_processes(start_rank, args=(run, world, tmp_path), nprocs=world, start_method="spawn")
    for rank in range(world):
        found = torch.load(tmp_path / f"{rank}.pt")
        for mode in ("eager", "captured"):
            for ours, theirs in zip(found[mode], found["alone"], strict=True):
                if theirs.norm() > 1e-3:  # that of a shift before a softmax is 0 up to rounding
                    assert relative_error(ours, theirs) < ROUNDING
