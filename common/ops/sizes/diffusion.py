"""Sizes of Stable Diffusion v2's U-Net for the operations of diffusion."""

from __future__ import annotations

from typing import NamedTuple

import torch

PICTURES = 32
"""Pictures per micro-batch on one node. With the largest number of GPUs a micro-batch has 2."""

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)
"""Dtypes of the activations; the recipe trains in fp16."""

HEAD_SIZE = 64
CAPTION = 77
"""Tokens per caption."""


class Level(NamedTuple):
    """A level of the U-Net that has transformers. Their feed-forward layers have four times as many channels.

    Attributes:
        channels: channels per pixel.
        side: height and width in pixels.
        heads: number of attention heads.
    """

    channels: int
    side: int
    heads: int


LEVELS = (Level(320, 64, 5), Level(640, 32, 10), Level(1280, 16, 20), Level(1280, 8, 20))
"""Levels from the finest to the coarsest."""

UPSAMPLED = ((8, 1280), (16, 1280), (32, 640))
"""Side in pixels and channels of the inputs of the upsampling layers."""

GROUPS, EPSILON = 16, 1e-5
"""Groups and epsilon of the group norms with SiLU."""

TRANSFORMER_GROUPS, TRANSFORMER_EPSILON = 32, 1e-6
"""Groups and epsilon of the group norms before a transformer."""
