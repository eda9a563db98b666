"""Targets of region proposal network and box head, on the device, with fixed shapes and without waiting for it.

The losses use a sample of a picture's candidates: some positives, filled up with negatives. Girshick, arXiv:1504.08083,
section 2.3, and Ren et al., arXiv:1506.01497, section 3.1.3. Instead of a random permutation, each candidate has a key,
which is a hash of the batch's seed, the picture and the candidate (:mod:`common.ops.random_bits`). The candidates with
the smallest keys are sampled, so that all devices sample the same.

Shapes: B pictures, M boxes at most, A anchors of all levels, S proposals of a picture, N sampled anchors, R sampled
proposals; for samples: N candidates, C slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.proposals import CODING, PIXEL, Proposals
from common.detection.coding import BoxCoding, rows_of
from common.ops.anchor_matching import ANCHOR_MATCHING, BELOW, MatchingRule
from common.ops.operation import OperationRequest, select
from common.ops.random_bits.reference import words

POSITIVE, NEGATIVE, IGNORED = 1, 0, -1
"""Labels of candidates: positive (with a box), negative (without one), and neither."""

_NONE = 1 << 32
"""A number larger than every key."""


class CandidateSample(NamedTuple):
    """Sampled candidates: of each kind, those with the smallest random keys.

    Attributes:
        index_BC: int64; positives, then negatives, both sorted by key, then 0 in unused slots.
        positives_B: int64, number of positives in the sample.
        total_B: int64, size of the sample.
    """

    index_BC: Tensor
    positives_B: Tensor
    total_B: Tensor


@torch.no_grad()
def sample(label_BN: Tensor, seed: Tensor, stream: int, count: int, most_positive: int) -> CandidateSample:
    """Draw a sample of the candidates of each picture.

    The key of candidate n of picture b is the hash of b N + n. The hash is a bijection of words, so that keys are
    unique in a batch.

    Args:
        label_BN: int8, :data:`POSITIVE`, :data:`NEGATIVE` or :data:`IGNORED`; fewer than 2**32 candidates.
        seed: (1,) int64 seed of the batch.
        stream: number of the random stream, which makes the keys of several samplings with one seed independent.
        count: maximum size of a sample.
        most_positive: maximum number of positives, at most ``count``. The rest of the sample is negatives.
    """
    batch, candidates = label_BN.shape
    position_BN = torch.arange(batch * candidates, device=label_BN.device).view(batch, candidates)
    key_BN = words(position_BN, seed, stream).long() & 0xFFFFFFFF
    positive_BN, negative_BN = label_BN == POSITIVE, label_BN == NEGATIVE
    positives_B = positive_BN.sum(1).clamp(max=most_positive)
    total_B = positives_B + torch.minimum(negative_BN.sum(1), count - positives_B)
    found = [
        torch.where(of_BN, key_BN, _NONE).topk(min(most, candidates), dim=1, largest=False).indices
        for of_BN, most in ((positive_BN, most_positive), (negative_BN, count))
    ]
    slot_C = torch.arange(count, device=label_BN.device)
    second_BC = found[0].shape[1] + slot_C - positives_B.unsqueeze(1)
    valid_BC = slot_C < total_B.unsqueeze(1)
    position_BC = torch.where(slot_C < positives_B.unsqueeze(1), slot_C, second_BC).where(valid_BC, 0)
    index_BC = torch.cat([*found, position_BC.new_zeros((batch, 1))], 1).gather(1, position_BC)
    return CandidateSample(torch.where(valid_BC, index_BC, 0), positives_B, total_B)


RPN_STREAM, ROI_STREAM = 1, 2
"""Random streams of the two samplings."""

BACKGROUND, EMPTY = 0, -1
"""Values that replace a class. Classes start at 1."""


class RpnSample(NamedTuple):
    """Sampled anchors.

    Attributes:
        index_BN: indices, int64: positives of a picture, then its negatives, then 0 in unused slots.
        positives_B: number of positives, int64.
        total_B: size of the sample, int64.
        offsets_BN4: offsets of a positive's box from its anchor, fp32; 0 elsewhere.
    """

    index_BN: Tensor
    positives_B: Tensor
    total_B: Tensor
    offsets_BN4: Tensor


class RoiSample(NamedTuple):
    """Sampled proposals: positives of a picture, then its negatives, then empty slots.

    Attributes:
        boxes_BR4: corners in px of the resized picture, fp32; 0 in empty slots.
        label_BR: class, :data:`BACKGROUND` or :data:`EMPTY`, int64.
        slot_BR: index of a positive's box in the picture, int64; 0 elsewhere.
        positives_B: number of positives, int64.
        total_B: size of the sample, int64.
        offsets_BR4: offsets of a positive's box from its proposal, fp32; 0 elsewhere.
    """

    boxes_BR4: Tensor
    label_BR: Tensor
    slot_BR: Tensor
    positives_B: Tensor
    total_B: Tensor
    offsets_BR4: Tensor


class _Matched:
    """Matches candidates to boxes and samples them."""

    def __init__(
        self,
        rule: MatchingRule,
        stream: int,
        count: int,
        share: float,
        implementations: Mapping[str, str],
        device: torch.device,
    ) -> None:
        request = OperationRequest(device, torch.float32)
        self.choice, self._match = select(implementations, "anchor_matching", ANCHOR_MATCHING, request)
        self._rule, self._stream, self._count, self._most_positive = rule, stream, count, int(count * share)

    def __call__(
        self, candidates_A4: Tensor, known_BA: Tensor, boxes_BM4: Tensor, count_B: Tensor, seed: Tensor
    ) -> tuple[Tensor, CandidateSample]:
        """Return each candidate's match, and the sample, which only has candidates that are ``known_BA``."""
        match_BA = self._match(candidates_A4, boxes_BM4, count_B, self._rule)
        label_BA = torch.where(match_BA >= 0, POSITIVE, torch.where(match_BA == BELOW, NEGATIVE, IGNORED))
        label_BA = torch.where(known_BA, label_BA, IGNORED).to(torch.int8)
        return match_BA, sample(label_BA, seed, self._stream, self._count, self._most_positive)


