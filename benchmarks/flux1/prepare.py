"""Download, prepare, verify and generate the data of FLUX.1: encodings, and an index of their arrays.

The input is published encodings, which are linked, or pictures and captions (:mod:`benchmarks.flux1.pictures`), which
the frozen encoders encode. Both formats of encodings, raw and prepared, are in :mod:`benchmarks.flux1.encodings`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from benchmarks.flux1 import encoders, pictures
from benchmarks.flux1.encoders import Encoders
from benchmarks.flux1.encodings import (
    BINS,
    EMPTY,
    FORMAT,
    PREPARE_COMMAND,
    SHARDS,
    SPLITS,
    EncodingSizes,
    counts_of,
    open_raw,
    read_empty,
    require_timesteps,
)
from benchmarks.flux1.pictures import Sample
from benchmarks.flux1.synthetic import generate
from common.config.loading import build
from common.data import atomic, manifest
from common.data.commands import DataCommands
from common.data.gpu_processes import NetworkProcesses, device_of_process
from common.data.indexed_arrays import INDEX, index_shard, write_index
from common.data.manifest import FileEntry, Manifest
from common.data.options import Option
from common.data.preparation import Preparation, link_or_copy, preparing, require_space, require_space_to_link
from common.data.published import Published, published_files
from common.data.raw_layout import fingerprint_of
from common.data.sources import read_sources
from common.data.stages import Stages
from common.data.synthetic import MARKER
from common.data.threads import read_groups
from common.errors import ConfigError, DataError
from common.formats.array_shards import ArraySample

RECORDS, STAGE = "index_parts", "files"
SHARD_SAMPLES = 256
"""Samples per file of encodings that this program writes; 550 MB."""
TOGETHER = 16
"""Samples that the networks encode together."""
TRAIN, EVAL = 1_099_776, 29_696
"""Number of the benchmark's samples."""
PUBLISHED = Published(counts_of(TRAIN, EVAL, EncodingSizes()), published_files(read_sources("flux1")["empty"].files))


@dataclass(frozen=True)
class EncodingPlan:
    """Settings of the encoding, the same in all processes.

    Attributes:
        folder: folder of the frozen encoders.
        device: ``cpu``, or ``cuda`` for one GPU per process.
        threads: threads per process that read pictures.
    """

    folder: Path
    sizes: EncodingSizes
    device: str
    threads: int


def prepare(
    raw_dir: Path,
    data_dir: Path,
    encoders_dir: Annotated[
        Path | None,
        Option(
            "encode pictures and captions with the encoders in this folder; default: published encodings", "--encoders"
        ),
    ] = None,
    train: Annotated[int, Option("with --encoders: number of training samples", least=1)] = TRAIN,
    eval: Annotated[int, Option("with --encoders: number of validation samples", least=BINS)] = EVAL,
    device: Annotated[Literal["auto", "cpu", "cuda"], Option("with --encoders: device of the encoders")] = "auto",
    workers: int = 1,
) -> Manifest:
    """Write the prepared data set; do nothing if it is complete.

    Every value must be finite. After an interruption, it continues with the files that are left.

    Args:
        raw_dir: folder in the layout of :mod:`benchmarks.flux1.encodings` or, with ``encoders_dir``, of
            :mod:`benchmarks.flux1.pictures`.
        data_dir: receives hard links to published encodings, or copies on another disk.
        workers: processes that read files; with encoders on GPUs, the total number of threads that decode pictures.

    Raises:
        ConfigError: transformers, diffusers or a GPU are missing, or ``train``, ``eval`` or ``device`` are given
            without ``encoders_dir``.
        CheckpointError: an encoder is missing or damaged.
        DataError: raw data are missing, incomplete or damaged, the disk is too small, ``data_dir`` has data of another
            source, or another process is preparing it.
    """
    if encoders_dir is not None:
        return _prepare_pictures(raw_dir, data_dir, encoders_dir, {"train": train, "eval": eval}, device, workers)
    if (train, eval, device) != (TRAIN, EVAL, "auto"):
        raise ConfigError(
            f"--train={train} --eval={eval} --device={device}: only with --encoders; published encodings are used as "
            "they are"
        )
    source = open_raw(raw_dir)
    sizes = _sizes(source.synthetic)
    read_empty(source.empty, sizes, "fetch it again")
    wanted = {"fingerprint": source.fingerprint()}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.synthetic) as job:
        if job.found is not None:
            return job.found
        records_dir = job.begin(RECORDS)
        tasks = {
            f"{split}-{number:05d}": (path, data_dir, split, number, sizes)
            for split, paths in source.splits.items()
            for number, path in enumerate(paths)
        }
        with Stages(records_dir, workers) as stages:
            left = (task for name, task in tasks.items() if stages.record(STAGE, name) is None)
            linked = ((path, data_dir / _linked_name(path, split, number)) for path, _, split, number, _ in left)
            require_space_to_link((path for path, target in linked if not target.exists()), data_dir)
            records = stages.run(STAGE, tasks, link_file)
        for name in EMPTY.values():
            link_or_copy(source.empty / name, data_dir / name, "delete it or name another --data-dir")
        return _finish(job, records, sizes, "encodings of CC12M and COCO 2014")


