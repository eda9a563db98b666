"""Verification of prepared data: checksums, and properties that every graph and split must have."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.rgat.preparation import permutation, seeds
from benchmarks.rgat.prepared import PREPARE_COMMAND, Prepared, open_prepared
from benchmarks.rgat.prepared_names import SPLITS, indices_name, indptr_name, labels_name, seeds_name
from common.data import manifest
from common.data.manifest import Manifest
from common.errors import DataError

_BLOCK = 1 << 22  # numbers that are checked at once
_REMEDY = f"delete it and {manifest.NAME}, then run '{PREPARE_COMMAND}'"


def verify(data_dir: Path, workers: int = 1) -> Manifest:
    """Check all checksums of ``data_dir``, the graph and the seeds. Reads all files.

    Args:
        workers: files that are checked at the same time.

    Raises:
        DataError: a file is missing or changed, or its content is impossible.
    """
    prepared = open_prepared(data_dir)
    found = prepared.manifest
    names = sorted(found.files, key=lambda name: found.files[name].bytes, reverse=True)
    checks = [functools.partial(_check_digest, prepared, name) for name in names]
    checks += [functools.partial(check_relation, prepared, number) for number in range(len(prepared.edges))]
    checks.append(functools.partial(check_seeds, prepared))
    with ThreadPoolExecutor(workers) as pool:
        try:
            for _ in pool.map(lambda check: check(), checks):
                pass
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return found


def check_relation(prepared: Prepared, number: int) -> None:
    """Check that ``indptr`` of a relation ascends from 0 to the number of edges, and that all sources exist.

    Raises:
        DataError: the check failed.
    """
    relation = prepared.schema.relations[number]
    sources = prepared.nodes[prepared.schema.sources[number]]
    path = prepared.folder / indptr_name(relation)
    last = 0
    for first, block in _blocks(path):
        if first == 0 and block[0] != 0:
            raise DataError(f"{path} begins with {block[0]} and not with 0; {_REMEDY}")
        falls = np.flatnonzero(np.diff(block, prepend=last) < 0)
        if len(falls):
            raise DataError(f"{path} falls at {first + int(falls[0]):,}; {_REMEDY}")
        last = int(block[-1])
    if last != prepared.edges[number]:
        raise DataError(f"{path} ends at {last:,} and there are {prepared.edges[number]:,} edges; {_REMEDY}")
    _check_range(prepared.folder / indices_name(relation), sources)


def check_seeds(prepared: Prepared) -> None:
    """Check that the seeds are those of the split, in its order, and that their labels are valid classes.

    This also proves that seeds are labelled and distinct. The permutation is drawn again for it.

    Raises:
        DataError: the check failed.
    """
    settings, papers = prepared.settings, prepared.nodes[prepared.schema.seed_type]
    for split in SPLITS:
        _check_range(prepared.folder / seeds_name(split), papers)
        _check_range(prepared.folder / labels_name(split), settings.classes)
    numbers = permutation.drawn(dict(zip(settings.types, prepared.nodes, strict=True)), settings.seeds)
    for split, expected in seeds.drawn(prepared.labelled, settings.train_share, settings.eval_share).items():
        path = prepared.folder / seeds_name(split)
        for first, block in _blocks(path):
            if not np.array_equal(block, numbers[expected[first : first + len(block)]]):
                made, here = prepared.manifest.source.get("torch"), torch.__version__
                version = "" if made == here else f" by PyTorch {here}; they were prepared by {made}"
                raise DataError(
                    f"{path}: from {first:,} on, not the seeds that split and permutation draw{version}; {_REMEDY}"
                )


def _check_digest(prepared: Prepared, name: str) -> None:
    path, expected = prepared.folder / name, prepared.manifest.files[name].sha256
    if (found := manifest.digest(path, "sha256")) != expected:
        raise DataError(
            f"{path}: SHA-256 {found} where {manifest.NAME} says {expected}: it was changed or damaged; {_REMEDY}"
        )


def _check_range(path: Path, count: int) -> None:
    for first, block in _blocks(path):
        if block.min() < 0 or block.max() >= count:
            row = int(np.flatnonzero((block < 0) | (block >= count))[0])
            raise DataError(f"{path} has {block[row]:,} at {first + row:,}, and there are {count:,}; {_REMEDY}")


def _blocks(path: Path) -> Iterator[tuple[int, NDArray[np.integer]]]:
    values = np.load(path, mmap_mode="r")
    for first in range(0, len(values), _BLOCK):
        yield first, np.array(values[first : first + _BLOCK])
