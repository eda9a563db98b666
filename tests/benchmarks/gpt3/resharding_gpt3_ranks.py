"""What ranks do in ``test_gpt3_resharding.py``: GPT-3 is saved in every layout and goes on from it in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpt3.workload import GptPretraining
from common import cli
from common.config.composition import compose
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.errors import CheckpointError
from common.optim.updater import Updater
from common.run import checkpoint
from common.run.checkpoint import Progress

WORLD, SAVED_AFTER, STEPS, ROWS, MICRO_BATCH = 4, 2, 3, 8, 2
TEST = (
    "benchmark=gpt3", "scale=test", "device=cpu", "precision=fp64", f"hparams.global_batch_size={ROWS}",
    "benchmark.facts.vocabulary=250", "benchmark.facts.max_grad_norm=0.5", "benchmark.facts.warmup_samples=8",
)  # fmt: skip
"""250 words are 256 rows for one rank and for two, and 512 for four, of which two have none but padding."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp4": ("layout.dp=4", "optimizer.shard=all", "optimizer.bucket_mb=0.01"),
    "tp4": ("layout.tp=4",),
    "tp2 x pp2, 2 chunks": ("layout.tp=2", "layout.pp=2", "model.chunks=2"),
    "pp4": ("layout.pp=4",),
    "dp2 x pp2": ("layout.dp=2", "layout.pp=2", "optimizer.shard=all"),
}
ONWARDS = (
    ("one", "tp2 x pp2, 2 chunks"), ("tp4", "pp4"), ("pp4", "dp4"), ("dp4", "tp4"), ("tp2 x pp2, 2 chunks", "tp4"),
    ("dp2 x pp2", "tp2 x pp2, 2 chunks"), ("pp4", "dp2 x pp2"),
)  # fmt: skip
"""The layout that has saved, and the one that goes on."""
SETTINGS: dict[str, Any] = {"precision": "fp64"}


class Trainee:
    """The workload on one rank, and its step."""

    def __init__(self, rank: int, *overrides: str) -> None:
        run, _ = cli.load(compose([*TEST, *overrides]))
        self.layout = Layout(run.layout, rank, seed=7)
        self.workload = GptPretraining(run, self.layout)
        self.step = self.workload.build_step()
        self.updaters: tuple[Updater, ...] = self.step.updaters

    def train(self, first: int, last: int) -> list[dict[str, float]]:
        """Metrics of the steps, whose rows are the same in every layout."""
        found = []
        for number in range(first, last):
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(250, (ROWS, 33), generator=generator, dtype=torch.int32)
            tokens[:, -1] = -1
            mine = list(tokens.split(MICRO_BATCH))[self.layout.coordinate("dp") :: self.layout.size("dp")]
            result = self.step([Batch({"tokens": rows}, MICRO_BATCH) for rows in mine])
            found.append(self.step.read(result.names, result.values.tolist()).metrics)
        return found

    def save(self, folder: Path, step: int) -> None:
        splits = self.workload.tensor_splits()
        checkpoint.save(
            folder, Progress(step), 7, SETTINGS, self.workload.model, self.updaters, self.layout, splits=splits
        )

    def load(self, place: Path) -> None:
        content = checkpoint.read(place, SETTINGS, self.layout)
        splits = self.workload.tensor_splits()
        checkpoint.restore(content, self.workload.model, self.updaters, self.layout, splits=splits)


def place_of(folder: Path, name: str, step: int = SAVED_AFTER) -> Path:
    return folder / name / f"step_{step:08d}"


def run_rank(rank: int, world: int, root: str) -> dict[str, Any]:
    """Save in every layout, go on from it in another one, and refuse a network of other depth; ``one`` is there."""
    folder = Path(root)
    found: dict[str, Any] = {}
    trainees = {name: Trainee(rank, *sized(overrides)) for name, overrides in LAYOUTS.items()}
    for name, trainee in trainees.items():
        trainee.train(0, SAVED_AFTER)
        trainee.save(folder / name, SAVED_AFTER)
        trainee.train(SAVED_AFTER, STEPS)  # so that all that is loaded is something else before
    for name, trainee in trainees.items():
        for written in (before for before, onwards in ONWARDS if onwards == name):
            trainee.load(place_of(folder, written))
            found[f"{written} to {name}"] = trainee.train(SAVED_AFTER, STEPS)
            trainee.save(folder / f"{written} to {name}", STEPS)
    deeper = Trainee(rank, *sized(LAYOUTS["pp4"]), "benchmark.facts.layers=8")
    try:
        deeper.load(place_of(folder, "one"))
    except CheckpointError as error:
        found["deeper"] = str(error)
    return found


def sized(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Without ``layout.dp``, which follows from the ranks."""
    return (f"scale.gpus_per_node={WORLD}", *(text for text in overrides if not text.startswith("layout.dp")))
