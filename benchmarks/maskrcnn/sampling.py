"""Which candidates of a picture the losses see: some of those with a box, and others to make up the number.

Girshick, arXiv:1504.08083, section 2.3, and Ren et al., arXiv:1506.01497, section 3.1.3. In the place of a random
permutation each candidate has a key, a hash of the batch's seed, the picture and the candidate
(:mod:`common.ops.random_bits`), and those with the smallest keys are taken: the same ones wherever it is computed.

Shapes: B pictures, N candidates, C of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.random_bits.reference import words

POSITIVE, NEGATIVE, IGNORED = 1, 0, -1
"""Labels of candidates: with a box, without one, and neither."""

_NONE = 1 << 32
"""Larger than every key."""


class Sample(NamedTuple):
    """Candidates that were taken.

    Attributes:
        index_BC: int64; a picture's positives, then its negatives, both by their keys, then 0 in the slots left.
        positives_B: int64, how many of them are positive.
        total_B: int64, how many there are.
    """

    index_BC: Tensor
    positives_B: Tensor
    total_B: Tensor


@torch.no_grad()
def sample(label_BN: Tensor, seed: Tensor, stream: int, count: int, most_positive: int) -> Sample:
    """Draw a sample of each picture's candidates.

    The key of candidate n of picture b is the hash of b N + n. The hash is a bijection of words, so no two candidates
    of a batch have the same.

    Args:
        label_BN: int8, :data:`POSITIVE`, :data:`NEGATIVE` or :data:`IGNORED`; fewer than 2**32 candidates.
        seed: (1,) int64, of the batch.
        stream: number of this sampling among those with one seed; each has keys of its own.
        count: candidates that are taken of a picture at most.
        most_positive: largest number of positives among them, at most ``count``. Negatives make up the number.

    Raises:
        ValueError: ``most_positive`` is larger than ``count``.
    """
    if most_positive > count:
        raise ValueError(f"a sample of {count} candidates cannot have {most_positive} positives")
    batch, candidates = label_BN.shape
    place_BN = torch.arange(batch * candidates, device=label_BN.device).view(batch, candidates)
    key_BN = words(place_BN, seed, stream).long() & 0xFFFFFFFF
    positive_BN, negative_BN = label_BN == POSITIVE, label_BN == NEGATIVE
    positives_B = positive_BN.sum(1).clamp(max=most_positive)
    total_B = positives_B + torch.minimum(negative_BN.sum(1), count - positives_B)
    found = [
        torch.where(of_BN, key_BN, _NONE).topk(min(most, candidates), dim=1, largest=False).indices
        for of_BN, most in ((positive_BN, most_positive), (negative_BN, count))
    ]
    slot_C = torch.arange(count, device=label_BN.device)
    second_BC = found[0].shape[1] + slot_C - positives_B.unsqueeze(1)
    there_BC = slot_C < total_B.unsqueeze(1)
    place_BC = torch.where(slot_C < positives_B.unsqueeze(1), slot_C, second_BC).where(there_BC, 0)
    index_BC = torch.cat([*found, place_BC.new_zeros((batch, 1))], 1).gather(1, place_BC)
    return Sample(torch.where(there_BC, index_BC, 0), positives_B, total_B)
