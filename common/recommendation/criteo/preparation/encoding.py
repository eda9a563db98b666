"""What a benchmark makes of raw click logs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.recommendation.criteo.sample_rows import SampleFormat


@dataclass(frozen=True)
class Encoding:
    """How raw values become rows. Ids of a table are numbered through all days, in the order of first appearance.

    Attributes:
        sample_format: of the rows; whether dense features are logarithms or counts follows from it.
        hotness: of each table, ids of a sample; more than one are drawn for each category.
        table_rows: of each table, as the benchmark has it.
        largest: rows of a table of the data at most; numbers are taken modulo of the rows.
        first_id: of the numbering.
        numbered_modulo: what raw categories are taken modulo of before they are numbered; None: they stay as they are.
        rounded: whether numbers of training samples are rounded to float32 on the way, as ids above 2**24 are in the
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
        """Rows of the tables of data with so many different categories of each."""
        return tuple(min(count, self.largest) for count in categories)

    def capped(self, rows: int) -> Encoding:
        """The same with tables of at most so many rows, which is not the benchmark's data where it has larger ones."""
        return replace(self, largest=min(rows, self.largest))

    @property
    def reduced(self) -> bool:
        """Whether tables are smaller than the benchmark's."""
        return self.largest < max(self.table_rows)

    def dense_words(self, counts: NDArray[np.int32]) -> NDArray[np.int32]:
        """Dense features as words of a row: ln(x + 3) as float32 bits, or max(x, 0) where counts are stored."""
        if not self.sample_format.logarithms:
            return np.maximum(counts, 0)
        return np.log(counts + LOGARITHM_OFFSET, dtype=np.float32).view(np.int32)

    def unusable(self, counts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which counts have no logarithm: x + 3, which is an int32 as in the reference, must be positive."""
        if not self.sample_format.logarithms:
            return np.zeros(counts.shape, bool)
        return (counts <= -LOGARITHM_OFFSET) | (counts > np.iinfo(np.int32).max - LOGARITHM_OFFSET)


LOGARITHM_OFFSET = 3
"""Added to counts whose logarithms are stored."""