def _linked_name(path: Path, split: str, number: int) -> str:
    """Return the name of a published file below ``data_dir``."""
    return f"{SPLITS[split]}/{number:05d}{path.suffix}"


def link_file(path: Path, data_dir: Path, split: str, number: int, sizes: EncodingSizes) -> dict[str, Any]:
    """Check, link and index one published file; return the record of the task.

    Raises:
        DataError: as :func:`_indexed`.
    """
    name = _linked_name(path, split, number)
    record = _indexed(path, data_dir, split, number, sizes)
    link_or_copy(path, data_dir / name, "delete it or name another --data-dir")
    return {"name": name, **record}


def encode_file(
    samples: Sequence[Sample], data_dir: Path, split: str, number: int, plan: EncodingPlan
) -> dict[str, Any]:
    """Encode the samples of one file, write and index it; return the record of the task.

    Raises:
        CheckpointError: an encoder is missing or damaged.
        DataError: a picture is damaged, or its encodings have another shape or values that are not finite.
    """
    name = f"{SPLITS[split]}/{number:05d}.arrow"
    with atomic.written(data_dir / name) as partial:
        SHARDS.write(partial, _encoded(samples, plan))
    return {"name": name, **_indexed(data_dir / name, data_dir, split, number, plan.sizes)}


def encode_empty(data_dir: Path, plan: EncodingPlan) -> dict[str, Any]:
    """Write the encodings of the empty caption; return an empty record."""
    for name, values in _encoders(plan).empty().items():
        atomic.save(data_dir / EMPTY[name], values)
    return {}


