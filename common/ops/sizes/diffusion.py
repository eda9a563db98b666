"""Sizes of Stable Diffusion v2's U-Net, at which the operations of diffusion are measured."""

from __future__ import annotations

from typing import NamedTuple

import torch

PICTURES = 32
"""Pictures of a micro-batch on one node; on the most GPUs it has 2."""

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)
"""Dtypes of the activations; the recipe trains in fp16."""

HEAD_SIZE = 64
CAPTION = 77
"""Tokens of a caption."""


class Level(NamedTuple):
    """A level of the U-Net that has transformers; their feed-forward layers are four times as wide.

    Attributes:
        channels: features of a pixel.
        side: pixels along a side.
        heads: heads of attention.
    """

    channels: int
    side: int
    heads: int


LEVELS = (Level(320, 64, 5), Level(640, 32, 10), Level(1280, 16, 20), Level(1280, 8, 20))
"""From the finest."""

UPSAMPLED = ((8, 1280), (16, 1280), (32, 640))
"""Pixels along a side and channels of what is doubled on the way up."""

GROUPS, EPSILON = 16, 1e-5
"""Of the group norms with SiLU."""

TRANSFORMER_GROUPS, TRANSFORMER_EPSILON = 32, 1e-6
"""Of the group norms in front of a transformer."""
