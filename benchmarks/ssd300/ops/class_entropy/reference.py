"""The reference of :mod:`benchmarks.ssd300.ops.class_entropy`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ssd300.ops.head_results import HeadChannels, Joined


def class_entropy_reference(
    channels: Sequence[HeadChannels], results: Sequence[Tensor], class_NA: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference implementation.

    Args:
        channels: of each head.
        results: (N, C, H, W) of each head.
        class_NA: class of each default box, int64, 0 to K - 1.

    Returns:
        (N, A): the cross-entropies, fp32 (fp64 of fp64); and (N, A, 4): the offsets, in the results' dtype.
    """
    logits_NAK, offsets_NA4 = Joined.apply(channels, *results)
    wide = torch.promote_types(logits_NAK.dtype, torch.float32)
    log_share_NAK = F.log_softmax(logits_NAK, 2, dtype=wide)
    return -log_share_NAK.gather(2, class_NA.unsqueeze(2)).squeeze(2), offsets_NA4
