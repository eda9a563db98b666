"""Test properties of the Triton kernels for matching and suppression that cases cannot express.

tests/test_interpreted_kernels.py runs this file.
"""

import pytest
import torch

from common.ops.anchor_matching import BELOW
from common.ops.anchor_matching import triton as matching_triton
from common.ops.anchor_matching.cases import RETINANET, SAMPLED, SSD
from common.ops.suppression import triton as suppression_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_only_anchors_that_no_other_overlaps_more_are_rescued():
    """The overlaps are 0.3, one that is smaller by the last bits, and 0.3 again."""
    right = torch.tensor(30.0)
    anchors = torch.zeros(3, 4)
    anchors[:, 3] = 100
    anchors[:, 2] = torch.stack([right, right.nextafter(torch.tensor(0.0)), right])
    real = torch.tensor([[[0.0, 0.0, 100.0, 100.0]]])
    matched = matching_triton.match(anchors, real, torch.tensor([1]), RETINANET)
    assert matched.tolist() == [[0, BELOW, 0]]


@pytest.mark.parametrize("rule", [RETINANET, SAMPLED, SSD], ids=lambda rule: rule.rescue)
def test_nothing_to_match(rule):
    anchors, real = torch.rand(70, 4), torch.rand(2, 3, 4)
    assert (matching_triton.match(anchors, real[:, :0], torch.tensor([0, 0]), rule) == BELOW).all()
    assert (matching_triton.match(anchors, real, torch.tensor([0, 0]), rule) == BELOW).all()
    assert matching_triton.match(anchors[:0], real, torch.tensor([3, 3]), rule).shape == (2, 0)
    assert matching_triton.match(anchors, real[:0], torch.tensor([], dtype=torch.int64), rule).shape == (0, 70)


@pytest.mark.parametrize("share", [0.0, 2.0], ids=["masks", "walking"])
def test_a_chain_longer_than_a_block_alternates(share, monkeypatch):
    monkeypatch.setattr(suppression_triton, "MASK_SHARE", share)
    length = 99
    left = torch.arange(length, dtype=torch.float32)
    chain = torch.stack([left, torch.zeros(length), left + 2, torch.ones(length)], 1)
    kept, there = suppression_triton.suppress(chain[None], -left[None], torch.zeros(1, length), 0.25, length)
    assert kept[there].tolist() == list(range(0, length, 2))


def test_no_candidates():
    kept, there = suppression_triton.suppress(torch.zeros(2, 0, 4), torch.zeros(2, 0), torch.zeros(2, 0), 0.5, 10)
    assert kept.shape == there.shape == (2, 0)
