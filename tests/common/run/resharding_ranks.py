"""Ranks of ``test_resharding.py``: save and load a synthetic layer whose weights are split over ``tp``."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.distributed.tensor_split import TensorSplit
from common.nn.frozen import mark_frozen
from common.optim.adaptive import AdamW
from common.optim.optimizer import Optimizer, ParameterGroup
from common.run import checkpoint
from common.run.checkpoint import Progress
from common.step.train_step import apply_gradients

WORLD = 4
HEADS = (16, 4, 8)
"""Rows of queries, keys and values in one weight."""
WORDS = 10
SHAPES = {
    "qkv": (28, 6), "output": (5, 16), "norm": (7,), "words": (WORDS, 3), "seen": (28,), "steps": (), "base": (28, 6),
}  # fmt: skip
"""``qkv`` and ``seen`` are split by heads, ``output`` by columns, ``base`` is frozen; all ranks have the others.

``words`` is split by rows, of which there are so many more, all zero, that they are 3 on every rank or a multiple.
"""
PARAMETERS = ("qkv", "output", "norm", "words")
LAYOUTS: dict[str, dict[str, int]] = {
    "tp1": {"dp": 4},
    "tp2": {"dp": 2, "tp": 2},
    "tp2 x cp2": {"cp": 2, "tp": 2},
    "tp4": {"tp": 4},
}
SAVED_AFTER, STEPS = 2, 3


def whole(name: str, purpose: object) -> Tensor:
    """A whole tensor, equal on all ranks, with so few bits per value that sums over ranks are exact."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{purpose}".encode()))
    return torch.randint(-64, 64, SHAPES[name], generator=generator).to(torch.float32) / 64


def part(name: str, full: Tensor, layout: Layout) -> Tensor:
    """This rank's part of a whole tensor, computed without :class:`TensorSplit`."""
    ranks, index = layout.size("tp"), layout.index("tp")
    if name in ("qkv", "seen", "base"):
        return torch.cat([section.chunk(ranks)[index] for section in full.split(HEADS)])
    if name == "output":
        return full.chunk(ranks, dim=1)[index].contiguous()
    if name == "words":
        return torch.cat([full, full.new_zeros(padded_words(ranks) - WORDS, 3)]).chunk(ranks)[index].contiguous()
    return full


def padded_words(ranks: int) -> int:
    """Rows of ``words`` with padding: a multiple of 3 on every rank."""
    return -(-WORDS // (3 * ranks)) * 3 * ranks


def splits(layout: Layout) -> dict[str, TensorSplit]:
    """As a workload declares them, including those of the frozen tensor."""
    by_heads = {name: TensorSplit.over_tp(layout, SHAPES[name], 0, HEADS) for name in ("qkv", "seen", "base")}
    by_rows = TensorSplit.over_tp(layout, (padded_words(layout.size("tp")), 3), kept=WORDS)
    return {**by_heads, "output": TensorSplit.over_tp(layout, SHAPES["output"], 1), "words": by_rows}


class Trainee:
    """The layer and its optimizer on one rank."""

    def __init__(self, layout: Layout, purpose: object = "start", **options: Any) -> None:
        self.layout = layout
        self.model = nn.Module()
        for name in SHAPES:
            local = part(name, whole(name, purpose), layout)
            if name in PARAMETERS:
                self.model.register_parameter(name, nn.Parameter(local.bfloat16()))
            else:
                self.model.register_buffer(name, local)
        mark_frozen(self.model, ["base"])
        named = dict(self.model.named_parameters())
        groups = [
            ParameterGroup({name: named[name] for name in ("qkv", "output", "words")}, 0.25),
            ParameterGroup({"norm": named["norm"]}, replicated_over=("tp",)),
        ]
        self.optimizer = Optimizer(
            groups, AdamW(0.9, 0.99, 1e-3), lambda step: torch.tensor(0.25), layout, grad_divisor=4.0, **options
        )

    def iterate(self, step: int) -> None:
        """An update with the step's gradients, which the ranks of ``dp`` and ``cp`` share evenly."""
        share = 4.0 / self.layout.size("dp", "cp")
        self.optimizer.begin()
        for name in PARAMETERS:
            parameter = getattr(self.model, name)
            parameter.grad.copy_(part(name, whole(name, step), self.layout) * share)
        self.optimizer.arm()
        self.optimizer.collect()
        apply_gradients([self.optimizer], torch.tensor(0.0))
        self.model.seen.add_(part("seen", whole("seen", step), self.layout))

    def save(self, folder: Path, step: int) -> None:
        checkpoint.save(
            folder, Progress(step), 7, {}, self.model, (self.optimizer,), self.layout,
            base="digest", splits=splits(self.layout),
        )  # fmt: skip

    def load(self, saved: Path) -> None:
        content = checkpoint.read(saved, {}, self.layout)
        checkpoint.restore(
            content, self.model, (self.optimizer,), self.layout, base="digest", splits=splits(self.layout)
        )

    def weights(self) -> dict[str, Tensor]:
        self.optimizer.materialize()
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


def trained(layout: Layout, steps: int, **options: Any) -> Trainee:
    """After ``steps`` updates without a stop."""
    trainee = Trainee(layout, **options)
    for step in range(steps):
        trainee.iterate(step)
    return trainee


def resumed(layout: Layout, saved: Path, **options: Any) -> Trainee:
    """Load the checkpoint into a layer with other weights, and run the remaining updates."""
    trainee = Trainee(layout, "other", **options)
    trainee.model.base.copy_(part("base", whole("base", "start"), layout))
    trainee.load(saved)
    for step in range(SAVED_AFTER, STEPS):
        trainee.iterate(step)
    return trainee


def parts(full: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """This rank's parts of whole tensors."""
    return {name: part(name, tensor, layout) for name, tensor in full.items()}


def folder_of(folder: str, name: str) -> Path:
    return Path(folder, name) / f"step_{SAVED_AFTER:08d}"


def run_rank(rank: int, _: int, folder: str) -> dict[str, Any]:
    """Save in every layout, and resume each checkpoint in every layout."""
    layouts = {name: Layout(sizes, rank, seed=7) for name, sizes in LAYOUTS.items()}
    for name, layout in layouts.items():
        trained(layout, SAVED_AFTER, shard="all").save(Path(folder, name), SAVED_AFTER)
    return {
        f"{saved} to {name}": resumed(layout, folder_of(folder, saved), shard="all").weights()
        for saved in LAYOUTS
        for name, layout in layouts.items()
    }
