"""Run-length codes of masks in COCO's compressed form, for many masks at once.

COCO's mask API counts runs of zeros and ones in turn, column after column. Its compressed form (``rleToString``) is a
text: from the fourth run on a run is written as the difference to the one before the last, which is as long in most
masks; a number is cut into groups of five bits, the lowest first, until what is left is all zeros or all ones like the
group's highest bit; a group is the character ``48 + bits``, with 32 more where another follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GROUPS = 7
"""Of five bits, that an int32 has at most."""

_AT_ONCE = 1 << 18
"""Runs that are encoded in one go: what they need stays in a cache."""

Rle = dict[str, Any]
"""What pycocotools takes for a mask: ``size``, a list of height and width, and ``counts``, bytes."""


def rles(run_T: NDArray[np.integer[Any]], count_N: NDArray[np.integer[Any]], size_N2: NDArray[Any]) -> list[Rle]:
    """Masks as pycocotools takes them.

    Args:
        run_T: lengths of the runs of all masks, one mask after another, px.
        count_N: runs of each mask.
        size_N2: height and width of each mask, px.

    Raises:
        ValueError: the runs of a mask don't add up to its area, or don't belong to the masks.
    """
    end_N = np.cumsum(count_N, dtype=np.int64)
    before_T = np.concatenate([[0], np.cumsum(run_T, dtype=np.int64)])
    size_N2 = np.asarray(size_N2).astype(np.int64)
    if len(run_T) != (end_N[-1] if len(end_N) else 0):
        raise ValueError(f"{len(run_T)} runs are not those of {len(count_N)} masks")
    wrong_N = before_T[end_N] - before_T[end_N - count_N] != size_N2.prod(1)
    if wrong_N.any():
        place = int(wrong_N.argmax())
        raise ValueError(f"the runs of mask {place} don't add up to its {size_N2[place].tolist()} px")
    texts = compressed(run_T, count_N)
    return [{"size": size, "counts": text} for size, text in zip(size_N2.tolist(), texts, strict=True)]


def compressed(run_T: NDArray[np.integer[Any]], count_N: NDArray[np.integer[Any]]) -> list[bytes]:
    """COCO's compressed text of each mask; see :func:`rles`."""
    texts: list[bytes] = []
    end_N = np.cumsum(count_N, dtype=np.int64)
    for start, stop in _portions(end_N):
        first = end_N[start] - count_N[start]
        texts += _compressed(run_T[first : end_N[stop - 1]], end_N[start:stop] - first)
    return texts


def _portions(end_N: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """First and last of successive masks, of about so many runs as are encoded at once."""
    start = 0
    while start < len(end_N):
        before = end_N[start - 1] if start else 0
        stop = max(int(np.searchsorted(end_N, before + _AT_ONCE, "right")), start + 1)
        yield start, stop
        start = stop


def _compressed(run_T: NDArray[np.integer[Any]], end_N: NDArray[np.int64]) -> list[bytes]:
    begin_N = np.concatenate([[0], end_N[:-1]])
    value = run_T.astype(np.int32)
    value[2:] -= run_T[:-2].astype(np.int32)
    for early in range(3):  # these stand as they are
        place = begin_N[end_N - begin_N > early] + early
        value[place] = run_T[place]

    length_T = np.zeros(len(value), np.int64)
    groups = np.zeros((len(value), _GROUPS), np.uint8)
    left = np.arange(len(value))  # numbers that have groups left
    for group in range(_GROUPS):
        bits = value & 31
        value = value >> 5
        more = value != np.where(bits & 16, -1, 0)
        groups[left, group] = bits + 48 + 32 * more
        length_T[left] += 1
        left, value = left[more], value[more]
        if not len(left):
            break
    text = groups[np.arange(_GROUPS) < length_T[:, None]].tobytes()
    character = np.concatenate([[0], np.cumsum(length_T)])
    bounds = zip(character[begin_N].tolist(), character[end_N].tolist(), strict=True)
    return [text[begin:end] for begin, end in bounds]
