"""Averages of a small network's weights on gloo ranks that share them; test_ema.py compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sharded_ranks import ITERATIONS, LANES, Trainee
from torch import Tensor

from common.distributed.layout import Layout
from common.optim.ema import WeightAverage
from common.run import checkpoint
from common.run.checkpoint import Progress
from common.step.train_step import TrainStep, accumulate

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
        """Copies of what is evaluated."""
        return {name: weight.clone() for name, weight in self.average.weights().items()}

    def everything(self) -> dict[str, Tensor]:
        kept = {f"{name} of the average": tensor.clone() for name, tensor in self.average.named_state()}
        return super().everything() | kept


def averaged(layout: Layout, **options: Any) -> dict[str, Tensor]:
    """What is evaluated after some iterations."""
    trainee = Averaged(layout, **options)
    for iteration in range(ITERATIONS):
        trainee.iterate(iteration)
    return trainee.averages()


def changed(layout: Layout, how: str, **options: Any) -> list[str]:
    """What an iteration that may write nothing has changed: a skipped one, or one with an overflow on the last lane."""
    trainee = Averaged(layout, **options)
    trainee.iterate(0)
    before = trainee.everything() | trainee.averages()
    trainee.step.skip.fill_(how == "skip")
    trainee.iterate(1, lambda lane, x_BC: x_BC * float("inf") if how == "overflow" and lane == LANES - 1 else x_BC)
    after = trainee.everything() | trainee.averages()
    return [name for name in before if not torch.equal(after[name], before[name])]


def save(layout: Layout, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """A checkpoint after two iterations; what is evaluated at it, and after one more."""
    trainee = Averaged(layout, dtype=dtype, shard="all")
    for iteration in range(2):
        trainee.iterate(iteration)
    at = trainee.averages()
    checkpoint.save(folder, Progress(step=2, position=2), 7, {}, trainee.model, trainee.step.updaters, layout)
    trainee.iterate(2)
    return _two_points(at, trainee.averages())


def resume(layout: Layout, place: Path, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """What is evaluated of a checkpoint, and after one more iteration."""
    trainee = Averaged(layout, dtype=dtype, **options)
    trainee.iterate(9)  # what was there before must not matter
    content = checkpoint.read(place, {}, layout)
    progress = checkpoint.restore(content, trainee.model, trainee.step.updaters, layout)
    at = trainee.averages()
    trainee.iterate(progress.step)
    return _two_points(at, trainee.averages())


def _two_points(at: dict[str, Tensor], later: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"at.{n}": t for n, t in at.items()} | {f"later.{n}": t for n, t in later.items()}


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Everything that is to be compared, on one of ``world`` ranks."""
    layout = Layout({"dp": world}, rank, seed=7)
    found: dict[str, Any] = {f"averaged/{name}": averaged(layout, **options) for name, options in SHARDS.items()}
    for how in ("skip", "overflow"):
        found[how] = changed(layout, how, shard="all", dtype=torch.bfloat16)
    for name, dtype in RESUMED.items():
        place = Path(folder, name)
        found[f"saved/{name}"] = save(layout, place, dtype)
        found[f"resumed/{name}"] = resume(layout, place / "step_00000002", dtype, shard="all")
    return found
