"""A benchmark's encoding of raw click logs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.recommendation.criteo.sample_rows import SampleFormat


@dataclass(frozen=True)
class Encoding:
    """Conversion of raw values to rows. Ids of a table are numbered over all days, in order of first appearance.

    Attributes:
        hotness: for each table, ids per sample; all but the first are drawn at random for each category.
        table_rows: rows of each table of the benchmark.
        largest: largest number of rows of a table of the data; ids are taken modulo the rows.
        numbered_modulo: modulus of raw categories before they are numbered; None: no modulus.
        rounded: whether numbers of training samples are rounded to float32 on the way, like ids above 2**24 in the
            published data set of DLRM-DCNv2.
    """

    sample_format: SampleFormat
    hotness: tuple[int, ...]
    table_rows: tuple[int, ...]
    largest: int
    first_id: int
    numbered_modulo: int | None
    rounded: bool

    def rows_for(self, categories: tuple[int, ...]) -> tuple[int, ...]:
        """Return the table rows for data with these numbers of different categories."""
        return tuple(min(count, self.largest) for count in categories)

    def capped(self, rows: int) -> Encoding:
        """Return a copy whose tables have at most ``rows`` rows; larger ids are taken modulo the rows."""
        return replace(self, largest=min(rows, self.largest))

    @property
    def reduced(self) -> bool:
        """Whether tables are smaller than the benchmark's."""
        return self.largest < max(self.table_rows)

    def dense_words(self, counts: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return dense features as words: ln(x + 3) as float32 bits, or max(x, 0) where the format stores counts."""
        if not self.sample_format.logarithms:
            return np.maximum(counts, 0)
        return np.log(counts + LOGARITHM_OFFSET, dtype=np.float32).view(np.int32)

    def unusable(self, counts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return True for each count without a logarithm: x + 3, an int32 as in the reference, must be positive."""
        if not self.sample_format.logarithms:
            return np.zeros(counts.shape, bool)
        return (counts <= -LOGARITHM_OFFSET) | (counts > np.iinfo(np.int32).max - LOGARITHM_OFFSET)


LOGARITHM_OFFSET = 3
"""Added to counts whose logarithms are stored."""
