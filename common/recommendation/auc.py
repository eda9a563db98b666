"""Area under the ROC curve, exact for any number of samples.

Each prediction becomes an int32 key: the bits of its float32 probability, which sort like the probabilities, then the
label as the lowest bit. The area follows from the sorted keys:

    (pairs of a positive and a negative in order + half of the tied pairs) / (positives * negatives)

(Hanley and McNeil, "The meaning and use of the area under a ROC curve", 1982). This is the trapezoid rule over the
whole curve with ties merged. Twice the numerator is an integer and is counted exactly. Within equal probabilities
negatives come first. So a positive at index i with k positives before it has i - k negatives before it, including
tied ones, and half of the tied pairs is subtracted afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import DataError, SuiteError

PADDING = 2**31 - 1
"""Key of padding; sorts after all others."""
INVALID = 2**31 - 2
"""Key of a sample whose prediction is not a number."""
ONE = 0x3F800000
"""Bits of 1.0, the highest probability."""
CHUNK = 2**24
"""Keys whose indices are added up at a time; their products take 8 bytes each."""


@dataclass(frozen=True)
class Ranking:
    """Counts from which the area follows.

    Attributes:
        positives, negatives: number of samples of each label.
        doubled_wins: 2 for each pair of a positive and a negative in order, 1 for each tied pair.
    """

    positives: int
    negatives: int
    doubled_wins: int

    @property
    def area(self) -> float:
        """Area under the ROC curve: the rounded quotient of exact integers.

        Raises:
            DataError: all samples have one label, so there is no curve.
        """
        if not self.positives or not self.negatives:
            raise DataError(
                f"the evaluation samples are {self.positives:,} positives and {self.negatives:,} negatives: no ROC "
                "curve; evaluate samples of both labels"
            )
        return self.doubled_wins / (2 * self.positives * self.negatives)


def ranking_keys(logit_B: Tensor, label_B: Tensor, real: Tensor | int | None = None) -> Tensor:
    """Return keys that order predictions by probability, then label. Capturable: nothing waits for the device.

    Args:
        logit_B: predictions before the sigmoid, which is computed in float32.
        label_B: 0 or 1, any dtype.
        real: number of samples in the batch (0-d tensor or int); the rest is padding. None: no padding.

    Returns:
        int32 (B,); :data:`PADDING` for padding, :data:`INVALID` where the logit is not a number.
    """
    probability_B = torch.sigmoid(logit_B.float())
    bits_B = probability_B.view(torch.int32)
    key_B = bits_B * 2 + (label_B > 0.5)
    valid_B = (bits_B >= 0) & (bits_B <= ONE)
    key_B = torch.where(valid_B, key_B, INVALID)
    if real is not None:
        index_B = torch.arange(len(key_B), dtype=torch.int32, device=key_B.device)
        key_B = torch.where(index_B < real, key_B, PADDING)
    return key_B


def rank(keys_N: Tensor) -> Ranking:
    """Sort the keys and count pairs; wait for the device.

    Needs about 24 bytes of memory for each key, for the sort, and 8 for each probability that occurs with both labels.

    Args:
        keys_N: int32, from :func:`ranking_keys`, in any order, including padding; not changed.

    Raises:
        SuiteError: a prediction is not a number.
    """
    sorted_N = torch.sort(keys_N).values
    ends = torch.searchsorted(sorted_N, torch.tensor([INVALID, PADDING], dtype=torch.int32, device=keys_N.device))
    valid, samples = (int(end) for end in ends.tolist())
    if valid < samples:
        raise SuiteError(
            f"{samples - valid:,} of {samples:,} predictions are not numbers: the run diverged; look at the loss in "
            "the metrics, the learning rate and the precision"
        )
    key_S = sorted_N[:samples]
    positives, index_sum = _positives(key_S)
    in_order_or_tied = index_sum - positives * (positives - 1) // 2
    return Ranking(positives, samples - positives, 2 * in_order_or_tied - _tied_pairs(key_S))


def _positives(key_S: Tensor) -> tuple[int, int]:
    """Return the number of positives and the sum of their indices."""
    sums = torch.zeros(2, dtype=torch.int64, device=key_S.device)
    for start in range(0, len(key_S), CHUNK):
        label_C = (key_S[start : start + CHUNK] & 1).to(torch.int64)
        index_C = torch.arange(start, start + len(label_C), device=key_S.device)
        sums += torch.stack([label_C.sum(), (index_C * label_C).sum()])
    count, index_sum = sums.tolist()
    return count, index_sum


def _tied_pairs(key_S: Tensor) -> int:
    """Return the number of pairs of a positive and a negative with the same probability.

    Where the first positive of a probability follows its last negative, the keys differ by 1, and the second is odd.
    """
    first_positive = [torch.zeros(0, dtype=torch.int64, device=key_S.device)]
    for start in range(1, len(key_S), CHUNK):
        after_C = key_S[start : start + CHUNK]
        before_C = key_S[start - 1 : start - 1 + len(after_C)]
        mixed_C = (after_C == before_C + 1) & ((after_C & 1) == 1)
        first_positive.append(mixed_C.nonzero().flatten() + start)
    first_M = torch.cat(first_positive)
    key_M = key_S[first_M]
    negatives_M = first_M - torch.searchsorted(key_S, key_M - 1)
    positives_M = torch.searchsorted(key_S, key_M, right=True) - first_M
    return int((negatives_M * positives_M).sum().item())


def gather_keys(keys_N: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
    """Return the keys of all ranks on the group's first rank; None on the others. Collective.

    89 million keys are 357 MB, which NVLink sends to one GPU in milliseconds.

    Args:
        keys_N: keys of this rank, padded with :data:`PADDING` to the same number on every rank.
        group: ranks that predicted; None for a single rank.
    """
    if group is None:
        return keys_N
    first = dist.get_rank(group) == 0
    ranks = dist.get_world_size(group)
    all_RN = keys_N.new_empty((ranks, len(keys_N))) if first else None
    parts = None if all_RN is None else list(all_RN.unbind())
    dist.gather(keys_N, parts, group=group, group_dst=0)
    return None if all_RN is None else all_RN.view(-1)
