"""Conversion of one id per feature to several: the random id tables of DLRM-DCNv2's multi-hot data set.

The first id of a category is the category itself. The others are drawn once per category, uniformly from its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data.atomic import written
from common.data.stages import Record

SEED = 0
"""Seed of NumPy's legacy generator, from which all tables are drawn in order."""
CHUNK = 1 << 22
"""Ids that are drawn at a time."""


def write_id_tables(folder: Path, table_rows: Sequence[int], hotness: Sequence[int], chunk: int = CHUNK) -> Record:
    """Write the ids of all categories, int32 (rows, hotness), for each table with more than one id per sample.

    The draws are those of one ``randint(0, rows, size=(rows, hotness - 1))`` for each table.

    Args:
        table_rows, hotness: rows and ids per sample of each table.
        chunk: approximate number of ids drawn at a time; does not change the result.
    """
    random = np.random.RandomState(SEED)
    for number, (rows, hot) in enumerate(zip(table_rows, hotness, strict=True)):
        if hot == 1:
            continue
        step = max(1, chunk // hot)
        with written(_path(folder, number)) as partial, open(partial, "wb") as file:
            described = {"descr": "<i4", "fortran_order": False, "shape": (rows, hot)}
            np.lib.format.write_array_header_1_0(file, described)
            for first in range(0, rows, step):
                last = min(first + step, rows)
                ids = np.empty((last - first, hot), np.int32)
                ids[:, 0] = np.arange(first, last)
                ids[:, 1:] = random.randint(0, rows, size=(last - first, hot - 1))
                file.write(ids.tobytes())
    return {"tables": len(table_rows)}


class MultiHot:
    """Expands rows with one id per feature to rows with all ids.

    Args:
        folder: output folder of :func:`write_id_tables`.
        table_rows, hotness: rows and ids per sample of each table.
    """

    def __init__(self, folder: Path, table_rows: Sequence[int], hotness: Sequence[int]) -> None:
        self._rows, self._hotness = table_rows, hotness
        self._ids = [
            np.load(_path(folder, number), mmap_mode="r") if hot > 1 else None for number, hot in enumerate(hotness)
        ]

    def __call__(self, ids_NF: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return (N, sum of hotness): each id modulo the rows of its table, and the ids that were drawn for it."""
        ids_NL = np.empty((len(ids_NF), sum(self._hotness)), np.int32)
        column = 0
        for feature, (rows, hot, drawn) in enumerate(zip(self._rows, self._hotness, self._ids, strict=True)):
            own = ids_NF[:, feature] % np.int32(rows)
            ids_NL[:, column : column + hot] = own[:, None] if drawn is None else drawn[own]
            column += hot
        return ids_NL


def _path(folder: Path, number: int) -> Path:
    return folder / f"ids_of_table_{number}.npy"
