"""Numbering of categories in order of first appearance over all days; memory grows with different categories only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.data.atomic import written
from common.data.stages import Record
from common.recommendation.criteo.preparation.days import Samples

CHUNK = 1 << 24
"""Approximate number of rows that are numbered at a time."""


class Numbering:
    """Numbers of raw categories. Needs 8 bytes for each different category."""

    def __init__(self, first_id: int) -> None:
        self._first_id = first_id
        self._known = np.zeros(0, np.uint32)
        self._numbers = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self._known)

    def number(self, categories: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Return the number of each of ``categories``. New categories get the next numbers in their order."""
        values, firsts, inverse = np.unique(categories, return_index=True, return_inverse=True)
        positions = np.searchsorted(self._known, values)
        new = np.ones(len(values), bool)
        inside = positions < len(self._known)
        new[inside] = self._known[positions[inside]] != values[inside]
        numbers = np.empty(len(values), np.int32)
        numbers[~new] = self._numbers[positions[~new]]
        order = np.argsort(firsts[new])
        added = np.empty(len(order), np.int32)
        added[order] = np.arange(len(order), dtype=np.int32) + (self._first_id + len(self))
        numbers[new] = added
        self._known = np.insert(self._known, positions[new], values[new])
        self._numbers = np.insert(self._numbers, positions[new], added)
        return numbers[inverse]


def number_feature(samples: Samples, feature: int, first_id: int, modulo: int | None, chunk: int = CHUNK) -> Record:
    """Number a categorical feature over all days and write its ids; return its number of ``categories``.

    Args:
        modulo: modulus of the raw numbers; None: no modulus.
        chunk: approximate number of rows at a time; does not change the result.
    """
    numbering = Numbering(first_id)
    with written(samples.ids_file(feature)) as partial, open(partial, "wb") as file:
        for day in samples.days:
            for raw in day.raw(feature, chunk):
                file.write(numbering.number(raw if modulo is None else raw % np.uint32(modulo)).tobytes())
    return {"categories": len(numbering)}
