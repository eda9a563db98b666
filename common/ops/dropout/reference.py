"""The reference of :mod:`common.ops.dropout`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.random_bits.reference import words
from common.ops.triton_support import widen

LEVELS = 1 << 16
"""Number of values of the 16 bits that decide about an element."""


class DropoutMask(NamedTuple):
    """Parameters of the mask of one dropout.

    Attributes:
        p: probability of dropping an element; if 0, the seed is not read.
        seed: 0-d int64, on the device of the elements.
        site: number of the call site, not negative, different for each dropout of a network.
    """

    p: float
    seed: Tensor
    site: int


def threshold(p: float) -> int:
    """Return how many of the ``LEVELS`` values drop an element: p rounded to a multiple of 1 / LEVELS.

    Raises:
        ValueError: p is negative, or so close to 1 that no element would be kept.
    """
    dropped = round(p * LEVELS)
    if p < 0 or dropped >= LEVELS:
        raise ValueError(f"dropout probability {p}: at least 0 and below 1")
    return dropped


def scale_of_kept(p: float) -> float:
    """Return the factor of kept elements, with which dropout does not change expected values."""
    return LEVELS / (LEVELS - threshold(p))


def _hash(pairs: Tensor, seed: Tensor, site: int) -> tuple[Tensor, Tensor]:
    """Return the low and high half of ``hash(pairs)``: 0 ... LEVELS - 1, int32."""
    word = words(pairs, seed, site)
    return word & 0xFFFF, (word >> 16) & 0xFFFF


def keep_mask(seed: Tensor, site: int, elements: int | Tensor, p: float) -> Tensor:
    """Return a mask of kept elements, bool, of the shape of ``elements`` or (elements,).

    Args:
        seed: 0-d int64, on the device of the result.
        elements: indices (int64, any shape, 0 ... 2**32 - 1), or the number of elements with indices from 0.
        p: probability of dropping an element.
    """
    if isinstance(elements, int):
        pairs = (elements + 1) // 2
        return keep_rows(seed, site, torch.zeros((), dtype=torch.int64, device=seed.device), 2 * pairs, p)[:elements]
    even, odd = _hash(elements >> 1, seed, site)
    return torch.where((elements & 1).bool(), odd, even) >= threshold(p)


def keep_rows(seed: Tensor, site: int, rows: Tensor, width: int, p: float) -> Tensor:
    """Return a mask of kept elements for whole rows; row r has the elements r * width ... r * width + width - 1.

    Rows of even width need one hash for two elements.

    Args:
        rows: indices of the rows, int64, any shape.
        width: number of elements per row.

    Returns:
        bool, the shape of ``rows`` with an additional last dimension ``width``.
    """
    if width % 2:
        columns = torch.arange(width, device=rows.device)
        return keep_mask(seed, site, rows.unsqueeze(-1) * width + columns, p)
    pairs = rows.unsqueeze(-1) * (width // 2) + torch.arange(width // 2, device=rows.device)
    even, odd = _hash(pairs, seed, site)
    return torch.stack((even >= threshold(p), odd >= threshold(p)), -1).flatten(-2)


def dropout_reference(x: Tensor, p: float, seed: Tensor, site: int) -> Tensor:
    """Drop elements of ``x`` by their flat index.

    Args:
        x: contiguous, any shape.
        p: probability of dropping an element; for 0 the function returns ``x`` itself and does not read the seed.

    Returns:
        Tensor of the shape and dtype of ``x``: kept elements times :func:`scale_of_kept`, zeros elsewhere.
    """
    if p == 0.0:
        return x
    keep = keep_mask(seed, site, x.numel(), p).view(x.shape)
    return torch.where(keep, widen(x) * scale_of_kept(p), 0.0).to(x.dtype)
