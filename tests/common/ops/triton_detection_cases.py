"""Triton's matches and suppression against the references, which have to be met bit by bit; run by
tests/test_interpreted_kernels.py. Fresh memory holds the largest integers here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops import anchor_matching, suppression
from common.ops.anchor_matching import triton as matching_triton
from common.ops.anchor_matching.reference import BELOW, MatchingRule, match_reference
from common.ops.operation import AUTO, OperationRequest
from common.ops.suppression import triton as suppression_triton
from common.ops.suppression.reference import suppress_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

RULES = [
    MatchingRule(0.4, 0.5, rescue="every_best"),
    MatchingRule(0.5, 0.5),
    MatchingRule(0.5, 0.5, exclusive=True, rescue="own_best"),
    MatchingRule(0.0, 0.0),
    MatchingRule(0.3, 0.7, rescue="every_best", pixel=1.0),
]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that programs meet in atomics and blocks see those before them."""
    for key, tile in matching_triton.TILES.items():
        monkeypatch.setitem(matching_triton.TILES, key, tile._replace(anchors=64 if key == "best" else 128))
    tile = suppression_triton.TILES["suppress"]
    monkeypatch.setitem(suppression_triton.TILES, "suppress", tile._replace(candidates=16))


def boxes(random: torch.Generator, *shape: int, fractions: bool = False) -> Tensor:
    """Corners on a coarse grid, so that overlaps are often equal, or anywhere."""
    corner = torch.randint(12, (*shape, 2), generator=random)
    found = torch.cat([corner, corner + torch.randint(1, 6, (*shape, 2), generator=random)], -1).float()
    return found + torch.rand(found.shape, generator=random) / 2 if fractions else found


# Matching


