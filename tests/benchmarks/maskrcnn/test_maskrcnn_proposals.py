"""Anchors of the reference, and proposals at fixed shapes against lists of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.proposals import STRIDES, Proposals, Proposer, Selection, anchors, level_sizes
from common.mlperf.fixed import fixed_facts
from tests.benchmarks.maskrcnn import plain_detector

FACTS = fixed_facts(Facts, "maskrcnn")
PLACES = (60, 31, 12, 5, 2)
"""Anchors of each level."""
CANDIDATES = 20
SIZES = [(90.0, 120.0), (96.0, 64.0), (50.0, 128.0)]


def head_outputs(seed=0, decimals=1, dtype=torch.float32):
    """Logits and offsets of three pictures, some of the logits equal; anchors across all borders."""
    random = torch.Generator().manual_seed(seed)
    levels, anchors = [], []
    for count in PLACES:
        corner = torch.randint(-20, 110, (count, 2), generator=random)
        anchors.append(torch.cat([corner, corner + torch.randint(8, 60, (count, 2), generator=random)], 1).float())
        logits = torch.randn((len(SIZES), count), generator=random).mul(10**decimals).round() / 10**decimals
        levels.append((logits.to(dtype), (torch.randn((len(SIZES), count, 4), generator=random) / 4).to(dtype)))
    return levels, anchors, torch.tensor(SIZES)


def proposer(over, proposals, candidates=CANDIDATES):
    return Proposer(FACTS, Selection(candidates, proposals, over), {"suppression": "reference"}, torch.device("cpu"))


def by_lists(levels, anchors, candidates=CANDIDATES):
    return [
        plain_detector.propose(
            [(logits[picture].tolist(), offsets[picture].tolist()) for logits, offsets in levels],
            [level.tolist() for level in anchors],
            height,
            width,
            candidates,
            FACTS.rpn_nms_threshold,
        )
        for picture, (height, width) in enumerate(SIZES)
    ]


def assert_are(found: Proposals, pictures):
    """These regions in their slots, and nothing elsewhere."""
    boxes, score = torch.zeros(found.boxes_BS4.shape), torch.full(found.score_BS.shape, -torch.inf)
    for picture, regions in enumerate(pictures):
        for region in regions:
            boxes[picture, region.slot] = torch.tensor(region.box)
            score[picture, region.slot] = torch.tensor(region.logit).sigmoid()
    torch.testing.assert_close(found.boxes_BS4, boxes, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.score_BS, score, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_of_each_picture(dtype):
    levels, anchors, size = head_outputs(dtype=dtype)
    expected = [plain_detector.best_of_picture(regions, 30) for regions in by_lists(levels, anchors)]
    found = proposer("picture", 30)(levels, anchors, size)
    assert found.score_BS.shape == (3, 30)
    assert_are(found, expected)


@pytest.mark.parametrize("proposals", [1, 50, 1000])
def test_the_best_of_the_micro_batch(proposals):
    levels, anchors, size = head_outputs(2)
    levels[0][0][1] += 2  # more of one picture than of the others
    found = proposer("micro_batch", proposals)(levels, anchors, size)
    assert found.score_BS.shape == (3, 20 + 20 + 12 + 5 + 2)
    assert_are(found, plain_detector.best_of_batch(by_lists(levels, anchors), proposals))


def test_of_equal_logits_the_first_anchors_are_candidates():
    levels, anchors, size = head_outputs(5)
    levels = [(torch.zeros_like(logits), offsets) for logits, offsets in levels]
    levels[0][0][:, ::2] *= -1  # zeros of both signs are equal
    assert_are(
        proposer("micro_batch", 35, 7)(levels, anchors, size),
        plain_detector.best_of_batch(by_lists(levels, anchors, 7), 35),
    )


FIRST = {
    4: [[-22, -10, 25, 13], [-14, -14, 17, 17], [-10, -22, 13, 25]],
    8: [[-40, -20, 47, 27], [-28, -28, 35, 35], [-20, -44, 27, 51]],
    16: [[-84, -40, 99, 55], [-56, -56, 71, 71], [-36, -80, 51, 95]],
    32: [[-164, -72, 195, 103], [-112, -112, 143, 143], [-76, -168, 107, 199]],
    64: [[-332, -152, 395, 215], [-224, -224, 287, 287], [-148, -328, 211, 391]],
}


def test_counts_at_the_size_of_the_benchmark():
    found = anchors(FACTS, (800, 1344))
    assert [len(level) for level in found] == [201_600, 50_400, 12_600, 3_150, 819]
    assert level_sizes((800, 1344)) == [(200, 336), (100, 168), (50, 84), (25, 42), (13, 21)]
    assert level_sizes((1344, 800)) == [(336, 200), (168, 100), (84, 50), (42, 25), (21, 13)]


@pytest.mark.parametrize("size", [(96, 160), (160, 96)])
def test_each_is_the_tables_moved_by_whole_strides_in_the_order_row_column_ratio(size):
    for level, stride, (rows, columns) in zip(anchors(FACTS, size), STRIDES, level_sizes(size), strict=True):
        expected = [
            [x1 + stride * column, y1 + stride * row, x2 + stride * column, y2 + stride * row]
            for row in range(rows)
            for column in range(columns)
            for x1, y1, x2, y2 in FIRST[stride]
        ]
        assert level.dtype == torch.float32
        assert level.tolist() == expected
