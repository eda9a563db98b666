"""Prepared samples that others publish in this suite's own format: checked, linked and described, not made again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.data import manifest, preparation, stand_in
from common.data.manifest import Digests, Manifest
from common.data.placing import place
from common.errors import DataError
from common.recommendation.criteo.preparation.encoding import Encoding
from common.recommendation.criteo.preparation.raw_days import PUBLISHED_COUNTS, fingerprint_of
from common.recommendation.criteo.prepare import check_rows, settings_of
from common.recommendation.criteo.prepared import HOTNESS, MD5_OF, TABLE_ROWS
from common.recommendation.criteo.sample_rows import IDS, WORD

_REMEDY = "name the folder of the published files, complete and undamaged"


def adopt(folder: Path, data_dir: Path, encoding: Encoding, published: Mapping[str, str], workers: int = 1) -> Manifest:
    """Check the two files of ``folder``, link them into ``data_dir`` and write the manifest.

    Real files have to be the published ones, by size and MD5. Synthetic ones, beside the file ``STAND_IN``, may be any
    whose rows are possible. Does nothing where ``data_dir`` has them already; an interrupted check begins again.

    Args:
        folder: of the files; other files there are not looked at.
        data_dir: receives links, or copies on another disk; may be ``folder``.
        encoding: of the benchmark.
        published: MD5 of each file.
        workers: threads.

    Raises:
        DataError: a file is missing or another one, or ``data_dir`` holds other data.
    """
    chosen = encoding.sample_format
    described = stand_in.description_of(folder)
    counted = {chosen.eval_file: "eval_samples", chosen.train_file: "train_samples"}
    rows = _rows(folder, tuple(counted), IDS + sum(encoding.hotness))
    if described is None:
        for name, count in counted.items():
            if rows[name] != PUBLISHED_COUNTS[count]:
                raise DataError(
                    f"{folder / name} has {rows[name]:,} samples and not {PUBLISHED_COUNTS[count]:,}; {_REMEDY}"
                )
    fingerprint = fingerprint_of(folder, [folder / name for name in counted], described)
    wanted = {"fingerprint": fingerprint, "settings": settings_of(encoding)}
    with preparation.locked(data_dir):
        compared = None if data_dir.samefile(folder) else wanted
        if found := preparation.already_prepared(data_dir, chosen.name, chosen.command, compared):
            return found
        digests = _digests(folder, tuple(counted))
        if described is None:
            for name, found_digests in digests.items():
                if found_digests.md5 != published[name]:
                    raise DataError(
                        f"{folder / name}: MD5 {found_digests.md5} where the published file has {published[name]}; "
                        f"{_REMEDY}"
                    )
            table_rows: Sequence[int] = encoding.table_rows
        else:
            table_rows = _synthetic_rows(folder, rows, encoding, workers)
        for name in counted:
            place(folder / name, data_dir / name, "delete it or name another --data-dir")
        source = {
            **wanted,
            TABLE_ROWS: json.dumps(list(table_rows)),
            HOTNESS: json.dumps(encoding.hotness),
            **{f"{MD5_OF}{name}": found_digests.md5 for name, found_digests in digests.items()},
            "description": f"prepared by others: {'published files' if described is None else json.dumps(described)}",
            "prepared": preparation.now(),
        }
        files = {name: found_digests.entry for name, found_digests in digests.items()}
        counts = {counted[name]: rows[name] for name in (chosen.train_file, chosen.eval_file)}
        written = Manifest(chosen.name, files, counts, described is not None, source)
        manifest.write(data_dir, written)
        return written


def _rows(folder: Path, names: Sequence[str], words: int) -> dict[str, int]:
    """Samples of each file, by its size."""
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise DataError(f"{folder} lacks {' and '.join(missing)}; {_REMEDY}")
    sizes = {name: (folder / name).stat().st_size for name in names}
    for name, size in sizes.items():
        if size % (words * WORD) or not size:
            raise DataError(
                f"{folder / name} has {size:,} bytes, no whole number of samples of {words * WORD}; {_REMEDY}"
            )
    return {name: size // (words * WORD) for name, size in sizes.items()}


def _digests(folder: Path, names: Sequence[str]) -> dict[str, Digests]:
    total = sum((folder / name).stat().st_size for name in names)
    with tqdm(total=total, desc="checksums", unit="B", unit_scale=True, disable=None) as bar:
        return {name: manifest.digests(folder / name, bar.update) for name in names}


def _synthetic_rows(folder: Path, rows: Mapping[str, int], encoding: Encoding, workers: int) -> list[int]:
    """Rows that the tables of synthetic samples need: one more than the largest id of each."""
    largest = [
        check_rows(
            folder / name, count, encoding.sample_format, encoding.table_rows, encoding.hotness, _REMEDY, workers
        )
        for name, count in rows.items()
    ]
    begins = np.cumsum((0, *encoding.hotness[:-1]))
    return [int(found) + 1 for found in np.maximum.reduceat(np.max(largest, axis=0), begins)]
