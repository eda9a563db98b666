"""Download, prepare, verify and generate the data of BERT: Wikipedia as packed and masked sequences in HDF5.

The prepared files are ``packed/part_00000`` … (one to three sequences per row), ``eval_varlength/part_eval_10k.hdf5``,
``vocab.txt``, ``manifest.json`` and, with ``--unpacked``, ``varlength/part_00000_of_…`` (one sequence per row).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.bert import raw
from benchmarks.bert.preparation import articles, hdf5
from benchmarks.bert.preparation.packing import MAX_SEQUENCES
from benchmarks.bert.preparation.pipeline import EVALUATION_FILE, PACKED, PreparedText, TextPipeline
from benchmarks.bert.preparation.wordpiece import read_vocabulary
from benchmarks.bert.raw import PreparationSizes, RawText
from benchmarks.bert.synthetic import generate
from common.data import manifest, preparation
from common.data.commands import DataCommands
from common.data.manifest import FileEntry, Manifest, digest, file_entry
from common.data.options import Option, Options
from common.data.preparation import preparing
from common.data.published import Published
from common.data.shard_streams import shard_sizes
from common.data.stages import Record, Stages
from common.data.synthetic import MARKER, description_of
from common.errors import ConfigError, DataError

FORMAT = "bert-hdf5/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=bert --raw-dir RAW --data-dir DATA"
INTERMEDIATE = "intermediate"
DISK_PER_TEXT_BYTE = {(False, False): 30, (True, False): 48, (False, True): 55, (True, True): 78}
"""Peak bytes on disk per byte of Wikipedia text, by (``unpacked``, ``keep_intermediate``)."""
REBUILT = "English Wikipedia, rebuilt from extracted articles"
TEXT_PER_WORKER = 1 << 20
"""Minimum bytes of text per additional worker process."""
PUBLISHED = Published({"train_samples": 156_726_829, "eval_samples": 10_000})
"""Numbers of training and evaluation sequences of the published data set."""
VOCABULARY, MAX_SEQUENCE_LENGTH = 30_522, 512
"""Sizes of shards that others packed, which do not state them."""


@dataclasses.dataclass(frozen=True)
class PrepareOptions(Options):
    """Options of ``prepare``. ``shards`` and ``max_sequence_length`` override the benchmark's or synthetic data's."""

    shards: Annotated[int | None, Option("files of training data (default 4320)")] = None
    unpacked: Annotated[bool, Option("also write shards of single sequences")] = False
    keep_intermediate: Annotated[bool, Option("keep the intermediate files")] = False
    punkt: Annotated[
        Path | None, Option("folder punkt_tab/english of NLTK, to split extracted articles into sentences")
    ] = None
    max_sequence_length: Annotated[int | None, Option("stand-in data only")] = None


def prepare(raw_dir: Path, data_dir: Path, options: PrepareOptions = PrepareOptions(), workers: int = 1) -> Manifest:
    """Write the prepared data set. Do nothing if it is complete, and continue after an interruption.

    Args:
        raw_dir: folder of text and vocabulary, see :mod:`benchmarks.bert.raw`.

    Raises:
        ConfigError: ``options`` changes a size that is fixed for real data.
        DataError: the raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` has data from
            another source or with other options; or another process is preparing it.
    """
    source = raw.open_raw(raw_dir)
    settings = _settings(source, options)
    vocabulary = read_vocabulary(source.vocabulary)
    if source.stand_in is None:
        _check_real(source)
    wanted = _identity(source, settings, options)
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.stand_in) as job:
        if job.found is not None:
            return job.found
        work_dir = job.begin(INTERMEDIATE)
        if not (work_dir / "records").exists():
            per_byte = DISK_PER_TEXT_BYTE[options.unpacked, options.keep_intermediate]
            preparation.require_space(data_dir, _text_bytes(source) * per_byte, more=False)
        pipeline = TextPipeline(
            source,
            settings,
            data_dir,
            work_dir,
            min(workers, 1 + _text_bytes(source) // TEXT_PER_WORKER),
            options.punkt,
            options.unpacked,
            options.keep_intermediate,
        )
        made = pipeline.run()
        if made.evaluation_md5 not in (None, raw.EVALUATION_MD5):
            text = f"the held-out text has the MD5 {made.evaluation_md5}, published is {raw.EVALUATION_MD5}"
            job.published = dataclasses.replace(job.published, known=text)
        shutil.copyfile(source.vocabulary, data_dir / raw.VOCABULARY)
        files = {**made.files, raw.VOCABULARY: manifest.file_entry(data_dir / raw.VOCABULARY)}
        counts = {"vocabulary": len(vocabulary), "max_sequence_length": settings.max_sequence_length}
        description = REBUILT if source.articles else "English Wikipedia of 2020-01-01, the distributed text"
        versions = {"unicode": unicodedata.unidata_version}
        return job.finish(files, {**made.counts, **counts}, description, versions, options.keep_intermediate)


def verify(data_dir: Path) -> Manifest:
    """Check all checksums of ``data_dir``; raise :class:`DataError` at the first difference."""
    return manifest.verify(data_dir, FORMAT, PREPARE_COMMAND)


def adopt_packed(
    folder: Path,
    data_dir: Path,
    eval_file: Annotated[Path | None, Option("with --adopt: the evaluation set of the packed shards")] = None,
    workers: int = 1,
) -> Manifest:
    """Check shards that other tools packed, create links to them in ``data_dir``, and write the manifest.

    Raises:
        ConfigError: ``eval_file`` is missing.
        DataError: a shard is missing or damaged, or ``data_dir`` has other data.
    """
    if eval_file is None:
        raise ConfigError("--adopt and --eval-file go together: the evaluation set is no part of the folder of shards")
    wanted = {"fingerprint": packed_fingerprint(folder, eval_file), "settings": "packed by other tools"}
    synthetic = description_of(folder)
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, synthetic) as job:
        if job.found is not None:
            return job.found
        made = link_packed(folder, eval_file, data_dir, job.begin(INTERMEDIATE), workers)
        return job.finish(made.files, made.counts, "", {"description": f"packed by other tools: {folder}"})


def _settings(source: RawText, options: PrepareOptions) -> PreparationSizes:
    if source.stand_in is None and options.max_sequence_length is not None:
        raise ConfigError("--max-sequence-length: Wikipedia's sequences have 512 tokens, only a stand-in's may differ")
    sizes = {"shards": options.shards, "max_sequence_length": options.max_sequence_length}
    given = {name: size for name, size in sizes.items() if size is not None}
    return dataclasses.replace(raw.settings_of(source), **given)


def _check_real(source: RawText) -> None:
    """Check that the vocabulary and the evaluation text are those of the benchmark."""
    known = {source.vocabulary: raw.VOCABULARY_MD5}
    if source.evaluation is not None:
        known[source.evaluation] = raw.EVALUATION_MD5
    for path, expected in known.items():
        if (found := digest(path, "md5")) != expected:
            raise DataError(
                f"{path}: MD5 {found} where the benchmark's has {expected}: fetch it again; for other text put a file "
                f"{MARKER} beside it that says what it is"
            )


def _identity(source: RawText, settings: PreparationSizes, options: PrepareOptions) -> dict[str, str]:
    """Return the values that identify a preparation: it can only continue if they are equal."""
    chosen = {**dataclasses.asdict(settings), "unpacked": options.unpacked}
    if source.articles:
        chosen["sentences"] = articles.splitter_description(options.punkt)
    return {"fingerprint": source.fingerprint(), "settings": json.dumps(chosen, sort_keys=True)}


def _text_bytes(source: RawText) -> int:
    return sum(path.stat().st_size for path in (*source.parts, *source.articles))


def packed_fingerprint(packed_dir: Path, eval_file: Path) -> str:
    """Return the SHA-256 over the names and sizes of all files.

    Raises:
        DataError: a file is missing.
    """
    hashed = hashlib.sha256()
    for path in (*shards_of(packed_dir), eval_file):
        if not path.is_file():
            raise DataError(f"{path} is missing")
        hashed.update(f"{path.name}\t{path.stat().st_size}\n".encode())
    return hashed.hexdigest()


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


def link_packed(packed_dir: Path, eval_file: Path, data_dir: Path, work_dir: Path, workers: int) -> PreparedText:
    """Count the rows of all shards and create symbolic links to the files in ``data_dir``.

    Args:
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
    """Return ``packs``, the numbers of packs of one, two and three sequences, ``bytes`` and ``sha256`` of a shard.

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


COMMANDS = DataCommands(
    "bert",
    raw="text and vocabulary",
    prepared="prepared sequences",
    real="Wikipedia",
    generate=generate,
    prepare=prepare,
    verify=verify,
    adopt=adopt_packed,
    published=PUBLISHED,
)
