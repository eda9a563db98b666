"""Preparation and verification of click logs for one of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data import manifest
from common.data.manifest import Manifest
from common.data.preparation import preparing
from common.data.published import Published, PublishedFile
from common.data.stages import memory_of_start
from common.errors import DataError
from common.recommendation.criteo.preparation.encoding import Encoding
from common.recommendation.criteo.preparation.raw_days import PUBLISHED_COUNTS, open_raw
from common.recommendation.criteo.preparation.stages import CriteoPipeline
from common.recommendation.criteo.prepared import FORM, HOTNESS, TABLE_ROWS, open_prepared
from common.recommendation.criteo.sample_rows import IDS, WORD, SampleFormat

INTERMEDIATE = "intermediate"
BYTES_PER_WORKER = 1 << 27
"""Bytes of raw files from which an additional process is worthwhile."""
_BLOCK_BYTES = 64 << 20


def prepare(raw_dir: Path, data_dir: Path, encoding: Encoding, workers: int = 1, memory: int = 16 << 30) -> Manifest:
    """Write the prepared data set. Do nothing if it exists, and continue after an interruption.

    Args:
        memory: bytes for rows of all processes together. In addition, the order of the training samples needs 8 bytes
            per sample, and the numbering of a feature 16 bytes per different category. The ids of multi-hot tables
            (24 GB) should fit the page cache. A continued preparation keeps the memory per process of its start.

    Raises:
        DataError: the raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` has data
            prepared from another source or with other settings; or another process prepares now.
    """
    raw = open_raw(raw_dir)
    published = published_logs(encoding.sample_format)
    if encoding.reduced:
        published = replace(published, known=f"tables have at most {encoding.largest:,} rows")
    wanted = {"fingerprint": raw.fingerprint(), "settings": settings_of(encoding)}
    chosen = encoding.sample_format
    with preparing(data_dir, chosen.name, chosen.command, wanted, published, raw.synthetic) as job:
        if job.found is not None:
            return job.found
        work_dir = job.begin(INTERMEDIATE)
        workers = min(workers, 1 + sum(path.stat().st_size for day in raw.files for path in day) // BYTES_PER_WORKER)
        own = memory_of_start(work_dir / "memory", memory // workers)
        made = CriteoPipeline(raw, encoding, data_dir, work_dir, workers, own).run()
        source = {TABLE_ROWS: json.dumps(made.table_rows), HOTNESS: json.dumps(encoding.hotness), FORM: raw.form}
        counts = {"train_samples": made.train_samples, "eval_samples": made.eval_samples}
        return job.finish(made.files, counts, "Criteo's click logs", {**source, "numpy": np.__version__})


def settings_of(encoding: Encoding) -> str:
    """Return the settings that the manifest records, as JSON."""
    return json.dumps({HOTNESS: encoding.hotness, "largest_table": encoding.largest}, sort_keys=True)


def verify(data_dir: Path, sample_format: SampleFormat, workers: int = 1) -> Manifest:
    """Check every checksum of ``data_dir``, and that labels, dense features and ids are valid. Reads all files.

    Raises:
        DataError: a file is missing or changed, or its content is invalid.
    """
    prepared = open_prepared(data_dir, sample_format)
    manifest.verify(data_dir, sample_format.name, sample_format.command)
    for name, rows in (
        (sample_format.train_file, prepared.train_samples),
        (sample_format.eval_file, prepared.eval_samples),
    ):
        check_rows(
            data_dir / name, rows, sample_format, prepared.table_rows, prepared.hotness, "prepare again", workers
        )
    return prepared.manifest


def check_rows(
    path: Path,
    rows: int,
    sample_format: SampleFormat,
    table_rows: Sequence[int],
    hotness: Sequence[int],
    remedy: str,
    workers: int,
) -> NDArray[np.int32]:
    """Check that labels, dense features and ids of a prepared file are valid. Reads the whole file.

    Args:
        table_rows, hotness: rows and ids per sample of each table.
        remedy: what to do about a wrong row, for messages.

    Returns:
        The largest value of each id word.

    Raises:
        DataError: a row is invalid.
    """
    words = IDS + sum(hotness)
    step = max(1, _BLOCK_BYTES // (words * WORD))
    limits = np.repeat(np.array(table_rows), hotness)

    def check(first: int) -> NDArray[np.int32]:
        last = min(first + step, rows)
        block = np.fromfile(path, np.int32, (last - first) * words, offset=first * words * WORD).reshape(-1, words)
        where = f"{path}: among rows {first:,} to {last:,} are"
        if block[:, 0].min() < 0 or block[:, 0].max() > 1:
            raise DataError(f"{where} labels that are neither 0 nor 1; {remedy}")
        if fault := sample_format.fault_of(block[:, 1:IDS]):
            raise DataError(f"{where} dense features {fault}; {remedy}")
        wrong = (block[:, IDS:] < 0) | (block[:, IDS:] >= limits)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            table = int(np.repeat(np.arange(len(hotness)), hotness)[column])
            raise DataError(
                f"{path}: row {first + row:,} has category {block[row, IDS + column]:,} of table C{table + 1}, which "
                f"has {table_rows[table]:,} rows; {remedy}"
            )
        largest: NDArray[np.int32] = block[:, IDS:].max(axis=0)
        return largest

    found = np.zeros(len(limits), np.int32)
    with ThreadPoolExecutor(workers) as pool:
        try:
            for largest in pool.map(check, range(0, rows, step)):
                np.maximum(found, largest, out=found)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return found


def published_logs(sample_format: SampleFormat) -> Published:
    """Return the published numbers of samples and MD5s of the benchmark's data, in this format."""
    return Published(
        PUBLISHED_COUNTS,
        {name: PublishedFile(md5=md5) for name, md5 in sample_format.checksums.items()},
    )