class RpnTargets:
    """Computes the targets of the region proposal network. Ren et al., arXiv:1506.01497, section 3.1.2.

    An anchor that crosses the border of the picture (without padding) is never sampled, but it takes part in matching.

    Args:
        facts: thresholds and sample size.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """

    def __init__(self, facts: Facts, implementations: Mapping[str, str], device: torch.device) -> None:
        rule = MatchingRule(facts.rpn_low, facts.rpn_high, rescue="every_best", pixel=PIXEL)
        self._matched = _Matched(rule, RPN_STREAM, facts.rpn_samples, facts.rpn_positive, implementations, device)
        self.choice = self._matched.choice

    @torch.no_grad()
    def __call__(
        self, anchors_A4: Tensor, boxes_BM4: Tensor, count_B: Tensor, size_B2: Tensor, real_B: Tensor, seed: Tensor
    ) -> RpnSample:
        """Return the targets of a micro-batch.

        Args:
            anchors_A4: anchors of all levels, fp32 corners in px.
            boxes_BM4: boxes of each picture in px, followed by padding of any value; fp32.
            count_B: number of boxes of each picture, int64.
            size_B2: height and width of each picture without padding, px.
            real_B: bool; pictures with False get no sample.
            seed: (1,) int64 seed of the batch.
        """
        x1, y1, x2, y2 = anchors_A4.unbind(1)
        height_B1, width_B1 = size_B2.unsqueeze(2).unbind(1)
        inside_BA = ((x1 >= 0) & (y1 >= 0)) & (x2 < width_B1) & (y2 < height_B1) & real_B.unsqueeze(1)
        match_BA, sample = self._matched(anchors_A4, inside_BA, boxes_BM4, count_B, seed)
        slot_BN = match_BA.gather(1, sample.index_BC)
        anchors_BN4 = anchors_A4[sample.index_BC]
        return RpnSample(*sample, _offsets(CODING, anchors_BN4, boxes_BM4, slot_BN, sample.positives_B))


class RoiTargets:
    """Computes the targets of the box head. Girshick, arXiv:1504.08083, section 2.3.

    Args:
        facts: threshold, sample size and weights of the offsets.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """

    def __init__(self, facts: Facts, implementations: Mapping[str, str], device: torch.device) -> None:
        rule = MatchingRule(facts.roi_low, facts.roi_low, pixel=PIXEL)
        self._matched = _Matched(rule, ROI_STREAM, facts.roi_sampled, facts.roi_positive, implementations, device)
        self._coding = box_coding(facts)

    @torch.no_grad()
    def __call__(
        self, proposals: Proposals, boxes_BM4: Tensor, label_BM: Tensor, count_B: Tensor, seed: Tensor
    ) -> RoiSample:
        """Return the sample of a micro-batch.

        Args:
            proposals: proposals and ground-truth boxes, see :func:`benchmarks.maskrcnn.proposals.with_truth`.
            boxes_BM4: boxes of each picture in px, followed by padding of any value; fp32.
            label_BM: classes from 1, int64.
            count_B: number of boxes of each picture, int64.
            seed: (1,) int64 seed of the batch.
        """
        valid_BS = proposals.score_BS > -torch.inf
        match_BS, sample = self._matched(proposals.boxes_BS4, valid_BS, boxes_BM4, count_B, seed)
        index_BR = sample.index_BC
        position_R = torch.arange(index_BR.shape[1], device=index_BR.device)
        positive_BR = position_R < sample.positives_B.unsqueeze(1)
        valid_BR = position_R < sample.total_B.unsqueeze(1)
        slot_BR = torch.where(positive_BR, match_BS.gather(1, index_BR), 0)
        class_BR = torch.where(positive_BR, label_BM.gather(1, slot_BR), BACKGROUND)
        boxes_BR4 = rows_of(proposals.boxes_BS4, index_BR)
        return RoiSample(
            torch.where(valid_BR.unsqueeze(2), boxes_BR4, 0.0),
            torch.where(valid_BR, class_BR, EMPTY),
            slot_BR,
            sample.positives_B,
            sample.total_B,
            _offsets(self._coding, boxes_BR4, boxes_BM4, slot_BR, sample.positives_B),
        )


def box_coding(facts: Facts) -> BoxCoding:
    """Return the coding of the box head's offsets."""
    return BoxCoding(facts.box_weights, CODING.most_growth, PIXEL)


def _offsets(coding: BoxCoding, from_BN4: Tensor, boxes_BM4: Tensor, slot_BN: Tensor, positives_B: Tensor) -> Tensor:
    """Return the offsets of the boxes in these slots, fp32; 0 after the positives, whose slots can be invalid."""
    position_N = torch.arange(slot_BN.shape[1], device=slot_BN.device)
    positive_BN = position_N < positives_B.unsqueeze(1)
    # Others are encoded relative to themselves, because the logarithm of padding may not exist.
    to_BN4 = torch.where(positive_BN.unsqueeze(2), rows_of(boxes_BM4, slot_BN.clamp(min=0)), from_BN4)
    return torch.where(positive_BN.unsqueeze(2), coding.encode(to_BN4, from_BN4), 0.0)
