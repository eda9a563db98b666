"""Targets of both heads at fixed shapes against lists, with the same random keys."""

import functools
from dataclasses import replace

import pytest
import torch

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.proposals import Proposals, with_truth
from benchmarks.maskrcnn.targets import RoiTargets, RpnTargets, sample
from common.mlperf.fixed import fixed_facts
from tests.benchmarks.maskrcnn import plain_detector
from tests.capturable import Capturable

SMALL = replace(fixed_facts(Facts, "maskrcnn"), rpn_samples=24, roi_sampled=20)
SEED = -0x123456789ABCDEF
DEVICE = torch.device("cpu")
REFERENCES = {"anchor_matching": "reference"}


def boxes(random, *shape):
    """Corners on a coarse grid, so that overlaps are often equal, some across the border of a picture of 32 x 40."""
    corner = torch.randint(-2, 9, (*shape, 2), generator=random)
    return 4 * torch.cat([corner, corner + torch.randint(1, 5, (*shape, 2), generator=random)], -1).float()


def key_of(stream, candidates, picture):
    return lambda index: plain_detector.key(SEED, stream, picture * candidates + index)


def rpn_by_lists(facts, anchors, truth, size, picture):
    return plain_detector.rpn_target(
        anchors.tolist(),
        truth.tolist(),
        *size,
        facts.rpn_low,
        facts.rpn_high,
        facts.rpn_samples,
        int(facts.rpn_samples * facts.rpn_positive),
        key_of(plain_detector.RPN_STREAM, len(anchors), picture),
    )


@pytest.mark.parametrize(
    ("anchors", "samples", "high"),
    [(150, 24, 0.7), (150, 8, 0.3), (40, 256, 0.7)],
    ids=["as many as wanted", "over the cap", "too few negatives"],
)
def test_anchors_are_those_of_the_lists(anchors, samples, high):
    """Pictures with boxes, without one, and a slot without a picture."""
    facts = replace(SMALL, rpn_samples=samples, rpn_high=high)
    random = torch.Generator().manual_seed(anchors)
    anchors, truth = boxes(random, anchors), boxes(random, 4, 6)
    anchors[10:28] = truth[0].repeat(3, 1)  # equal overlaps with one box
    count, real = torch.tensor([6, 2, 0, 0]), torch.tensor([True, True, True, False])
    truth[1:] = torch.where((torch.arange(6) >= count[1:, None])[..., None], torch.nan, truth[1:])
    sizes = [(32.0, 40.0), (30.0, 26.0), (32.0, 40.0), (32.0, 40.0)]
    targets = RpnTargets(facts, REFERENCES, DEVICE)
    found = targets(anchors, truth, count, torch.tensor(sizes), real, torch.tensor([SEED]))
    for picture in range(3):
        expected = rpn_by_lists(facts, anchors, truth[picture, : count[picture]], sizes[picture], picture)
        taken = expected.positive + expected.negative
        assert found.index_BN[picture].tolist() == taken + [0] * (samples - len(taken))
        assert (found.positives_B[picture], found.total_B[picture]) == (len(expected.positive), len(taken))
        offsets = torch.zeros(samples, 4)
        offsets[: len(expected.positive)] = torch.tensor(expected.offsets).reshape(-1, 4)
        torch.testing.assert_close(found.offsets_BN4[picture], offsets, rtol=1e-5, atol=1e-6)
    assert found.positives_B[0] > 0
    assert found.positives_B[2] == found.positives_B[3] == found.total_B[3] == 0
    if samples == 8:
        assert found.positives_B[0] == 4
    if samples == 256:
        assert found.total_B[0] < 40


def test_an_anchor_across_the_border_is_left_out_yet_is_a_boxs_best():
    anchors = torch.tensor([[-1.0, 0.0, 8.0, 9.0], [0.0, 0.0, 19.0, 9.0], [10.0, 10.0, 19.0, 19.0]])
    truth = torch.tensor([[[0.0, 0.0, 8.0, 9.0]]])  # overlaps: 0.9, 0.45, 0
    found = RpnTargets(SMALL, REFERENCES, DEVICE)(
        anchors, truth, torch.tensor([1]), torch.tensor([[20.0, 20.0]]), torch.tensor([True]), torch.tensor([SEED])
    )
    assert (found.positives_B.item(), found.total_B.item()) == (0, 1)
    assert found.index_BN[0, 0] == 2


