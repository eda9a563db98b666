"""Sizes of Stable Diffusion v2's U-Net, at which the operations of diffusion are measured.

A step of BERT has none of them: they are measured as candidates, and add up to nothing.
"""

from __future__ import annotations

BATCHES = (32, 2)
"""Pictures of a micro-batch, whatever the batch: of one node's recipe, and of the largest."""

HEAD_SIZE = 64
CAPTION = 77
"""Tokens of a caption."""

TOKENS_AND_HEADS = ((4096, 5), (1024, 10), (256, 20), (64, 20))
"""Places of a picture and heads at its levels, from the finest."""

UPSAMPLED = ((8, 1280), (16, 1280), (32, 640))
"""Places along a side and channels of what is doubled on the way up."""
