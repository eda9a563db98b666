"""Adoption of samples that others published in this suite's prepared format: checked and linked, not made again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.data import manifest, synthetic
from common.data.manifest import FileEntry, Manifest
from common.data.preparation import link_or_copy_all, preparing
from common.data.published import SYNTHETIC
from common.errors import DataError
from common.recommendation.criteo.preparation.encoding import Encoding
from common.recommendation.criteo.preparation.raw_days import fingerprint_of
from common.recommendation.criteo.prepare import check_rows, published_logs, settings_of
from common.recommendation.criteo.prepared import HOTNESS, TABLE_ROWS
from common.recommendation.criteo.sample_rows import IDS, WORD

_REMEDY = "name the folder of the published files, complete and undamaged"


def adopt(folder: Path, data_dir: Path, encoding: Encoding, workers: int = 1) -> Manifest:
    """Check the two files of ``folder``, link them into ``data_dir`` and write the manifest.

    Real files must be the published ones, by size and MD5. Synthetic files, next to a file ``SYNTHETIC``, may have any
    valid rows. Does nothing if ``data_dir`` has the files already; an interrupted check starts again.

    Args:
        folder: folder of the files; other files there are ignored.

    Raises:
        DataError: a file is missing or differs, or ``data_dir`` has other data.
    """
    chosen = encoding.sample_format
    described = synthetic.description_of(folder)
    counted = {chosen.eval_file: "eval_samples", chosen.train_file: "train_samples"}
    rows = _rows(folder, tuple(counted), IDS + sum(encoding.hotness))
    published = published_logs(chosen) if described is None else SYNTHETIC
    for name, count in counted.items():
        if published.counts.get(count, rows[name]) != rows[name]:
            raise DataError(
                f"{folder / name} has {rows[name]:,} samples and not {published.counts[count]:,}; {_REMEDY}"
            )
    fingerprint = fingerprint_of(folder, [folder / name for name in counted], described)
    wanted = {"fingerprint": fingerprint, "settings": settings_of(encoding)}
    with preparing(data_dir, chosen.name, chosen.command, wanted, published, described, adopted=folder) as job:
        if job.found is not None:
            return job.found
        files = _entries(folder, tuple(counted))
        for name, file in published.files.items():
            if difference := file.difference(name, files[name]):
                raise DataError(f"{folder}: {difference}; {_REMEDY}")
        table_rows: Sequence[int] = encoding.table_rows
        if described is not None:
            table_rows = _synthetic_rows(folder, rows, encoding, workers)
        linked = [(folder / name, data_dir / name) for name in counted]
        link_or_copy_all(linked, data_dir, "delete it or name another --data-dir")
        source = {
            TABLE_ROWS: json.dumps(list(table_rows)),
            HOTNESS: json.dumps(encoding.hotness),
            "description": f"prepared by others: {'published files' if described is None else json.dumps(described)}",
        }
        counts = {counted[name]: rows[name] for name in (chosen.train_file, chosen.eval_file)}
        return job.finish(files, counts, "", source)


def _rows(folder: Path, names: Sequence[str], words: int) -> dict[str, int]:
    """Return the number of samples of each file, from its size."""
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise DataError(f"{folder} lacks {' and '.join(missing)}; {_REMEDY}")
    sizes = {name: (folder / name).stat().st_size for name in names}
    for name, size in sizes.items():
        if size % (words * WORD) or not size:
            raise DataError(
                f"{folder / name} has {size:,} bytes, no whole number of samples of {words * WORD}; {_REMEDY}"
            )
    return {name: size // (words * WORD) for name, size in sizes.items()}


def _entries(folder: Path, names: Sequence[str]) -> dict[str, FileEntry]:
    total = sum((folder / name).stat().st_size for name in names)
    with tqdm(total=total, desc="checksums", unit="B", unit_scale=True, disable=None) as bar:
        return {name: manifest.file_entry(folder / name, md5=True, progress=bar.update) for name in names}


def _synthetic_rows(folder: Path, rows: Mapping[str, int], encoding: Encoding, workers: int) -> list[int]:
    """Return the rows that the tables of synthetic samples need: the largest id of each plus 1."""
    largest = [
        check_rows(
            folder / name, count, encoding.sample_format, encoding.table_rows, encoding.hotness, _REMEDY, workers
        )
        for name, count in rows.items()
    ]
    begins = np.cumsum((0, *encoding.hotness[:-1]))
    return [int(found) + 1 for found in np.maximum.reduceat(np.max(largest, axis=0), begins)]
