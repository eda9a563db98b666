"""The area under the ROC curve, exact over any number of samples.

Each prediction becomes one int32 key: the bits of a probability in float32, which order as the probabilities do, and
the label as the lowest bit. Sorted once, the keys hold all that the area depends on: it is

    (pairs of a positive and a negative that are in order + half of those that are tied) / (positives * negatives)

(Hanley and McNeil, "The meaning and use of the area under a ROC curve", 1982), which is the trapezoid rule over the
whole curve with ties merged. Twice the numerator is a whole number, and is counted in integers. In the sorted keys a
positive at index i with k positives before it has i - k negatives before it, tied ones included, since within equal
probabilities negatives come first; half of the tied pairs is then taken off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import DataError, SuiteError

PADDING = 2**31 - 1
"""The key of what is no sample; it sorts behind all others."""
INVALID = 2**31 - 2
"""The key of a sample whose prediction is no number."""
ONE = 0x3F800000
"""The bits of 1.0, the highest probability."""
CHUNK = 2**24
"""Keys of which indices are added up at once: their products take 8 bytes each."""


@dataclass(frozen=True)
class Ranking:
    """What the area follows from.

    Attributes:
        positives, negatives: samples of each label.
        doubled_wins: pairs of a positive and a negative in order, twice, and tied ones, once.
    """

    positives: int
    negatives: int
    doubled_wins: int

    @property
    def area(self) -> float:
        """The area under the ROC curve: the rounded quotient of exact integers.

        Raises:
            DataError: all samples have one label, so that there is no curve.
        """
        if not self.positives or not self.negatives:
            raise DataError(
                f"the evaluation samples are {self.positives:,} positives and {self.negatives:,} negatives: no ROC "
                "curve; evaluate samples of both labels"
            )
        return self.doubled_wins / (2 * self.positives * self.negatives)


def ranking_keys(logit_B: Tensor, label_B: Tensor, real: Tensor | int | None = None) -> Tensor:
    """The keys of a batch of predictions. Capturable: nothing waits for the device.

    Args:
        logit_B: predictions, before the sigmoid, which is taken in float32.
        label_B: 0 or 1, any dtype.
        real: how many of the batch are samples, the first ones (0-d tensor or number); None for all.

    Returns:
        int32 (B,); :data:`PADDING` for what is no sample, :data:`INVALID` where the logit is no number.
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
    """Sort the keys and count pairs; waits for the device.

    Besides the keys it takes some 24 bytes for each of them, for the sort, and 8 for each probability of both labels.

    Args:
        keys_N: int32, of :func:`ranking_keys`, in any order, padding included; not changed.

    Raises:
        SuiteError: a prediction is no number.
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
    """How many positives there are, and the sum of their indices."""
    sums = torch.zeros(2, dtype=torch.int64, device=key_S.device)
    for start in range(0, len(key_S), CHUNK):
        label_C = (key_S[start : start + CHUNK] & 1).to(torch.int64)
        index_C = torch.arange(start, start + len(label_C), device=key_S.device)
        sums += torch.stack([label_C.sum(), (index_C * label_C).sum()])
    count, index_sum = sums.tolist()
    return count, index_sum


def _tied_pairs(key_S: Tensor) -> int:
    """Pairs of a positive and a negative of the same probability.

    A probability with both labels shows itself where its first positive follows its last negative: the keys there
    differ by 1, and the second is odd.
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
    """The keys of all ranks, on the group's first; None on the others. Collective.

    89 million keys are 357 MB, which NVLink brings to one GPU in milliseconds.

    Args:
        keys_N: of this rank; of the same number on every rank, filled up with :data:`PADDING`.
        group: of the ranks that predicted; None for this one alone.
    """
    if group is None:
        return keys_N
    first = dist.get_rank(group) == 0
    ranks = dist.get_world_size(group)
    all_RN = keys_N.new_empty((ranks, len(keys_N))) if first else None
    parts = None if all_RN is None else list(all_RN.unbind())
    dist.gather(keys_N, parts, group=group, group_dst=0)
    return None if all_RN is None else all_RN.view(-1)
