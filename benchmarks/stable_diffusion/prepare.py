"""Download, prepare, verify and generate the data of Stable Diffusion: tars of moments and encoded captions.

The input format is :mod:`benchmarks.stable_diffusion.raw`, the output format
:mod:`benchmarks.stable_diffusion.prepared`. The frozen networks go to a separate folder, because they may be read
before ``run_start``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from benchmarks.stable_diffusion import formats, raw
from benchmarks.stable_diffusion.prepared import (
    FORMAT,
    KIND,
    PREPARE_COMMAND,
    PROMPTS,
    STATISTICS,
    TRAIN,
    counts_of,
    index_name,
    read_prompts,
    read_reference,
    write_index,
)
from benchmarks.stable_diffusion.raw import FORMS, RawLaion
from benchmarks.stable_diffusion.synthetic import generate
from benchmarks.stable_diffusion.tar_maker import ConversionSettings, forget_networks, make_tar
from common.data import manifest
from common.data.commands import AssetsDir, DataCommands
from common.data.gpu_processes import NetworkProcesses
from common.data.manifest import FileEntry, Manifest
from common.data.options import Option
from common.data.preparation import assets_of, link_or_copy, preparing
from common.data.published import Published, published_files
from common.data.sources import read_sources
from common.data.stages import Stages
from common.errors import ConfigError, DataError
from common.formats.raw_files import listed

RECORDS = "records"
STAGE = "tars"
RAW_TARS = "raw_tars"
"""Key in the manifest's ``source`` of a digest of the raw tars' sizes."""
MEMBERS = {"encoded": formats.ENCODED, "moments": formats.MOMENTS, "nvidia": formats.NVIDIA_ENCODED}
"""Suffixes of the prepared members, by their names on the command line."""
PUBLISHED = Published(
    {"train_samples": 6_513_144, "eval_samples": 30_000, "tars": raw.BENCHMARK_TARS},
    {
        f"{raw.VALIDATION}/{name}": file
        for name, file in published_files(read_sources("stable_diffusion")["validation"].files).items()
    },
)
"""Expected counts, and the validation files, which are the same in every form of the data."""


def prepare(
    raw_dir: Path,
    data_dir: Path,
    source: Annotated[str | None, Option("which raw tars to read, if there are several kinds", choices=FORMS)] = None,
    members: Annotated[str, Option("what the prepared tars contain", choices=MEMBERS)] = "encoded",
    assets_dir: AssetsDir = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], Option("device for the frozen networks")] = "auto",
    workers: int = 1,
) -> Manifest:
    """Write the prepared data set, and place the frozen networks; do nothing if both exist.

    After an interruption, it continues with the tars that are not complete.

    Args:
        raw_dir: folder in the layout of :mod:`benchmarks.stable_diffusion.raw`.
        data_dir: receives tars, captions, statistics and manifest. Files that are not converted become hard links, if
            they are on the same disk.
        members: ``encoded``: moments and encoded captions in bf16; ``moments``: fp32, and captions as text;
            ``nvidia``: the raw tars of NVIDIA's form, unchanged.
        assets_dir: receives the frozen networks.
        device: ``cpu``, ``cuda`` for one process per GPU, or ``auto`` for the GPUs if there are any.
        workers: on the CPU, number of processes; on GPUs, total number of threads that read and decode.

    Raises:
        ConfigError: an option is unknown or impossible.
        DataError: the raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` or
            ``assets_dir`` come from another source or other settings; or another process is preparing them.
        CheckpointError: the checkpoint of the frozen networks is missing or damaged, or has other contents.
    """
    raw_data = raw.open_raw(raw_dir, source)
    if members == "nvidia" and raw_data.form != raw.ENCODED:
        raise ConfigError(f"--members=nvidia: only copied from raw tars of this form; {raw_dir} has {raw_data.form}")
    processes = NetworkProcesses.chosen(device, len(raw_data.tars), workers)
    assets = assets_dir or assets_of(data_dir)
    plan = _plan(raw_data, MEMBERS[members], assets, processes)
    wanted = {"fingerprint": raw_data.fingerprint(), "settings": _settings(plan)}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, raw_data.synthetic) as job:
        _place_assets(raw_data, assets)
        if job.found is not None:
            _require_same_tars(raw_data, job.found, data_dir)
            return job.found
        job.begin(RECORDS)
        for path, name in zip(raw_data.validation, (PROMPTS, STATISTICS), strict=True):
            link_or_copy(path, data_dir / name, "delete it and prepare again")
        eval_samples = len(read_prompts(data_dir))
        read_reference(data_dir)
        _require_assets(plan)
        with processes.stages(data_dir / RECORDS, forget_networks) as stages:
            records = _make_tars(raw_data, data_dir, plan, stages)
        files = {name: FileEntry(record["bytes"], record["sha256"]) for name, record in records.items()}
        others = [*map(index_name, records), PROMPTS, STATISTICS]
        return job.finish(
            files | manifest.describe_files(data_dir, others, job.published.with_md5),
            counts_of({name: record["samples"] for name, record in records.items()}, eval_samples),
            f"LAION-400M filtered, {raw_data.form}; COCO 2014",
            {RAW_TARS: raw.tar_sizes(raw_data.tars), KIND: plan.member},
        )


def verify(data_dir: Path, workers: int = 1) -> Manifest:
    """Compare all files of ``data_dir`` with their checksums, ``workers`` files at a time; this reads all data.

    Raises:
        DataError: a file is missing, unexpected or changed; the message names the first.
    """
    found = manifest.read(data_dir, FORMAT, PREPARE_COMMAND)
    for folder in sorted({name.partition("/")[0] for name in found.files}):
        strangers = {f"{folder}/{path.name}" for path in listed(data_dir / folder)} - found.files.keys()
        if strangers:
            raise DataError(f"{data_dir / min(strangers)} was not prepared; delete it")
    return manifest.verify(data_dir, FORMAT, PREPARE_COMMAND, workers)


def _plan(source: RawLaion, member: str, assets_dir: Path, processes: NetworkProcesses) -> ConversionSettings:
    return ConversionSettings(
        source.form,
        member,
        source.image_size,
        source.vae,
        source.text,
        assets_dir / raw.CHECKPOINT,
        source.checkpoint_digest,
        assets_dir / raw.VOCABULARY,
        processes.device,
        processes.threads,
    )


def _settings(plan: ConversionSettings) -> str:
    """Return the settings that determine the prepared bytes, besides the raw data."""
    chosen = {"source": plan.form, "member": plan.member, "image_size": plan.image_size}
    sizes = {"vae": dataclasses.asdict(plan.vae), "text": dataclasses.asdict(plan.text)}
    return json.dumps(chosen | sizes, sort_keys=True)


def _require_same_tars(source: RawLaion, found: Manifest, data_dir: Path) -> None:
    if found.source.get(RAW_TARS) != raw.tar_sizes(source.tars):
        raise DataError(f"{data_dir} was prepared from tars of other sizes; delete it or name another --data-dir")


def _place_assets(source: RawLaion, assets_dir: Path) -> None:
    for path in source.assets:
        link_or_copy(path, assets_dir / path.name, f"delete {assets_dir} or name another --assets-dir")


def _require_assets(plan: ConversionSettings) -> None:
    """Raise DataError if a file is missing that the networks need."""
    needed = [plan.checkpoint] if plan.encodes_pictures or plan.encodes_captions else []
    needed += [plan.vocabulary] if plan.encodes_captions else []
    for path in needed:
        if not path.is_file():
            raise DataError(
                f"{path} is missing, and is needed to encode {plan.form}; put it there or into {raw.ASSETS} of the raw "
                "folder. 'mlperf-suite download benchmark=stable_diffusion' prints its address"
            )


def _make_tars(source: RawLaion, data_dir: Path, plan: ConversionSettings, stages: Stages) -> dict[str, dict[str, Any]]:
    """Make the missing tars and their indexes; return the records of all tars by tar name."""
    names = {path.stem: f"{TRAIN}/{path.name}" for path in source.tars}
    for path in source.tars:
        _forget_lost(stages, path.stem, path, data_dir, names[path.stem])
    tasks = {path.stem: (path, data_dir, names[path.stem], plan) for path in source.tars}
    return {names[task]: record for task, record in stages.run(STAGE, tasks, make_indexed).items()}


def make_indexed(source: Path, data_dir: Path, name: str, plan: ConversionSettings) -> dict[str, Any]:
    """Make tar ``name`` and its index below ``data_dir``; return the result of ``make_tar`` and ``source_bytes``."""
    source_bytes = source.stat().st_size
    record = make_tar(source, data_dir / name, plan)
    write_index(data_dir, name, plan.member)
    return {**record, "source_bytes": source_bytes}


def _forget_lost(stages: Stages, task: str, source: Path, data_dir: Path, name: str) -> None:
    """Delete the record of a tar that is missing, or whose size or raw tar has changed; the tar is then made again."""
    record = stages.record(STAGE, task)
    if record is None:
        return
    target, index = data_dir / name, data_dir / index_name(name)
    there = target.stat().st_size if target.is_file() and index.is_file() else -1
    noted = (record.get("bytes"), record.get("source_bytes"))
    if noted != (there, source.stat().st_size) or not record.keys() >= {"samples", "sha256"}:
        stages.path(STAGE, task).unlink()


COMMANDS = DataCommands(
    "stable_diffusion",
    raw="tars of pictures, moments or encoded samples, captions, and frozen networks",
    prepared="prepared tars",
    real="LAION-400M filtered",
    generate=generate,
    prepare=prepare,
    verify=verify,
    assets=((raw.CHECKPOINT,), (raw.CLIP,), (raw.INCEPTION,), (raw.VOCABULARY,)),
    published=PUBLISHED,
)
