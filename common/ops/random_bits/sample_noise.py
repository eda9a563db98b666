"""Random numbers of the samples of a diffusion model: functions of a seed and of the number of the sample.

The number of the sample is the site of the hash (:mod:`common.ops.random_bits`), so the values do not depend on batch,
rank or order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.ops.random_bits.reference import normal_pairs, words

_LAST = 0xFFFFFFFF
"""Index of the word of a sample; no element of a latent has it."""


def sample_normals(
    shape: Sequence[int], seed: Tensor, sample_ids_N: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return two tensors of independent normal numbers. The index of a pair is that of the element in its sample.

    Args:
        shape: shape of the tensors, (N, ...).
        seed: int64, 0-d, on the device.
        sample_ids_N: int64, 0 ... 2**32 - 1.
        dtype: fp32, or fp64 for more digits of the same numbers.
    """
    element = torch.arange(torch.Size(shape[1:]).numel(), device=sample_ids_N.device)
    first, second = normal_pairs(element, seed, sample_ids_N.unsqueeze(1), dtype)
    return first.view(*shape), second.view(*shape)


def sample_words(seed: Tensor, sample_ids_N: Tensor) -> Tensor:
    """Return one word per sample, (N,) int64, 0 ... 2**32 - 1, which is independent of :func:`sample_normals`."""
    last = sample_ids_N.new_full((1,), _LAST)
    return words(last, seed, sample_ids_N.unsqueeze(1)).long().squeeze(1) & _LAST


def sample_uniform(seed: Tensor, sample_ids_N: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return one number per sample, (N,), in [0, 1], from :func:`sample_words`."""
    return ((sample_words(seed, sample_ids_N).double() + 0.5) * 2.0**-32).to(dtype)
