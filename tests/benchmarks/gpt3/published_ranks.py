"""What ranks do in ``test_gpt3_published.py``: they load one checkpoint together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from small_published import SHAPE, STEPS, Trainee, beside, own

from benchmarks.gpt3 import published
from benchmarks.gpt3.published import load_published
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.errors import CheckpointError

WORLD = 4
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp4": ({"dp": 4}, {"shard": "all", "bucket_bytes": 1 << 12}),
    "tp2 x dp2": ({"tp": 2, "dp": 2}, {"shard": "all", "masters": "remainder", "bucket_bytes": 1 << 14}),
    "pp2 x dp2": ({"pp": 2, "dp": 2}, {"masters": "remainder"}),
    "pp2 x tp2": ({"pp": 2, "tp": 2}, {}),
}
"""Layouts, and options of the optimizer."""
MISSING = ("optimizer.state.exp_avg.model.decoder.layers.self_attention.proj.weight", "3.0.0")


def run_rank(rank: int, world: int, root: str, folder: Path) -> dict[str, Any]:
    """Load in every case, then a checkpoint of which the last stage misses a chunk."""
    found: dict[str, Any] = {}
    looked: list[Path] = []
    opened = published.PublishedCheckpoint

    def noted(place: Path, *arguments: Any) -> Any:
        looked.append(place)
        return opened(place, *arguments)

    published.PublishedCheckpoint = noted
    for case, (sizes, options) in CASES.items():
        looked.clear()
        one = loaded(Layout(sizes, rank), folder, **options)
        state = one.optimizer.state_dict()
        found[case] = {
            "model": {name: parameter.detach().clone() for name, parameter in one.model.named_parameters()},
            "state": state, "read": bool(looked),
        }  # fmt: skip
    if rank == 0:
        array, chunk = MISSING
        (own(beside(folder, Path(root, "damaged")) / array) / chunk).unlink()
    dist.barrier()
    try:
        loaded(Layout({"pp": 2, "dp": 2}, rank), Path(root, "damaged"))
    except CheckpointError as error:
        found["error"] = str(error)
    return found


def loaded(layout: Layout, folder: Path, **options: Any) -> Trainee:
    """A rank that has loaded; one that is not of the first replica gets the path of a folder that does not exist."""
    one = Trainee(layout, TensorParallel.from_layout(layout), **options)
    place = folder if layout.index("dp") == 0 else Path("nowhere")
    load_published(place, one.model, one.optimizer, layout, SHAPE, STEPS, one.model.tensor_splits())
    return one