def _prepare_pictures(
    raw_dir: Path, data_dir: Path, encoders_dir: Path, counts: dict[str, int], device: str, workers: int
) -> Manifest:
    """Encode pictures and captions; see :func:`prepare`."""
    encoders.require_packages()
    source = pictures.open_pictures(raw_dir)
    sizes = _sizes(source.synthetic)
    processes = NetworkProcesses.chosen(device, -(-counts["train"] // SHARD_SAMPLES), workers)
    networks = encoders.files_of(encoders_dir, sizes)
    files = [(path.parent.name, path.name, path.stat().st_size) for path in networks]
    settings = {**counts, "encoders": fingerprint_of(files)}
    wanted = {"fingerprint": source.fingerprint(), "settings": json.dumps(settings, sort_keys=True)}
    published = Published(PUBLISHED.counts)  # the encodings depend on the rounding of the device
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, published, source.synthetic) as job:
        if job.found is not None:
            return job.found
        records_dir = job.begin(RECORDS)
        plan = EncodingPlan(encoders_dir, sizes, processes.device, processes.threads)
        with processes.stages(records_dir, _encoders.cache_clear) as stages:
            samples = {
                "train": pictures.train_samples(source, counts["train"], stages),
                "eval": pictures.eval_samples(source, counts["eval"]),
            }
            tasks = {
                f"{split}-{number:05d}": (found[first : first + SHARD_SAMPLES], data_dir, split, number, plan)
                for split, found in samples.items()
                for number, first in enumerate(range(0, len(found), SHARD_SAMPLES))
            }
            left = sum(len(task[0]) for name, task in tasks.items() if stages.record(STAGE, name) is None)
            require_space(data_dir, left * 2 * sizes.sample_elements)
            stages.run("empty", {"empty": (data_dir, plan)}, encode_empty)
            records = stages.run(STAGE, tasks, encode_file)
        return _finish(job, records, sizes, "CC12M and COCO 2014, encoded here")


@functools.lru_cache(maxsize=1)
def _encoders(plan: EncodingPlan) -> Encoders:
    return Encoders(plan.folder, plan.sizes, device_of_process(plan.device), torch.bfloat16)


def _encoded(samples: Sequence[Sample], plan: EncodingPlan) -> Iterator[ArraySample]:
    """Yield samples with their encodings; threads decode the pictures."""
    networks = _encoders(plan)
    for group in read_groups(samples, Sample.read, plan.threads, TOGETHER):
        arrays = networks.pictures(torch.stack([picture for _, (picture, _) in group]))
        arrays |= networks.captions([caption for _, (_, caption) in group])
        for row, (sample, _) in enumerate(group):
            yield ArraySample(sample.key, {name: values[row] for name, values in arrays.items()}, sample.timestep)


def _sizes(synthetic: Mapping[str, Any] | None) -> EncodingSizes:
    """Return the sizes of the arrays: those of the benchmark, or those in the description of synthetic data."""
    names = EncodingSizes.__dataclass_fields__
    given = {name: value for name, value in (synthetic or {}).items() if name in names}
    try:
        sizes: EncodingSizes = build(EncodingSizes, given, "sizes")
    except ConfigError as error:
        raise DataError(f"the file {MARKER} of the raw data: {error}") from error
    return sizes


def _indexed(path: Path, data_dir: Path, split: str, number: int, sizes: EncodingSizes) -> dict[str, Any]:
    """Check a file of encodings and store its part of the index; return the record of :func:`index_shard`."""
    part = data_dir / RECORDS / f"{split}-{number:05d}.npy"
    return index_shard(path, part, SHARDS, sizes.shapes, BINS if split == "eval" else None)


def _finish(job: Preparation, records: dict[str, dict[str, Any]], sizes: EncodingSizes, real: str) -> Manifest:
    """Write the index of each split, and the manifest."""
    root, samples = job.data_dir, {}
    for split, folder in SPLITS.items():
        parts = [root / RECORDS / f"{task}.npy" for task in records if task.startswith(f"{split}-")]
        index = write_index(root / folder, parts)
        samples[split] = len(index)
        if not samples[split]:
            raise DataError(f"the raw data have no samples of the split {folder}; fetch them again")
        if split == "eval":
            require_timesteps(index[:, -1], BINS, root / folder)
    files = {record["name"]: FileEntry(record["bytes"], record["sha256"]) for record in records.values()}
    made = [*EMPTY.values(), *(f"{folder}/{INDEX}" for folder in SPLITS.values())]
    files |= manifest.describe_files(root, made, job.published.with_md5)
    return job.finish(files, counts_of(samples["train"], samples["eval"], sizes), real)


COMMANDS = DataCommands(
    "flux1",
    raw="published encodings, or pictures and captions",
    prepared="prepared encodings",
    real="CC12M and COCO 2014, encoded",
    generate=generate,
    prepare=prepare,
    verify=manifest.verification(FORMAT, PREPARE_COMMAND),
    published=PUBLISHED,
)
"""The data commands of FLUX.1."""
