"""Download, prepare, verify and generate R-GAT's data: IGBH as features, graph and seeds in one random order.

:mod:`benchmarks.rgat.prepared` lists the files; :mod:`benchmarks.rgat.preparation` has the stages.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import psutil
import torch

from benchmarks.rgat import raw
from benchmarks.rgat.preparation import PreparationStages
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
from benchmarks.rgat.synthetic import generate
from common.data import preparation
from common.data.commands import DataCommands
from common.data.manifest import Manifest
from common.data.options import Option
from common.data.preparation import preparing
from common.data.published import Published
from common.data.stages import memory_of_start
from common.mlperf.fixed import benchmark_settings

INTERMEDIATE = "intermediate"
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


def prepare(
    raw_dir: Path,
    data_dir: Path,
    workers: int = 1,
    size: Annotated[str | None, Option("size of IGBH (default: by the number of papers)", choices=raw.NODES)] = None,
    memory_gb: Annotated[
        float,
        Option(
            "memory for sorting, in all processes; permutations take 2 GB more, labels and seeds 3 GB more", least=1e-9
        ),
    ] = min(32, max(1, psutil.virtual_memory().total // 2_000_000_000)),
) -> Manifest:
    """Write the prepared data set. Do nothing if it is complete, and resume an interrupted preparation.

    Args:
        raw_dir: IGBH or synthetic data, as :mod:`benchmarks.rgat.raw` describes.
        memory_gb: a resumed preparation keeps the memory per process with which it began; use fewer workers to take
            less memory. Permutations take 4 bytes per node, labels and seeds 20 bytes per labelled node.

    Raises:
        ConfigError: an option is wrong.
        DataError: the raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` holds data
            from another source or with other settings, or another process is preparing them.
    """
    memory = round(memory_gb * 1e9)
    source = raw.open_raw(raw_dir, size)
    settings = {**dataclasses.asdict(source.settings), "features": FEATURES}
    wanted = {"fingerprint": source.fingerprint(), "settings": json.dumps(settings, sort_keys=True)}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.synthetic) as job:
        if job.found is not None:
            return job.found
        work_dir = job.begin(INTERMEDIATE)
        workers = min(workers, 1 + _bytes(source) // BYTES_PER_WORKER)
        memory = memory_of_start(work_dir / "memory", memory // workers)
        stages = PreparationStages(source, data_dir, work_dir, workers, memory)
        preparation.require_space(data_dir, stages.space() - _occupied(data_dir))
        files, edges, seeds = stages.run()
        counts = {
            **{f"{split}_samples": count for split, count in seeds.items()},
            "labelled": source.labelled,
            "classes": source.settings.classes,
            **{nodes_count(name): count for name, count in source.nodes.items()},
            **{edges_count(name): count for name, count in edges.items()},
        }
        origin = {
            "feature_scale": str(SCALE),
            "permutation_seed": str(PERMUTATION_SEED),
            "split_seed": str(SPLIT_SEED),
            "seeds": seeds_mark(data_dir),
            "torch": torch.__version__,
        }
        return job.finish(files, counts, source.name, origin)


def _bytes(source: RawGraph) -> int:
    arrays = (*source.features.values(), *source.edges.values())
    return sum(array.path.stat().st_size for array in arrays)


def _occupied(folder: Path) -> int:
    """Return the bytes on disk of a folder's files; holes in sparse files do not count."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


COMMANDS = DataCommands(
    "rgat",
    raw="IGBH's features, labels and edges",
    prepared="prepared features, graph and seeds",
    real=f"IGBH-{raw.FULL}",
    generate=generate,
    prepare=prepare,
    verify=verify,
    published=PUBLISHED,
)
