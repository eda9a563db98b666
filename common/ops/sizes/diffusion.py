"""Sizes of Stable Diffusion v2's U-Net, and of FLUX.1's transformer, for the operations that others use, too."""

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


class Joint(NamedTuple):
    """Attention over text and image together, and the MLP of a single block.

    Attributes:
        samples: samples per micro-batch on one node.
        tokens: tokens of a sample.
    """

    samples: int
    tokens: int
    heads: int
    head_size: int
    feed_forward: int


FLUX = Joint(16, 512, 24, 128, 12288)