@pytest.mark.parametrize("fractions", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_matches_are_the_references(rule: MatchingRule, fractions: bool) -> None:
    random = torch.Generator().manual_seed(1)
    anchors, real = boxes(random, 200, fractions=fractions), boxes(random, 4, 9, fractions=fractions)
    anchors = torch.cat([anchors, anchors.flip(0)])  # the first of two, in different programs, is a box's own best
    count = torch.tensor([9, 0, 1, 6])
    real[1:] = torch.where((torch.arange(9) >= count[1:, None]).unsqueeze(2), torch.nan, real[1:])
    found = matching_triton.match(anchors, real, count, rule)
    assert found.dtype == torch.int64
    assert torch.equal(found, match_reference(anchors, real, count, rule))
    assert found[0].max() > 0
    own = torch.stack([anchors.roll(shift, 0) for shift in range(4)])
    assert torch.equal(matching_triton.match(own, real, count, rule), match_reference(own, real, count, rule))


def test_only_anchors_that_no_other_overlaps_more_are_rescued() -> None:
    """The overlaps are 0.3, one that is smaller by the last bits, and 0.3 again."""
    right = torch.tensor(30.0)
    anchors = torch.zeros(3, 4)
    anchors[:, 3] = 100
    anchors[:, 2] = torch.stack([right, right.nextafter(torch.tensor(0.0)), right])
    real = torch.tensor([[[0.0, 0.0, 100.0, 100.0]]])
    matched = matching_triton.match(anchors, real, torch.tensor([1]), RULES[0])
    assert matched.tolist() == [[0, BELOW, 0]]


@pytest.mark.parametrize("rule", RULES[:3], ids=str)
def test_boxes_that_overlap_no_anchor_and_one_without_area(rule: MatchingRule) -> None:
    random = torch.Generator().manual_seed(2)
    anchors, real = boxes(random, 70), boxes(random, 2, 1)
    real[0] = torch.tensor([500.0, 500.0, 600.0, 600.0])
    real[1] = torch.tensor([3.0, 3.0, 3.0, 8.0])
    assert (matching_triton.match(anchors, real, torch.tensor([1, 1]), rule) == BELOW).all()


@pytest.mark.parametrize("rule", RULES[:3], ids=str)
def test_nothing_to_match(rule: MatchingRule) -> None:
    anchors, real = torch.rand(70, 4), torch.rand(2, 3, 4)
    assert (matching_triton.match(anchors, real[:, :0], torch.tensor([0, 0]), rule) == BELOW).all()
    assert (matching_triton.match(anchors, real, torch.tensor([0, 0]), rule) == BELOW).all()
    assert matching_triton.match(anchors[:0], real, torch.tensor([3, 3]), rule).shape == (2, 0)
    assert matching_triton.match(anchors, real[:0], torch.tensor([], dtype=torch.int64), rule).shape == (0, 70)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_matched_in_fp32(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    anchors, real = boxes(random, 100).to(dtype), boxes(random, 2, 5).to(dtype)
    count = torch.tensor([5, 2], dtype=torch.int32)
    assert torch.equal(
        matching_triton.match(anchors, real, count, RULES[0]), match_reference(anchors, real, count, RULES[0])
    )


# Suppression


def candidates(seed: int, pictures: int, count: int, classes: int, decimals: int) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes that overlap a lot, and scores of which some are equal."""
    random = torch.Generator().manual_seed(seed)
    corner = torch.randint(60, (pictures, count, 2), generator=random)
    found = torch.cat([corner, corner + torch.randint(1, 40, (pictures, count, 2), generator=random)], 2).float()
    score = torch.rand((pictures, count), generator=random).mul(10**decimals).round() / 10**decimals
    return found, score, torch.randint(classes, (pictures, count), generator=random)


@pytest.fixture(params=[0.0, 2.0], ids=["masks", "walking"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many may be kept."""
    monkeypatch.setattr(suppression_triton, "MASK_SHARE", request.param)


def assert_as_plain(
    found: Tensor,
    score: Tensor,
    classes: Tensor | None,
    threshold: float,
    keep: int,
    pixel: float = 0.0,
    presorted: bool = False,
) -> Tensor:
    arguments = found, score, classes, threshold, keep, pixel, presorted
    kept, there = suppression_triton.suppress(*arguments)
    expected_kept, expected_there = suppress_reference(*arguments)
    assert kept.dtype == torch.int64
    assert there.dtype == torch.bool
    assert torch.equal(there, expected_there)
    assert torch.equal(kept, expected_kept)
    return there


@pytest.mark.parametrize(("count", "classes", "decimals"), [(120, 1, 4), (90, 5, 1), (16, 2, 4), (1, 1, 4)])
@pytest.mark.parametrize("threshold", [0.5, 0.45])
@pytest.mark.usefixtures("both_ways")
def test_what_is_kept_is_the_references(count: int, classes: int, decimals: int, threshold: float) -> None:
    assert_as_plain(*candidates(count, 2, count, classes, decimals), threshold, keep=count)


@pytest.mark.parametrize("keep", [1, 10, 37])
@pytest.mark.usefixtures("both_ways")
def test_only_the_best_are_kept(keep: int) -> None:
    assert assert_as_plain(*candidates(1, 2, 150, 4, 4), 0.5, keep).all()


@pytest.mark.usefixtures("both_ways")
def test_absent_candidates() -> None:
    found, score, classes = candidates(2, 4, 60, 2, 4)
    score[0] = -torch.inf
    score[1, 30:] = -torch.inf
    score[2, ::2] = -torch.inf
    found[1, 30:] = torch.nan
    there = assert_as_plain(found, score, classes, 0.5, keep=60)
    assert not there[0].any()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("pixel", [0.0, 1.0])
def test_sorted_candidates_of_one_class(pixel: float) -> None:
    found, score, _ = candidates(5, 3, 100, 1, 2)
    score = score.sort(descending=True).values
    score[1, 45:] = -torch.inf
    score[2] = -torch.inf
    there = assert_as_plain(found + 0.3, score, None, 0.45, 100, pixel, presorted=True)
    assert there.any(1).tolist() == [True, True, False]


@pytest.mark.usefixtures("both_ways")
def test_a_chain_longer_than_a_block_alternates() -> None:
    length = 39
    left = torch.arange(length, dtype=torch.float32)
    chain = torch.stack([left, torch.zeros(length), left + 2, torch.ones(length)], 1)
    kept, there = suppression_triton.suppress(chain[None], -left[None], torch.zeros(1, length), 0.25, length)
    assert kept[there].tolist() == list(range(0, length, 2))


def test_no_candidates() -> None:
    kept, there = suppression_triton.suppress(torch.zeros(2, 0, 4), torch.zeros(2, 0), torch.zeros(2, 0), 0.5, 10)
    assert kept.shape == there.shape == (2, 0)


def test_half_boxes_are_compared_in_fp32() -> None:
    found, score, classes = candidates(4, 1, 40, 1, 4)
    assert_as_plain(found.half(), score.half(), classes.int(), 0.5, keep=40)


def test_kernels_are_chosen_where_triton_runs() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float32)
    for operation in (anchor_matching.ANCHOR_MATCHING, suppression.SUPPRESSION):
        assert operation.select(AUTO, request).name == "triton"
