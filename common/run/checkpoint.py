"""Checkpoints: one folder per step, one file per rank, complete or absent.

A checkpoint is written into a temporary folder and renamed once every rank's file is on the disk, so that a full disk,
a killed rank or a power failure leaves no partial checkpoint.

For each position on ``pp``, one rank's file holds the full tensors of model and optimizer, without padding for ``tp``:
that of the first rank on ``dp``, ``cp`` and ``tp``. Every rank's file holds the rank's random state and buffers. A
:class:`common.optim.updater.StreamingUpdater` writes each rank's shards into a separate folder. Frozen tensors
(:mod:`common.nn.frozen`) are not saved, only the digest of the base.

On the same layout, a run resumes bit for bit. It can also resume on any other layout with the same global batch and
micro-batch, because positions count optimizer steps and tensors have their names in the whole model. Random states are
then drawn from the seed and the step, and buffers come from the first rank.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common.config.override import as_typed
from common.distributed.groups import of_all_ranks
from common.distributed.layout import AXES, Layout
from common.distributed.tensor_split import TensorSplit, check_splits, gathered, own_parts
from common.errors import CheckpointError
from common.nn.frozen import frozen_names
from common.optim.groups import SUMMED_AXES
from common.optim.updater import StreamingUpdater, Updater
from common.run.checkpoint_content import FORMAT, by_age, file_of, load, require_finite

MOST_SETTINGS = 20
"""Largest number of changed settings that a remark names."""

SHARING_AXES = (*SUMMED_AXES, "tp")
"""Axes whose ranks hold the same weights, or shards of the same weights."""


@dataclass(frozen=True)
class Progress:
    """Position of a run. Together with the seed it determines all data still to come.

    Attributes:
        step: finished optimizer steps of the run.
        position: finished optimizer steps of the block.
        samples: finished nominal training samples over all ranks, as the schedule counts.
        history: past evaluations: (real training samples, metric to value, for metrics with a target).
        counted: finished real training samples over all ranks, for log and rates.
        unscored: evaluations that have begun but are not in ``history``; known on rank 0.
    """

    step: int = 0
    block: int = 0
    position: int = 0
    samples: int = 0
    history: tuple[tuple[int, dict[str, float]], ...] = ()
    counted: int = 0
    unscored: int = 0


def save(
    folder: Path,
    progress: Progress,
    seed: int,
    settings: Mapping[str, object],
    model: nn.Module,
    updaters: tuple[Updater, ...],
    layout: Layout,
    *,
    configuration: Mapping[str, object] | None = None,
    base: str | None = None,
    splits: Mapping[str, TensorSplit] | None = None,
    late: Sequence[int] | None = None,
) -> Path:
    """Write the checkpoint ``folder``/step_<step> and return its path. An existing one is replaced. Collective.

    Args:
        settings: settings that determine, with the seed, which samples come at a position. Plain values.
        model: its parameters and buffers, except frozen ones, are saved after the last update.
        configuration: key to plain value of settings that may change on resuming, which only causes a remark.
        base: digest of the frozen tensors.
        splits: tensors that are sharded over ``tp``, by their names in the model. All others are saved by the first
            of these ranks.
        late: micro-batches of a :class:`common.data.batches.ReorderingSource` that were late; None for other sources.

    Raises:
        CheckpointError: a rank could not write. Its partial checkpoint is removed, earlier ones are kept.
        ValueError: a split does not fit the model.
    """
    splits = splits or {}
    target = folder / f"step_{progress.step:08d}"
    beside = target.with_name(f".{target.name}.partial")

    # Collective, so outside of the parts that can fail on a single rank.
    for updater in updaters:
        updater.materialize()
    states: list[Any] = [updater.state_dict() for updater in updaters]
    tensors = _own_tensors(model)
    tp_ranks = layout.group("tp")
    if layout.index(*SUMMED_AXES) == 0:
        changing = {name: split for name, split in splits.items() if name not in frozen_names(model)}
        check_splits(changing, tensors)
        tensors, states = gathered([tensors, states], changing, tp_ranks, layout)

    def clear() -> None:
        if layout.rank == 0:
            _clear(target, beside)

    def write() -> None:
        content = {
            "format": FORMAT,
            "layout": dict(layout.sizes),
            "seed": seed,
            "settings": dict(settings),
            "configuration": dict(configuration or {}),
            "progress": vars(progress),
            "random": _random_state(layout.device),
            "base": base,
        }
        content |= {} if late is None else {"late": list(late)}
        if layout.index(*SHARING_AXES) == 0:
            content |= {"model": tensors, "updaters": states}
        else:
            content |= {"buffers": _buffers(model)}
        beside.mkdir(parents=True, exist_ok=True)
        with (beside / f"rank_{layout.rank}.pt").open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        for number, updater in enumerate(updaters):
            if isinstance(updater, StreamingUpdater):
                updater.save_shards(_shards(beside, number))

    def publish() -> None:
        if layout.rank == 0:
            _require_all(beside, layout.world_size)
            _publish(beside, target)

    for part in (clear, write, publish):
        errors = _failures(part, layout)
        if errors:
            if layout.rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
            if layout.world_size > 1:
                dist.barrier()
                # This removes files that rank 0 cannot see, if the ranks do not share the folder.
                shutil.rmtree(beside, ignore_errors=True)
                dist.barrier()
            raise CheckpointError(f"checkpoint {target} was not written ({'; '.join(errors)}); nothing of it was kept")
    return target


def keep_newest(folder: Path, count: int) -> None:
    """Remove all but the ``count`` checkpoints in ``folder`` that were written last."""
    found = by_age(folder)
    for old in found[: max(0, len(found) - count)]:
        shutil.rmtree(old)


def read(
    folder: Path,
    settings: Mapping[str, object],
    layout: Layout,
    configuration: Mapping[str, object] | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Return the parts of a checkpoint that this rank needs, on the CPU.

    Args:
        settings: settings of this run; the checkpoint's must be equal.
        configuration: settings of this run that may differ from the checkpoint's.
        seed: seed given by the user; None takes the checkpoint's.

    Returns:
        Entries such as ``seed`` and ``progress``. ``remarks`` has one sentence for each difference from an
        uninterrupted run.

    Raises:
        CheckpointError: the checkpoint is missing, unreadable or incomplete, has other settings or another seed, or a
            number in model or optimizer state is not finite.
    """
    first = load(folder, 0, weights=True)
    written: dict[str, int] = first["layout"]
    expected, found = math.prod(written.values()), len(list(folder.glob("rank_*.pt")))
    if found != expected:
        raise CheckpointError(
            f"{folder}: incomplete, {found} of the {expected} ranks' files are there; a run resumes from a folder that "
            "has those of all, on a file system that every machine mounts"
        )
    for name, value in settings.items():
        kept = first["settings"].get(name)
        if kept != value:
            raise CheckpointError(
                f"{folder}: written with {name}={kept}, this run has {name}={value}: the data would not go on where "
                "the checkpoint stands; resume with the settings of the first run"
            )
    if seed is not None and seed != first["seed"]:
        raise CheckpointError(
            f"{folder}: written with seed={first['seed']}, this run has seed={seed}: the data would not go on where "
            "the checkpoint stands; leave seed out, and the run has the checkpoint's"
        )
    content = first
    if written["pp"] == layout.sizes["pp"] == 1:
        require_finite(file_of(folder, 0), {"model": content["model"], "updaters": content["updaters"]})
    else:  # a stage may have other layers than before, even if the number of stages is the same
        content = _together(
            [first, *(load(folder, _writer(written, stage), weights=True) for stage in range(1, written["pp"]))]
        )
    remarks = _other_settings(first["configuration"], configuration or {})
    if unscored := first["progress"].get("unscored", 0):
        remarks.append(
            f"evaluations without a score when the checkpoint was written: {unscored}; they are not repeated, and only "
            "the log of the run that wrote it may have their scores"
        )
    if written == layout.sizes:
        own = first if layout.rank == 0 else load(folder, layout.rank, weights=layout.index(*SHARING_AXES) == 0)
        require_finite(file_of(folder, layout.rank), {"buffers": own.get("buffers", {})})
        own_state = {"random": own["random"], "buffers": own.get("buffers", {}), "late": own.get("late", [])}
        return {**content, **own_state, "folder": folder, "remarks": remarks}
    changed = f"of {written['dp']} replicas, this run has {layout.sizes['dp']}"
    for axis in ("pp", "cp", "tp"):
        if written[axis] != layout.sizes[axis]:
            changed += f", and layout.{axis}={layout.sizes[axis]} instead of {written[axis]}"
    remarks.append(
        f"the checkpoint is {changed}: random states start anew from the seed and the step, and the model's buffers "
        "are those of the first rank"
    )
    if "late" in first:
        remarks.append("samples that were late when the checkpoint was written are left out, and others come twice")
    return {**content, "random": None, "buffers": {}, "late": [], "folder": folder, "remarks": remarks}


