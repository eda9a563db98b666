"""Synthetic raw data: a folder that is renamed when it is complete, its marker file, and text for its content."""

from __future__ import annotations

import ast
import json
import multiprocessing
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from common.data.preparation import LOCK, locked
from common.data.stages import start_worker
from common.errors import DataError
from common.untrusted.strict_json import read_json_object

Plan = TypeVar("Plan")
Drawn = TypeVar("Drawn")
_Documentable = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

MARKER = "SYNTHETIC"
"""Name of the file that marks a raw folder, and thus all data that are prepared from it, as synthetic."""
FORMER_MARKER = "STAND_IN"
"""Name of the same file in earlier versions. It is an error, so that such data never count as real."""
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
_LEAST_CHARACTERS = 40


def mark(raw_dir: Path, description: Mapping[str, object]) -> None:
    """Mark ``raw_dir`` as synthetic; ``description`` is stored as JSON."""
    (raw_dir / MARKER).write_text(json.dumps(description, sort_keys=True) + "\n", encoding="utf-8")


def marker_of(raw_dir: Path, *found: Path) -> Path | None:
    """Return the marker of synthetic raw data; None for real data.

    Args:
        raw_dir: the folder that the user names.
        found: files below it that are read. Their parent folders are searched, too, so that synthetic data are
            recognised if the user names a folder above them.

    Raises:
        DataError: an earlier version marked the data.
    """
    between = [folder for path in found for folder in path.parents if folder.is_relative_to(raw_dir)]
    for folder in (raw_dir, *between):
        if (folder / MARKER).exists():
            return folder / MARKER
        if (folder / FORMER_MARKER).exists():
            raise DataError(
                f"{folder / FORMER_MARKER} marks synthetic data of an earlier version; rename this file to {MARKER}"
            )
    return None


def description_of(raw_dir: Path, *found: Path) -> dict[str, Any] | None:
    """Return the description that :func:`mark` wrote; None for real data.

    Raises:
        DataError: the file is damaged, or an earlier version marked the data.
    """
    marker = marker_of(raw_dir, *found)
    if marker is None:
        return None
    try:
        return read_json_object(marker)
    except DataError as error:
        raise DataError(f"{marker} is damaged ({error}); generate the data again") from error


def drawn(draw: Callable[[Plan], Drawn], plans: Sequence[Plan], workers: int, per_worker: int = 1) -> Iterator[Drawn]:
    """Yield the result of ``draw`` for each plan, in order.

    Args:
        draw: a module-level function, so that other processes can receive it.
        workers: largest number of processes.
        per_worker: number of plans that are worth a process. Fewer than two times as many are drawn in this process.

    Raises:
        DataError: a process was killed.
    """
    workers = min(workers, len(plans) // per_worker)
    if workers <= 1:
        yield from map(draw, plans)
        return
    chunk = max(1, min(per_worker, len(plans) // (4 * workers)))  # several chunks per process balance their loads
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker) as pool:
            yield from pool.map(draw, plans, chunksize=chunk)
    except BrokenProcessPool as error:
        raise DataError("a worker process was killed, perhaps for want of memory: use fewer --workers") from error


@contextmanager
def generated(raw_dir: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to ``raw_dir`` when the block succeeds.

    If the block fails, the temporary folder stays, and the next call deletes its contents.

    Raises:
        DataError: ``raw_dir`` is not empty or cannot be replaced, or another process is generating it.
    """
    raw_dir = raw_dir.resolve()  # a link stays, and the data are written to the disk to which it leads
    marker_of(raw_dir)  # for a folder of an earlier version, its error says more than the next one
    if raw_dir.exists() and any(raw_dir.iterdir()):
        raise DataError(f"{raw_dir} is not empty; generate synthetic data into a new or empty folder")
    partial = raw_dir.with_name(f"{raw_dir.name}.partial")
    with locked(partial, doing="generating"):
        try:
            if raw_dir.exists():
                raw_dir.rmdir()  # the root of a file system fails here, and not in the renaming after the work
        except OSError as error:
            raise DataError(
                f"{raw_dir} cannot be replaced by the generated folder: {error.strerror}; name a new folder in it"
            ) from error
        for path in partial.iterdir():  # left by an interrupted command
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        yield partial
        (partial / LOCK).unlink()
        partial.replace(raw_dir)


@contextmanager
def generated_folders(raw_dir: Path, kind: str, options: Any, folders: Iterable[str]) -> Iterator[Path]:
    """Yield a temporary folder like :func:`generated`, with a marker and with empty folders.

    Args:
        kind: kind of the data; the marker has it and all ``options``.
        options: an object of an options class (:mod:`common.data.options`).
        folders: paths below the temporary folder.
    """
    with generated(raw_dir) as folder:
        mark(folder, {"kind": kind, **asdict(options)})
        for name in folders:
            (folder / name).mkdir(parents=True)
        yield folder


def documentation() -> Iterator[tuple[str, list[str]]]:
    """Yield name and paragraphs of each docstring with enough prose in the standard library, sorted by module."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in sorted(sys.stdlib_module_names):
        single = library / f"{name}.py"
        files = [single] if single.is_file() else sorted((library / name).rglob("*.py"))
        for path in files:
            relative = path.relative_to(library)
            if _LEFT_OUT & set(relative.parts):
                continue
            for title, paragraphs in _documented(path, ".".join(relative.with_suffix("").parts)):
                if sum(map(len, paragraphs)) >= _LEAST_CHARACTERS:
                    yield title, paragraphs


def _documented(path: Path, module: str) -> Iterator[tuple[str, list[str]]]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # some files are invalid on purpose
        return
    for name, node in _definitions(tree, module):
        paragraphs = (" ".join(text.split()) for text in re.split(r"\n\s*\n", ast.get_docstring(node) or ""))
        yield name, [text for text in paragraphs if _is_prose(text)]


def _definitions(node: _Documentable, name: str) -> Iterator[tuple[str, _Documentable]]:
    """Yield ``node`` and all classes and functions in it, with their dotted names."""
    yield name, node
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _definitions(child, f"{name}.{child.name}")


def _is_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in text)
    return text.isprintable() and ">>>" not in text and text.count(" ") >= 5 and letters >= 0.85 * len(text)
