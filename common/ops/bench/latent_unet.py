"""Sizes of Stable Diffusion v2's U-Net, at which its norms and gates are measured.

A batch is 32 pictures, or 2 as on the most GPUs, whatever the number of packs.
"""

from __future__ import annotations

from typing import NamedTuple

BATCHES = (32, 2)
GROUPS, EPSILON = 16, 1e-5
"""Of the norms with SiLU."""

TRANSFORMER_GROUPS, TRANSFORMER_EPSILON = 32, 1e-6


class Norm(NamedTuple):
    """A group norm.

    Attributes:
        parts: channels of its input, or of a pair.
        size: pixels along a side.
        transformer: whether it is the one in front of a transformer, without SiLU.
        added: whether bias and time embedding are added before it; otherwise its inputs are handed on.
    """

    parts: tuple[int, ...]
    size: int
    transformer: bool = False
    added: bool = False


NORMS = (
    *(
        Norm((channels,), size)
        for channels, size in ((320, 64), (320, 32), (640, 32), (640, 16), (1280, 16), (1280, 8))
    ),
    *(Norm((channels,), size, added=True) for channels, size in ((320, 64), (640, 32), (1280, 16), (1280, 8))),
    *(Norm((channels,), size, transformer=True) for channels, size in ((320, 64), (640, 32), (1280, 16), (1280, 8))),
    *(Norm(parts, 64) for parts in ((640, 320), (320, 320))),
    *(Norm(parts, 32) for parts in ((1280, 640), (640, 640), (640, 320))),
    *(Norm(parts, 16) for parts in ((1280, 1280), (1280, 640))),
    Norm((1280, 1280), 8),
)
"""Each kind of group norm once."""

TRANSFORMERS = ((320, 64), (640, 32), (1280, 16), (1280, 8))
"""Features and pixels along a side of the transformers, whose feed-forward layers are four times as wide."""