def _other_settings(written: Mapping[str, object], own: Mapping[str, object]) -> list[str]:
    """Return a remark, in a list, on settings of this run that differ from those in the checkpoint."""
    names = [*written, *(name for name in own if name not in written)]
    changed = [
        f"{name}={as_typed(own.get(name))} instead of {as_typed(written.get(name))}"
        for name in names
        if own.get(name) != written.get(name)
    ]
    if not changed:
        return []
    more = f" and {len(changed) - MOST_SETTINGS} more" if len(changed) > MOST_SETTINGS else ""
    return [f"this run has other settings than the checkpoint: {', '.join(changed[:MOST_SETTINGS])}{more}"]


def restore(
    content: dict[str, Any],
    model: nn.Module,
    updaters: tuple[Updater, ...],
    layout: Layout,
    *,
    base: str | None = None,
    splits: Mapping[str, TensorSplit] | None = None,
) -> Progress:
    """Load the result of :func:`read` into model, updaters and random generators; return the run's position.

    Args:
        model: the model of this run; its frozen tensors are not changed.
        base: digest of the frozen tensors of this run.
        splits: tensors that are sharded over ``tp`` in this run.

    Raises:
        CheckpointError: the checkpoint has another base, or a tensor is missing or has another shape.
    """
    if content["base"] != base:
        raise CheckpointError(
            f"the checkpoint was made with the base weights {content['base'] or '(none)'}, this run has "
            f"{base or '(none)'}: resume with the base that the checkpoint continues"
        )
    if "stages" in content:
        content = _own_stage(content, model, layout)
        require_finite(content["folder"], {"model": content["model"], "updaters": content["updaters"]})
    saved, states = own_parts([content["model"], content["updaters"]], splits or {})
    frozen = frozen_names(model)
    if thawed := sorted(frozen & saved.keys()):
        raise CheckpointError(
            f"the checkpoint is of another model: it changed {thawed[0]}, which is frozen in this run"
        )
    unchanged = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name in frozen}
    try:
        model.load_state_dict({**saved, **content["buffers"], **unchanged})
    except RuntimeError as error:
        problems = [line.strip() for line in str(error).splitlines()[1:]]
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckpointError(f"the checkpoint is of another model: {_few(problems[0])}{more}") from error
    if len(states) != len(updaters):
        raise CheckpointError(
            f"the checkpoint is of another model: it has {len(states)} optimizers, and this run has {len(updaters)}"
        )
    for number, (updater, state) in enumerate(zip(updaters, states, strict=True)):
        updater.load_state_dict(state)
        if isinstance(updater, StreamingUpdater):
            updater.load_shards(_shards(content["folder"], number))
    values = dict(content["progress"])
    values["history"] = tuple((int(samples), dict(found)) for samples, found in values["history"])
    progress = Progress(**values)
    if content["random"] is None:
        torch.manual_seed(layout.generator(f"resumed at step {progress.step}").initial_seed())
    else:
        torch.set_rng_state(content["random"]["cpu"])
        if layout.device.type == "cuda":
            torch.cuda.set_rng_state(content["random"]["cuda"], layout.device)
    return progress


