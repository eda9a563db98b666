"""Sampling of the candidates of a picture for the losses: some positives, filled up with negatives.

Girshick, arXiv:1504.08083, section 2.3, and Ren et al., arXiv:1506.01497, section 3.1.3. Instead of a random
permutation, each candidate has a key, which is a hash of the batch's seed, the picture and the candidate
(:mod:`common.ops.random_bits`). The candidates with the smallest keys are sampled, so that all devices sample the
same.

Shapes: B pictures, N candidates, C slots of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.random_bits.reference import words

POSITIVE, NEGATIVE, IGNORED = 1, 0, -1
"""Labels of candidates: positive (with a box), negative (without one), and neither."""

_NONE = 1 << 32
"""A number larger than every key."""


class Sample(NamedTuple):
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
def sample(label_BN: Tensor, seed: Tensor, stream: int, count: int, most_positive: int) -> Sample:
    """Draw a sample of the candidates of each picture.

    The key of candidate n of picture b is the hash of b N + n. The hash is a bijection of words, so that keys are
    unique in a batch.

    Args:
        label_BN: int8, :data:`POSITIVE`, :data:`NEGATIVE` or :data:`IGNORED`; fewer than 2**32 candidates.
        seed: (1,) int64 seed of the batch.
        stream: number of the random stream, which makes the keys of several samplings with one seed independent.
        count: maximum size of a sample.
        most_positive: maximum number of positives, at most ``count``. The rest of the sample is negatives.

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
