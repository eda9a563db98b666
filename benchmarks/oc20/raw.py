"""Raw data of OpenCatalyst: the published trajectories, or the LMDB files of the official preprocessing.

Each split has a folder with one of the names in :data:`FOLDERS`, anywhere below the raw folder, with files of
:mod:`common.formats.s2ef`.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.oc20.graph import NEIGHBOURS, SHORTEST, neighbours, ordered
from benchmarks.oc20.samples import Structure
from common.data.raw_layout import RawSplits, find_file, packed_hint
from common.data.synthetic import description_of
from common.errors import DataError
from common.formats import s2ef
from common.formats.raw_files import listed
from common.formats.s2ef import EXTXYZ, LMDB, PACKED

FOLDERS = {"train": ("train", "s2ef_train_2M"), "eval": ("val_id", "s2ef_val_id")}
SUFFIXES = (EXTXYZ + PACKED, EXTXYZ, LMDB)
"""Suffixes of the files."""


def values(path: Path) -> Iterator[tuple[bytes, list[int]]]:
    """Yield each structure of a file, with its edges: the value in an LMDB file, and the counts.

    Raises:
        DataError: the file is truncated or damaged, has other data, asks for other classes than graphs, or a structure
            has no neighbours or does not fit the types. The message has the number of the structure.
    """
    number = 1
    try:
        for fields in s2ef.structures(path):
            structure = _with_edges(fields)
            yield structure.encode(), structure.counts()
            number += 1
    except KeyError as error:
        raise DataError(f"{path}: structure {number} has no {error.args[0]}; fetch the file again") from error
    except (ValueError, OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path}: structure {number}: {error}; fetch the file again") from error


def _with_edges(fields: s2ef.Fields) -> Structure:
    """Return a structure with the edges of its graph, without those of length 0, or else with those we find."""
    pos_N3, cell_33 = fields["pos"], fields["cell"]
    if "edge_index" not in fields:
        return Structure.of(neighbours(pos_N3.astype(np.float64), cell_33.astype(np.float64)), **fields)
    index_2E, offset_E3 = fields.pop("edge_index"), fields.pop("cell_offsets")
    source, target = index_2E
    kept = np.linalg.norm(pos_N3[source] - pos_N3[target] + offset_E3 @ cell_33, axis=1) >= SHORTEST
    if not kept.any():
        raise ValueError("it has no neighbours: no edge is longer than 0")
    if (most := np.bincount(target[kept]).max()) > NEIGHBOURS:
        raise ValueError(f"an atom has {most} neighbours, and at most {NEIGHBOURS} are expected")
    return Structure.of(ordered(index_2E[:, kept], offset_E3[kept]), **fields)


def open_raw(raw_dir: Path) -> RawSplits:
    """Find the files of both splits in ``raw_dir`` or folders below it.

    Raises:
        DataError: the folder or a split is missing, or a split has both trajectories and graphs.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; fetch the trajectories or generate synthetic data")
    splits = {}
    for split, folders in FOLDERS.items():
        first = find_file(raw_dir, *(f"{folder}/*{suffix}" for folder in folders for suffix in SUFFIXES))
        if first is None:
            hint = packed_hint(raw_dir, f"{folders[-1]}.tar")
            raise DataError(f"{raw_dir} has neither {folders[0]} nor {folders[1]} with *.extxyz or *.lmdb{hint}")
        splits[split] = _files(first.parent)
    return RawSplits(splits, description_of(raw_dir, *(files[0] for files in splits.values())))


def _files(folder: Path) -> list[Path]:
    """Return the trajectories or graphs in a folder.

    A trajectory that is there packed and unpacked is read packed, because its unpacking may have been interrupted.
    """
    graphs = listed(folder, f"*{LMDB}")
    trajectories: dict[str, Path] = {}
    for suffix in (EXTXYZ + PACKED, EXTXYZ):
        for path in listed(folder, f"*{suffix}"):
            trajectories.setdefault(path.name.removesuffix(suffix), path)
    if graphs and trajectories:
        raise DataError(f"{folder} has both *.lmdb and *.extxyz, such as {graphs[0].name}; move one of the two away")
    return graphs or sorted(trajectories.values())
