"""Read a rank's checkpoint file and validate its content (names, types, ranges) before anything uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from common.distributed.layout import AXES
from common.errors import CheckpointError
from common.untrusted.tensor_file import read_values

FORMAT = 7

MOST_RANKS = 2**20
COUNTS = ("step", "block", "position", "samples", "counted", "unscored")
"""Names of the integer entries of :class:`common.run.checkpoint.Progress`."""
_PLAIN = (str, int, float, bool, type(None))


def load(folder: Path, rank: int, weights: bool) -> dict[str, Any]:
    """Return the content of one rank's file. Its tensors are read from the disk when they are used.

    Args:
        rank: rank that wrote the file.
        weights: whether that rank wrote model and optimizer.
    """
    path = file_of(folder, rank)
    if not path.is_file():
        raise CheckpointError(f"resume={folder}: no checkpoint there ({path.name} is missing){_newest_near(folder)}")
    try:
        content: dict[str, Any] = read_values(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: unreadable ({str(error).removeprefix(f'{path}: ')})") from error
    found = content.get("format") if isinstance(content, dict) else None
    if type(found) is not int or found != FORMAT:
        shown = found if type(found) is int and abs(found) < 2**63 else type(found).__name__
        raise CheckpointError(f"{path}: format {shown}, this suite reads {FORMAT}")
    check_content(path, content, weights)
    return content


def by_age(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``; the one that was written last comes last.

    A run that resumed from an earlier checkpoint writes lower steps than the run before it.
    """
    found = [path for path in folder.glob("step_*") if path.is_dir()]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _newest_near(folder: Path) -> str:
    """Return a hint at the newest checkpoint of the run whose folder, or a file or folder in it, is named."""
    found = [path for each in (folder, folder / "checkpoints", folder.parent) for path in by_age(each)]
    return f"; the newest checkpoint near it is {found[-1]}" if found else ""


def file_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file in the folder of a checkpoint."""
    return folder / f"rank_{rank}.pt"


def require_finite(path: Path, state: Mapping[str, object]) -> None:
    """Raise CheckpointError if a tensor in ``state`` contains NaN or infinity."""
    for name, tensor in _tensors(state):
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            raise CheckpointError(
                f"{path}: {bad:,} of the {tensor.numel():,} numbers of {name} are not finite: the run "
                "had diverged when it was written, or the file was damaged; resume from an earlier checkpoint"
            )


def _tensors(state: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested mappings and sequences, each with its dotted path."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, Mapping | list | tuple):
        entries = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, value in entries:
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


def check_content(path: Path, content: Mapping[Any, Any], weights: bool) -> None:
    """Raise an error if a rank's file lacks an entry or has one of another type.

    Args:
        weights: whether that rank wrote model and optimizer.

    Raises:
        CheckpointError: naming the entry.
    """
    expected: dict[str, Callable[[Any], bool]] = {
        "layout": _is_layout,
        "seed": lambda value: type(value) is int and 0 <= value < 2**64,
        "settings": lambda value: _is_named(value, _is_plain),
        "configuration": lambda value: _is_named(value, _is_plain),
        "progress": _is_progress,
        "random": _is_random_state,
        "base": lambda value: value is None or isinstance(value, str),
        **({"model": _are_tensors, "updaters": _are_states} if weights else {}),
    }
    if "buffers" in content:
        expected["buffers"] = _are_tensors
    if "late" in content:
        expected["late"] = lambda value: isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    for name, fits in expected.items():
        if name not in content:
            raise CheckpointError(f"{path}: damaged: {name} is missing; resume from an earlier checkpoint")
        if not fits(content[name]):
            raise CheckpointError(
                f"{path}: damaged: {name} is not as a checkpoint has it; resume from an earlier checkpoint"
            )


def _is_named(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and fits(each) for name, each in value.items())


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return _is_named(value, _is_plain) if isinstance(value, Mapping) else isinstance(value, _PLAIN)


def _is_layout(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.keys() != set(AXES):
        return False
    ranks = 1
    for size in value.values():
        if type(size) is not int or not 1 <= size <= MOST_RANKS:
            return False
        ranks *= size
    return ranks <= MOST_RANKS


def _is_progress(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"step", "counted", "history"} <= value.keys() <= {*COUNTS, "history"}:
        return False
    counts = [count for name, count in value.items() if name != "history"]
    return all(type(count) is int and 0 <= count < 2**63 for count in counts) and _is_history(value["history"])


def _is_history(value: Any) -> bool:
    def is_number(score: Any) -> bool:
        return isinstance(score, int | float) and not isinstance(score, bool)

    return isinstance(value, list | tuple) and all(
        isinstance(entry, list | tuple)
        and len(entry) == 2
        and type(entry[0]) is int
        and 0 <= entry[0] < 2**63
        and _is_named(entry[1], is_number)
        for entry in value
    )


def _is_random_state(value: Any) -> bool:
    if not _are_tensors(value) or "cpu" not in value or not value.keys() <= {"cpu", "cuda"}:
        return False
    flat = all(state.dtype == torch.uint8 and state.ndim == 1 for state in value.values())
    return flat and value["cpu"].shape == torch.get_rng_state().shape


def _is_tensor(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _are_tensors(value: Any) -> bool:
    return _is_named(value, _is_tensor)


def _are_states(value: Any) -> bool:
    """Return whether ``value`` is a list of updater states: plain values, and named tensors at most two levels deep."""
    return isinstance(value, list) and all(
        _is_named(state, lambda entry: _is_tensor(entry) or _are_tensors(entry) or _is_plain(entry)) for state in value
    )
