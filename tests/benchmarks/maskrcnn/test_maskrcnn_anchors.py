"""Mask R-CNN's anchors against the table of the reference's."""

from __future__ import annotations

import pytest
import torch

from benchmarks.maskrcnn.anchors import STRIDES, anchors, level_sizes
from benchmarks.maskrcnn.config import Facts
from common.mlperf.fixed import fixed_facts

FACTS = fixed_facts(Facts, "maskrcnn")

FIRST = {
    4: [[-22, -10, 25, 13], [-14, -14, 17, 17], [-10, -22, 13, 25]],
    8: [[-40, -20, 47, 27], [-28, -28, 35, 35], [-20, -44, 27, 51]],
    16: [[-84, -40, 99, 55], [-56, -56, 71, 71], [-36, -80, 51, 95]],
    32: [[-164, -72, 195, 103], [-112, -112, 143, 143], [-76, -168, 107, 199]],
    64: [[-332, -152, 395, 215], [-224, -224, 287, 287], [-148, -328, 211, 391]],
}


def test_counts_at_the_size_of_the_benchmark() -> None:
    found = anchors(FACTS, (800, 1344))
    assert [len(level) for level in found] == [201_600, 50_400, 12_600, 3_150, 819]
    assert level_sizes((800, 1344)) == [(200, 336), (100, 168), (50, 84), (25, 42), (13, 21)]
    assert level_sizes((1344, 800)) == [(336, 200), (168, 100), (84, 50), (42, 25), (21, 13)]


@pytest.mark.parametrize("size", [(96, 160), (160, 96)])
def test_each_is_the_tables_moved_by_whole_strides_in_the_order_row_column_ratio(size: tuple[int, int]) -> None:
    for level, stride, (rows, columns) in zip(anchors(FACTS, size), STRIDES, level_sizes(size), strict=True):
        expected = [
            [x1 + stride * column, y1 + stride * row, x2 + stride * column, y2 + stride * row]
            for row in range(rows)
            for column in range(columns)
            for x1, y1, x2, y2 in FIRST[stride]
        ]
        assert level.dtype == torch.float32
        assert level.tolist() == expected