def _shards(folder: Path, number: int) -> Path:
    """Return the folder with the shards of an updater."""
    return folder / f"updater_{number}"


def _writer(written: Mapping[str, int], stage: int) -> int:
    """Return the rank that wrote the weights of a pipeline stage."""
    rank = 0
    for axis in AXES:
        rank = rank * written[axis] + (stage if axis == "pp" else 0)
    return rank


def _together(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the files of all stages' first ranks into one model. Tied weights are equal on first and last stage."""
    if len({len(stage["updaters"]) for stage in stages}) > 1:
        raise CheckpointError("the checkpoint is damaged: its stages have different numbers of optimizers")
    states = []
    for own in zip(*(stage["updaters"] for stage in stages), strict=True):
        joined = dict(own[0])
        for state in own[1:]:
            for kind, entries in state.items():
                joined[kind] = {**joined.get(kind, {}), **entries} if isinstance(entries, Mapping) else entries
        states.append(joined)
    model = {name: tensor for stage in stages for name, tensor in stage["model"].items()}
    return {**stages[0], "model": model, "updaters": states, "stages": len(stages)}


def _own_stage(content: dict[str, Any], model: nn.Module, layout: Layout) -> dict[str, Any]:
    """Return this stage's part of a whole model. Collective.

    Tensors that belong to no stage are kept, so that loading the model rejects them.

    Raises:
        CheckpointError: a tensor of any stage is missing. All stages raise, so that none waits for a failed one.
    """
    own = set(model.state_dict())
    group, elsewhere = layout.group("pp"), set[str]()
    if group is not None:
        names: list[Any] = [None] * layout.size("pp")
        dist.all_gather_object(names, (own, frozen_names(model)), group=group)
        elsewhere = set[str]().union(*(every for every, _ in names)) - own
        missing = set[str]().union(*(every - frozen for every, frozen in names)) - content["model"].keys()
        if missing:
            more = f" and {len(missing) - 1} more of its tensors" if len(missing) > 1 else ""
            raise CheckpointError(f"the checkpoint is of another model: it lacks {min(missing)}{more}")
    states = [
        {
            kind: {name: tensor for name, tensor in entries.items() if name not in elsewhere}
            if isinstance(entries, Mapping)
            else entries
            for kind, entries in state.items()
        }
        for state in content["updaters"]
    ]
    kept = {name: tensor for name, tensor in content["model"].items() if name not in elsewhere}
    buffers = {name: tensor for name, tensor in content["buffers"].items() if name in own}
    return {**content, "model": kept, "updaters": states, "buffers": buffers}


def _few(problem: str) -> str:
    """Shorten a list of missing or unexpected names, which has hundreds if the network's depth differs."""
    names = problem.split(", ") if "key(s)" in problem else [problem]
    return problem if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's parameters and buffers that are not frozen."""
    frozen = frozen_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in _own_tensors(model).items() if name not in parameters}


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _failures(part: Callable[[], None], layout: Layout) -> list[str]:
    """Run ``part`` on every rank and wait for all of them; return one line for each rank that failed."""
    error = ""
    try:
        part()
    except (OSError, RuntimeError) as problem:  # torch.save wraps a failed write in a RuntimeError
        error = f"rank {layout.rank}: {_cause(problem)}"
    return [text for text in ([error] if layout.world_size == 1 else of_all_ranks(error)) if text]


