"""Random order of every type's nodes, so that equal ranges are equal work and no range is a community."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from common.data.atomic import written
from common.data.stages import Record

SEED = 0


def permutations(nodes: Mapping[str, int]) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Yield type and new number of each node, int32 [N]; one generator draws all types in the order of ``nodes``."""
    generator = torch.Generator().manual_seed(SEED)
    for name, count in nodes.items():
        yield name, torch.randperm(count, generator=generator, dtype=torch.int32).numpy()


def drawn(nodes: Mapping[str, int], node_type: str) -> NDArray[np.int32]:
    """Return the permutation of one type."""
    return next(numbers for name, numbers in permutations(nodes) if name == node_type)


def write_permutations(folder: Path, nodes: Mapping[str, int]) -> Record:
    """Write the permutations of all types. Takes 4 bytes of memory per node of a type."""
    for name, numbers in permutations(nodes):
        with written(_path(folder, name)) as partial, open(partial, "wb") as file:
            np.save(file, numbers)
    return {"nodes": sum(nodes.values())}


def load(folder: Path, node_type: str) -> NDArray[np.int32]:
    """Return the new number of each node, memory-mapped."""
    mapped: NDArray[np.int32] = np.load(_path(folder, node_type), mmap_mode="r")
    return mapped


def _path(folder: Path, node_type: str) -> Path:
    return folder / f"{node_type}.npy"
