"""Preparation of pictures as record files. An interrupted preparation continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from common.data import preparation
from common.data.threads import ahead
from common.formats.recordio import RecordWriter

STATE = "prepare.partial"
"""File in the data folder with the source of an unfinished preparation."""
_WINDOW = 64
"""Pictures that are read ahead of the writer, per worker thread."""
_HEADER_BYTES = 64
"""Upper bound of what a record has besides the picture."""


def begin(data_dir: Path, names: Iterable[str], wanted: Mapping[str, str], sizes: Iterable[int]) -> None:
    """Begin or continue a preparation. Files from an unknown source are deleted.

    Args:
        names: the record files and their indices.
        wanted: source and settings; see :func:`common.data.preparation.already_prepared`.
        sizes: bytes of every picture.

    Raises:
        DataError: the interrupted preparation had another source, or the disk is too small.
    """
    state = data_dir / STATE
    if not state.exists():
        for name in names:
            (data_dir / name).unlink(missing_ok=True)
            (data_dir / f"{name}.partial").unlink(missing_ok=True)
    preparation.begin_or_continue(data_dir, state, wanted)
    present = sum(path.stat().st_size for path in data_dir.iterdir() if path.is_file())
    preparation.require_space(data_dir, sum(size + _HEADER_BYTES for size in sizes) - present)


def write(rec: Path, record_ids: Sequence[int], payload: Callable[[int], bytes], workers: int) -> None:
    """Write the payload of each id in this order, computed in ``workers`` threads. A complete file is kept."""
    if rec.exists() and rec.with_suffix(".idx").exists():
        return
    workers = max(1, workers)
    with RecordWriter(rec, resume=True) as writer, ThreadPoolExecutor(workers) as pool:
        remaining = record_ids[writer.written :]
        begun = (pool.submit(payload, record_id) for record_id in remaining)
        for record_id, task in zip(remaining, ahead(begun, _WINDOW * workers, Future.cancel), strict=True):
            writer.write(record_id, task.result())
