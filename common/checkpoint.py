"""Checkpoints: one folder a step, one file a rank, complete or absent.

A checkpoint is written into a folder beside its place and renamed once every rank has written its file, so that a
full disk or a killed rank leaves nothing half-written.
"""

from __future__ import annotations

import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common.distributed.layout import Layout
from common.errors import CheckpointError
from common.optim.optimizer import Updater

FORMAT = 1


@dataclass(frozen=True)
class Progress:
    """Where a run stands; with the seed it determines all data still to come.

    Attributes:
        step: optimizer steps done in the run.
        block: index of the block.
        position: micro-batches of the block that each rank has consumed.
        samples: training samples done, over all ranks.
        history: (samples, metric value) of the evaluations so far.
    """

    step: int = 0
    block: int = 0
    position: int = 0
    samples: int = 0
    history: tuple[tuple[int, float], ...] = ()


def save(
    folder: Path, progress: Progress, seed: int, model: nn.Module, updaters: tuple[Updater, ...], layout: Layout
) -> Path:
    """Write the checkpoint ``folder``/step_<step>; collective.

    Raises:
        CheckpointError: a rank could not write; nothing stays behind.
    """
    place = folder / f"step_{progress.step:08d}"
    beside = folder / f".{place.name}.partial"
    error = ""
    try:
        beside.mkdir(parents=True, exist_ok=True)
        content = {
            "format": FORMAT,
            "world_size": layout.world_size,
            "seed": seed,
            "progress": vars(progress),
            "model": model.state_dict(),
            "updaters": [updater.state_dict() for updater in updaters],
            "random": _random_state(layout.device),
        }
        with (beside / f"rank_{layout.rank}.pt").open("wb") as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as problem:  # torch.save wraps a failed write in a RuntimeError
        error = f"rank {layout.rank}: {_cause(problem)}"
    errors = [text for text in _gather(error, layout) if text]
    if layout.rank == 0:
        if errors:
            shutil.rmtree(beside, ignore_errors=True)
        else:
            shutil.rmtree(place, ignore_errors=True)
            beside.rename(place)
    if layout.world_size > 1:
        dist.barrier()
    if errors:
        raise CheckpointError(f"checkpoint {place} was not written ({'; '.join(errors)}); nothing of it was kept")
    return place


def keep_newest(folder: Path, count: int) -> None:
    """Remove all but the ``count`` newest checkpoints of ``folder``."""
    found = sorted(folder.glob("step_*"))
    for old in found[: max(0, len(found) - count)]:
        shutil.rmtree(old)


def read(place: Path, layout: Layout) -> dict[str, Any]:
    """This rank's part of the checkpoint at ``place``, on the CPU.

    Raises:
        CheckpointError: it is missing, unreadable, or of another number of ranks.
    """
    path = place / f"rank_{layout.rank}.pt"
    ranks = len(list(place.glob("rank_*.pt")))
    if ranks not in (0, layout.world_size):
        raise CheckpointError(f"{place}: written by {ranks} ranks, this run has {layout.world_size}; use as many")
    if not path.is_file():
        raise CheckpointError(f"resume={place}: no checkpoint there ({path.name} is missing)")
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: unreadable ({_cause(error)})") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path}: format {found}, this suite reads {FORMAT}")
    if content["world_size"] != layout.world_size:
        raise CheckpointError(
            f"{place}: written by {content['world_size']} ranks, this run has {layout.world_size}; use as many"
        )
    return content


def restore(content: dict[str, Any], model: nn.Module, updaters: tuple[Updater, ...], layout: Layout) -> Progress:
    """Put the state that :func:`read` returned into the model, the updaters and the random generators.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    try:
        model.load_state_dict(content["model"])
    except RuntimeError as error:
        problems = [line.strip() for line in str(error).splitlines()[1:]]
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckpointError(f"the checkpoint is of another model: {problems[0]}{more}") from error
    for updater, state in zip(updaters, content["updaters"], strict=True):
        updater.load_state_dict(state)
    torch.set_rng_state(content["random"]["cpu"])
    if layout.device.type == "cuda":
        torch.cuda.set_rng_state(content["random"]["cuda"], layout.device)
    values = dict(content["progress"])
    values["history"] = tuple((int(samples), float(value)) for samples, value in values["history"])
    return Progress(**values)


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _gather(text: str, layout: Layout) -> list[str]:
    if layout.world_size == 1:
        return [text]
    texts: list[Any] = [None] * layout.world_size
    dist.all_gather_object(texts, text)
    return texts


def _cause(error: BaseException) -> str:
    while error.__context__ is not None:
        if isinstance(error, OSError):
            break
        error = error.__context__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
