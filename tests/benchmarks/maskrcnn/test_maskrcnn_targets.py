"""Test samples of anchors and proposals. test_maskrcnn_iteration.py compares the targets with those of lists."""

from dataclasses import replace

import pytest
import torch

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.targets import RpnTargets, sample
from common.mlperf.fixed import fixed_facts
from tests.benchmarks.maskrcnn import plain_detector

SMALL = replace(fixed_facts(Facts, "maskrcnn"), rpn_samples=24, roi_sampled=20)
SEED = -0x123456789ABCDEF
DEVICE = torch.device("cpu")
REFERENCES = {"anchor_matching": "reference"}


def key_of(stream, candidates, picture):
    return lambda index: plain_detector.key(SEED, stream, picture * candidates + index)


def test_an_anchor_across_the_border_is_left_out_yet_is_a_boxs_best():
    anchors = torch.tensor([[-1.0, 0.0, 8.0, 9.0], [0.0, 0.0, 19.0, 9.0], [10.0, 10.0, 19.0, 19.0]])
    truth = torch.tensor([[[0.0, 0.0, 8.0, 9.0]]])  # overlaps: 0.9, 0.45, 0
    found = RpnTargets(SMALL, REFERENCES, DEVICE)(
        anchors, truth, torch.tensor([1]), torch.tensor([[20.0, 20.0]]), torch.tensor([True]), torch.tensor([SEED])
    )
    assert (found.positives_B.item(), found.total_B.item()) == (0, 1)
    assert found.index_BN[0, 0] == 2


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