def _clear(target: Path, beside: Path) -> None:
    """Remove files of an earlier attempt to write ``target`` that crashed."""
    old = _aside(target)
    if old.exists() and not target.exists():
        old.rename(target)  # the crash was between the two renames in _publish
    for stale in (beside, old):
        if stale.exists():
            shutil.rmtree(stale)


def _require_all(beside: Path, ranks: int) -> None:
    """Raise FileNotFoundError if a rank's file is missing because the machines do not share the folder."""
    missing = [rank for rank in range(ranks) if not file_of(beside, rank).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{ranks - len(missing)} of the {ranks} ranks' files are there, that of rank {missing[0]} is not: the "
            "ranks do not share this folder; choose an output_dir on a file system that every machine mounts"
        )


def _publish(beside: Path, target: Path) -> None:
    """Rename a complete checkpoint to its final name, durably."""
    old = _aside(target)
    _sync_folder(beside)
    replaced = target.exists()
    if replaced:
        target.rename(old)
    try:
        beside.rename(target)
    except OSError:
        if replaced:
            old.rename(target)
        raise
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _aside(target: Path) -> Path:
    """Return the temporary name of an earlier checkpoint while the new one is renamed to ``target``."""
    return target.with_name(f".{target.name}.old")


def _sync_folder(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk, on file systems that support it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _cause(error: BaseException) -> str:
    while error.__context__ is not None:
        if isinstance(error, OSError):
            break
        error = error.__context__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
