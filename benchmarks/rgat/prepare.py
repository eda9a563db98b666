"""Download, prepare, verify and generate R-GAT's data: IGBH as features, graph and seeds in one random order.

:mod:`benchmarks.rgat.prepared` lists the files; :mod:`benchmarks.rgat.preparation` has the stages.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.rgat import raw
from benchmarks.rgat.preparation import PreparationStages, PreparedFiles
from benchmarks.rgat.prepared import (
    FEATURES,
    FORMAT,
    PERMUTATION_SEED,
    PREPARE_COMMAND,
    SCALE,
    SPLIT_SEED,
    edges_count,
    nodes_count,
    seeds_mark,
    verify,
)
from benchmarks.rgat.raw import RawGraph
from benchmarks.rgat.stand_in import Generated, Request, generate
from common.data import atomic, manifest, preparation
from common.data.commands import DataCommands, cores, option
from common.data.manifest import Manifest
from common.data.published import SYNTHETIC, Published
from common.errors import ConfigError
from common.mlperf.fixed import benchmark_settings

STATE, INTERMEDIATE = "source.json", "intermediate"
BYTES_PER_WORKER = 1 << 28
"""Raw bytes per additional process."""
_RULES = benchmark_settings("rgat")
PUBLISHED = Published(
    {
        **{name: _RULES[name] for name in ("train_samples", "eval_samples")},
        **{name: _RULES["facts"][name] for name in ("labelled", "classes")},
        **{nodes_count(name): count for name, count in raw.NODES[raw.FULL].items()},
    }
)
"""Counts of IGBH-Full as prepared."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line.

    Attributes:
        workers: number of processes.
        memory: bytes of all processes together for sorting. Permutations (4 bytes per node) and labels and seeds (20
            bytes per labelled node) need additional memory.
        size: size of IGBH, a name in ``raw.NODES``; None: determined from the number of papers.
    """

    workers: int = 1
    memory: int = 32 << 30
    size: str | None = None

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ConfigError(f"--memory-gb={self.memory / 1e9:g}: more than nothing")


def prepare(raw_dir: Path, data_dir: Path, options: Options = Options()) -> Manifest:
    """Write the prepared data set. Do nothing if it is complete, and resume an interrupted preparation.

    Args:
        raw_dir: see :mod:`benchmarks.rgat.raw`.
        data_dir: receives the files and the manifest.
        options: further options. A resumed preparation keeps the memory per process with which it began; use fewer
            workers to take less memory.

    Raises:
        ConfigError: an option is wrong.
        DataError: the raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` holds data
            from another source or with other settings, or another process is preparing them.
    """
    source = raw.open_raw(raw_dir, options.size)
    settings = {**dataclasses.asdict(source.settings), "features": FEATURES}
    wanted = {"fingerprint": source.fingerprint(), "settings": json.dumps(settings, sort_keys=True)}
    published = PUBLISHED if source.stand_in is None else SYNTHETIC
    with preparation.locked(data_dir):
        if found := preparation.already_prepared(data_dir, FORMAT, PREPARE_COMMAND, wanted, published):
            return found
        work_dir = data_dir / INTERMEDIATE
        preparation.begin_or_continue(data_dir, work_dir / STATE, wanted)
        workers = min(options.workers, 1 + _bytes(source) // BYTES_PER_WORKER)
        memory = _memory_per_worker(work_dir / "memory", options.memory // workers)
        pipeline = PreparationStages(source, data_dir, work_dir, workers, memory)
        preparation.require_space(data_dir, pipeline.space() - _occupied(data_dir))
        made = pipeline.run()
        written = _manifest(source, made, data_dir, wanted, published)
        manifest.write(data_dir, written)
        shutil.rmtree(work_dir)
        return written


def _manifest(
    source: RawGraph, made: PreparedFiles, data_dir: Path, wanted: dict[str, str], published: Published
) -> Manifest:
    description = source.name if source.stand_in is None else json.dumps(source.stand_in, sort_keys=True)
    counts = {
        **{f"{split}_samples": count for split, count in made.seeds.items()},
        "labelled": source.labelled,
        "classes": source.settings.classes,
        **{nodes_count(name): count for name, count in source.nodes.items()},
        **{edges_count(name): count for name, count in made.edges.items()},
    }
    origin = {
        **wanted,
        "description": description,
        "feature_scale": str(SCALE),
        "permutation_seed": str(PERMUTATION_SEED),
        "split_seed": str(SPLIT_SEED),
        "seeds": seeds_mark(data_dir),
        "torch": torch.__version__,
        "prepared": preparation.now(),
    }
    return published.manifest(FORMAT, made.files, counts, origin)


def _memory_per_worker(path: Path, memory: int) -> int:
    """Return the memory with which the preparation began, because pieces on disk depend on it."""
    if not path.exists():
        atomic.write_text(path, f"{max(1, memory)}\n")
    return int(path.read_text(encoding="utf-8"))


def _bytes(source: RawGraph) -> int:
    arrays = (*source.features.values(), *source.edges.values())
    return sum(array.path.stat().st_size for array in arrays)


def _occupied(folder: Path) -> int:
    """Return the bytes on disk of a folder's files; holes in sparse files do not count."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _generate(raw_dir: Path, workers: int, **sizes: Any) -> Generated:
    return generate(raw_dir, Request(**sizes), workers)


def _prepare(raw_dir: Path, data_dir: Path, workers: int, memory_gb: float, **chosen: Any) -> Manifest:
    return prepare(raw_dir, data_dir, Options(workers, int(memory_gb * 1e9), **chosen))


def _usual_memory_gb() -> int:
    return int(min(32, max(1, psutil.virtual_memory().total / 2e9)))


_DEFAULTS = Request()

COMMANDS = DataCommands(
    "rgat",
    raw="IGBH's features, labels and edges",
    prepared="prepared features, graph and seeds",
    real=f"IGBH-{raw.FULL}",
    generate=_generate,
    prepare=_prepare,
    verify=verify,
    published=PUBLISHED,
    workers={"prepare": cores, "verify": cores, "generate": cores},
    options={
        "prepare": (
            option("--size", choices=list(raw.NODES), help="of IGBH (default: by the number of papers)"),
            option(
                "--memory-gb",
                type=float,
                default=_usual_memory_gb(),
                help="for sorting, of all processes; permutations take 2 GB, labels and seeds 3 GB beside it",
            ),
        ),
        "generate": (
            option("--papers", type=int, default=_DEFAULTS.papers),
            option("--classes", type=int, default=_DEFAULTS.classes),
            option("--size", dest="feature_size", type=int, default=_DEFAULTS.feature_size, help="of features"),
            option("--alone", type=float, default=_DEFAULTS.alone, help="accuracy that features alone allow"),
            option("--homophily", type=float, default=_DEFAULTS.homophily, help="of citations within a class"),
            option("--labelled", type=int, help="papers with a label (default: 0.8 of them)"),
            option("--train-share", type=float, default=_DEFAULTS.train_share, help="of these papers"),
            option("--eval-share", type=float, default=_DEFAULTS.eval_share, help="likewise"),
            option("--seed", type=int, default=_DEFAULTS.seed),
        ),
    },
)