@pytest.mark.parametrize(
    ("slots", "sampled"),
    [(90, 20), (90, 8), (12, 512)],
    ids=["as many as wanted", "over the cap", "too few negatives"],
)
def test_proposals_are_those_of_the_lists(slots, sampled):
    """Pictures with boxes, without one, without proposals, and a slot without a picture."""
    facts = replace(SMALL, roi_sampled=sampled)
    random = torch.Generator().manual_seed(slots)
    regions, truth = boxes(random, 4, slots), boxes(random, 4, 5)
    label, count = torch.randint(1, 81, (4, 5), generator=random), torch.tensor([5, 0, 2, 0])
    valid = torch.rand((4, slots), generator=random) < 0.8
    valid[2:] = False
    score = torch.where(valid, 0.5, -torch.inf)
    proposals = Proposals(torch.where(valid[..., None], regions, 0.0), score)
    truth = torch.where((torch.arange(5) >= count[:, None])[..., None], torch.nan, truth)
    found = RoiTargets(facts, REFERENCES, DEVICE)(
        with_truth(proposals, truth, count), truth, label, count, torch.tensor([SEED])
    )
    for picture in range(4):
        expected = plain_detector.roi_targets(
            [
                plain_detector.Region(regions[picture, slot].tolist(), 0.0, slot)
                for slot in valid[picture].nonzero().flatten().tolist()
            ],
            truth[picture, : count[picture]].tolist(),
            label[picture].tolist(),
            slots,
            facts.roi_low,
            facts.box_weights,
            sampled,
            int(sampled * facts.roi_positive),
            key_of(plain_detector.ROI_STREAM, slots + 5, picture),
        )
        left = sampled - len(expected)
        assert found.label_BR[picture].tolist() == [target.label for target in expected] + [-1] * left
        assert found.slot_BR[picture].tolist() == [target.slot for target in expected] + [0] * left
        assert found.boxes_BR4[picture].tolist() == [target.box for target in expected] + [[0.0] * 4] * left
        assert found.total_B[picture] == len(expected)
        assert found.positives_B[picture] == sum(target.label > 0 for target in expected)
        offsets = torch.tensor([target.offsets for target in expected] + [[0.0] * 4] * left)
        torch.testing.assert_close(found.offsets_BR4[picture], offsets, rtol=1e-5, atol=1e-5)
    assert found.positives_B[0] > 0
    assert found.positives_B[1] == 0 < found.total_B[1]
    assert found.positives_B[2] == found.total_B[2] > 0
    assert found.total_B[3] == 0


def test_targets_can_be_captured():
    random = torch.Generator().manual_seed(1)
    anchors, truth = boxes(random, 30), boxes(random, 2, 3)
    count, seed = torch.tensor([3, 1]), torch.tensor([SEED])
    proposals = Proposals(boxes(random, 2, 9), torch.zeros(2, 9))
    rpn, roi = (targets(SMALL, REFERENCES, DEVICE) for targets in (RpnTargets, RoiTargets))
    # The reference of the matching looks at counts on a CPU, where that is no wait.
    match = functools.partial(torch.full, (2, 30), -1)
    rpn._matched._match = lambda *_: match()
    roi._matched._match = lambda *_: match()[:, :12]
    with Capturable():
        rpn(anchors, truth, count, torch.full((2, 2), 32.0), torch.ones(2, dtype=torch.bool), seed)
        roi(with_truth(proposals, truth, count), truth, torch.ones(2, 3, dtype=torch.int64), count, seed)


# The sample itself


def labels(seed, batch, candidates):
    return torch.randint(-1, 2, (batch, candidates), generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@pytest.mark.parametrize(
    ("candidates", "count", "most_positive"), [(100, 30, 10), (100, 64, 64), (7, 20, 3), (5, 3, 0)]
)
def test_the_smallest_keys_are_taken(candidates, count, most_positive):
    label = labels(candidates + count, 3, candidates)
    label[1] = -1
    found = sample(label, torch.tensor([SEED]), 5, count, most_positive)
    for picture in range(3):
        positive, negative = plain_detector.sample(
            (label[picture] == 1).nonzero().flatten().tolist(),
            (label[picture] == 0).nonzero().flatten().tolist(),
            count,
            most_positive,
            key_of(5, candidates, picture),
        )
        taken = positive + negative
        assert found.index_BC[picture].tolist() == taken + [0] * (count - len(taken))
        assert (found.positives_B[picture], found.total_B[picture]) == (len(positive), len(taken))


def test_each_candidate_is_as_likely_as_another():
    """Each of 40 candidates is expected 125 times in 500 samples of 10; the standard deviation is 9.7."""
    label = torch.zeros((500, 40), dtype=torch.int8)
    found = sample(label, torch.tensor([3]), 1, 10, 0)
    taken = torch.zeros(500, 40).scatter_(1, found.index_BC, 1.0)
    assert (taken.sum(1) == 10).all()
    assert (taken.sum(0) - 125).abs().max() < 4 * 9.7


def test_streams_and_seeds_have_samples_of_their_own():
    label = torch.zeros((1, 200), dtype=torch.int8)
    taken = [
        tuple(sample(label, torch.tensor([seed]), stream, 20, 0).index_BC[0].tolist())
        for seed, stream in ((1, 1), (1, 2), (2, 1), (1 << 32, 1))
    ]
    assert len(set(taken)) == 4


def test_no_candidates():
    found = sample(torch.zeros((2, 0), dtype=torch.int8), torch.tensor([1]), 1, 4, 2)
    assert not any(tensor.any() for tensor in found)
    assert found.index_BC.shape == (2, 4)
