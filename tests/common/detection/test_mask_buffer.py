"""Masks of detections on their way from fixed shapes to run lengths on the host, on one rank and on two."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.detection.detections import PADDING, DetectionBuffer, Found, FoundMasks
from common.distributed.layout import Layout
from tests.gloo_ranks import on_ranks

KEEP, SIDE = 3, 2
IDS = (139, 285, PADDING, 632, 724, 776)
"""Pictures; of two ranks each has half."""
VALID = ((1, 0, 1), (0, 0, 0), (1, 1, 1), (1, 1, 0), (0, 1, 0), (1, 1, 1))


def identifying_runs(probability_DSS: Tensor, corners_D4: Tensor, size_D2: Tensor, valid_D: Tensor) -> Any:
    """Return for each mask, instead of runs, x1 numbers that depend on its probability and height."""
    count_D = torch.where(valid_D, corners_D4[:, 0].int(), 0)
    value_D = (100 * probability_DSS[:, 0, 1] + size_D2[:, 0]).int()
    return count_D, value_D.repeat_interleave(count_D)


def found_in(rows: slice) -> Found:
    """The detections of pictures; corners, masks and sizes that differ from each other."""
    valid_BK = torch.tensor(VALID[rows], dtype=torch.bool)
    number_BK = torch.arange(len(IDS) * KEEP).view(-1, KEEP)[rows]
    corners_BK4 = (number_BK % 5).unsqueeze(2) + torch.arange(4.0)
    probability_BKSS = number_BK[:, :, None, None] + torch.arange(SIDE * SIDE).view(SIDE, SIDE) / 100
    masks = FoundMasks(corners_BK4, probability_BKSS, torch.tensor([[7.0, 9.0]]).expand(len(valid_BK), 2))
    return Found(corners_BK4, number_BK.float(), number_BK + 1, valid_BK, masks)


def gathered(layout: Layout, first: int, end: int) -> dict[str, Any] | None:
    """Columns of the pictures from ``first`` on, in batches of two."""
    buffer = DetectionBuffer(layout, KEEP, identifying_runs)
    buffer.begin(end - first)
    for start in range(first, end, 2):
        rows = slice(start, min(start + 2, end))
        buffer.add(torch.tensor(IDS[rows]), found_in(rows))
    return buffer.columns()


def expected() -> dict[str, list[int]]:
    """Compute the columns slot by slot."""
    ids, counts, runs = [], [], []
    for index, picture in enumerate(IDS):
        for slot in range(KEEP):
            number = index * KEEP + slot
            if picture != PADDING and VALID[index][slot]:
                ids.append(picture)
                counts.append(number % 5)
                runs += [100 * number + 1 + 7] * (number % 5)
    return {"picture_id": ids, "run_count": counts, "runs": runs}


def test_columns_have_the_runs_of_what_is_there_and_of_no_padding():
    columns = gathered(Layout(), 0, len(IDS))
    assert {name: columns[name].tolist() for name in expected()} == expected()
    assert columns["run_count"].dtype == columns["runs"].dtype == np.int32


def test_a_network_that_finds_fewer_than_are_kept_leaves_no_mask_of_before():
    buffer = DetectionBuffer(Layout(), KEEP, identifying_runs)
    for rows, kept in ((slice(5, 6), KEEP), (slice(5, 6), 2)):
        found = found_in(rows)
        few = FoundMasks(found.masks.corners[:, :kept], found.masks.probability[:, :kept], found.masks.size)
        buffer.begin(1)
        buffer.add(
            torch.tensor([9]),
            Found(found.box[:, :kept], found.score[:, :kept], found.class_id[:, :kept], found.valid[:, :kept], few),
        )
        columns = buffer.columns()
        assert len(columns["run_count"]) == kept
        assert columns["run_count"].sum() == len(columns["runs"])


def run_rank(rank: int, world: int, folder: str) -> dict[str, list[Any]] | None:
    """One of two ranks, which has half of the pictures."""
    half = len(IDS) // 2
    columns = gathered(Layout({"dp": 2}, rank), rank * half, (rank + 1) * half)
    return None if columns is None else {name: value.tolist() for name, value in columns.items()}


def test_two_ranks_gather_what_one_has(tmp_path):
    whole = gathered(Layout(), 0, len(IDS))
    assert on_ranks(run_rank, 2, tmp_path) == [{name: value.tolist() for name, value in whole.items()}, None]
