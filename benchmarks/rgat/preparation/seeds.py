"""Seeds for training and evaluation, with their labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.rgat.preparation import permutation
from benchmarks.rgat.prepared_names import labels_name, seeds_name
from benchmarks.rgat.raw import RawArray, Settings
from common.data.atomic import written
from common.data.stages import Record
from common.errors import DataError

SEED = 42
"""Random seed of the split (mlcommons/training, rgat, split_seeds.py)."""
_BLOCK = 1 << 22  # labels per read


def split_sizes(labelled: int, train_share: float, eval_share: float) -> dict[str, int]:
    """Return the number of seeds of each split, rounded down.

    Args:
        labelled: number of labelled nodes.
        train_share, eval_share: fraction of them in each split.
    """
    return {"train": int(labelled * train_share), "eval": int(labelled * eval_share)}


def drawn(labelled: int, train_share: float, eval_share: float) -> dict[str, NDArray[np.int64]]:
    """Return the seeds of each split by raw number, in order: consecutive parts of one permutation, train first."""
    every = torch.randperm(labelled, generator=torch.Generator().manual_seed(SEED)).numpy()
    sizes = split_sizes(labelled, train_share, eval_share)
    return {"train": every[: sizes["train"]], "eval": every[sizes["train"] : sizes["train"] + sizes["eval"]]}


def read_labels(source: RawArray, labelled: int, classes: int) -> NDArray[np.int16]:
    """Return the first ``labelled`` labels.

    Raises:
        DataError: a label is not one of the classes.
    """
    labels = np.empty(labelled, np.int16)
    for first in range(0, labelled, _BLOCK):
        block = source.read(first, min(first + _BLOCK, labelled))[:, 0]
        known = (block >= 0) & (block < classes) & (np.floor(block) == block)
        if not known.all():
            row = int(np.flatnonzero(~known)[0])
            raise DataError(f"{source.path}: row {first + row:,} has the label {block[row]:g} of {classes:,} classes")
        labels[first : first + len(block)] = block
    return labels


def write_seeds(source: RawArray, settings: Settings, labelled: int, permutations: Path, folder: Path) -> Record:
    """Write the seeds of both splits by new number, and their labels. Takes 20 bytes of memory per labelled node.

    Raises:
        DataError: a label is not one of the classes, or a split is empty.
    """
    labels = read_labels(source, labelled, settings.classes)
    numbers = permutation.load(permutations, settings.seeds)
    sizes = {}
    for split, seeds in drawn(labelled, settings.train_share, settings.eval_share).items():
        if not len(seeds):
            raise DataError(f"{source.path}: {labelled:,} labelled nodes leave none for {split}")
        _save(folder / seeds_name(split), numbers[seeds])
        _save(folder / labels_name(split), labels[seeds])
        sizes[split] = len(seeds)
    return sizes


def _save(path: Path, values: NDArray[np.generic]) -> None:
    with written(path) as partial, open(partial, "wb") as file:
        np.save(file, values)
