"""Use shards that NVIDIA's tools packed, without a copy: count and check their rows, and link the files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np

from benchmarks.bert.preparation import hdf5
from benchmarks.bert.preparation.packing import MAX_SEQUENCES
from benchmarks.bert.preparation.pipeline import EVALUATION_FILE, PACKED, PreparedText
from common.data.manifest import FileEntry, file_entry
from common.data.shard_order import shard_sizes
from common.data.stages import Record, Stages
from common.errors import DataError

VOCABULARY = 30_522
MAX_SEQUENCE_LENGTH = 512


def fingerprint(packed_dir: Path, eval_file: Path) -> str:
    """Return the SHA-256 over the names and sizes of all files.

    Raises:
        DataError: a file is missing.
    """
    digest = hashlib.sha256()
    for path in (*shards_of(packed_dir), eval_file):
        if not path.is_file():
            raise DataError(f"{path} is missing")
        digest.update(f"{path.name}\t{path.stat().st_size}\n".encode())
    return digest.hexdigest()


def shards_of(packed_dir: Path) -> list[Path]:
    """Return the paths of the shards ``part_00000``, ``part_00001``, … of a folder.

    Raises:
        DataError: the folder has no shards, or a number is missing.
    """
    found = sorted(path for path in packed_dir.glob("part_*") if re.fullmatch(r"part_\d{5}", path.name))
    if not found:
        raise DataError(f"{packed_dir} holds no shards part_00000 …")
    for number, path in enumerate(found):
        if path.name != f"part_{number:05d}":
            raise DataError(f"{packed_dir} lacks part_{number:05d}")
    return found


def adopt(packed_dir: Path, eval_file: Path, data_dir: Path, work_dir: Path, workers: int) -> PreparedText:
    """Count the rows of all shards and create symbolic links to the files in ``data_dir``.

    Args:
        packed_dir: folder of the shards.
        eval_file: evaluation set, unpacked (one sequence per row).
        data_dir: folder for the links; may already contain the same files.
        work_dir: folder for the records of finished shards.

    Raises:
        DataError: a file is missing or damaged, shards differ in size by more than one row, or ``data_dir`` has
            other files.
    """
    shards = shards_of(packed_dir)
    with Stages(work_dir / "records", workers) as stages:
        records = stages.run("count", {path.name: (path,) for path in shards}, count_shard)
    rows = [sum(record["packs"]) for record in records.values()]
    expected = shard_sizes(sum(rows), len(rows), larger_first=True).tolist()
    for path, found, wanted in zip(shards, rows, expected, strict=True):
        if found != wanted:
            raise DataError(f"{path} has {found} rows where {wanted} of {sum(rows)} are expected: a shard is not whole")
    evaluation = len(hdf5.read_varlength(eval_file))
    _link(packed_dir, data_dir / PACKED)
    _link(eval_file, data_dir / EVALUATION_FILE)
    sizes = np.sum([record["packs"] for record in records.values()], axis=0).tolist()
    files = {f"{PACKED}/{name}": FileEntry(record["bytes"], record["sha256"]) for name, record in records.items()}
    return PreparedText(
        {**files, EVALUATION_FILE: file_entry(eval_file)},
        {
            "train_samples": sum(size * count for size, count in enumerate(sizes, 1)),
            "train_packs": sum(sizes),
            **{f"packs_of_{size}": count for size, count in enumerate(sizes, 1)},
            "shards": len(shards),
            "eval_samples": evaluation,
            "vocabulary": VOCABULARY,
            "max_sequence_length": MAX_SEQUENCE_LENGTH,
        },
    )


def count_shard(path: Path) -> Record:
    """Return the numbers of packs of one, two and three sequences in a shard, its bytes and its checksum.

    Raises:
        DataError: the shard is damaged, or a pack does not have one to three sequences.
    """
    sizes = hdf5.pack_sizes_of(path)
    if len(sizes) and not 1 <= sizes.min() <= sizes.max() <= MAX_SEQUENCES:
        raise DataError(f"{path} has packs of {sizes.min()} to {sizes.max()} sequences, not of 1 to {MAX_SEQUENCES}")
    entry = file_entry(path)
    packs = np.bincount(sizes, minlength=MAX_SEQUENCES + 1)[1:].tolist()
    return {"packs": packs, "bytes": entry.bytes, "sha256": entry.sha256}


def _link(target: Path, link: Path) -> None:
    if link.exists():
        if not link.samefile(target):
            raise DataError(f"{link} is there already and is not {target}; name another --data-dir")
        return
    link.unlink(missing_ok=True)  # a broken link: its target does not exist
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target.resolve())
