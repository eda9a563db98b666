"""Pictures to resize, and what Pillow makes of them."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MEAN = (102.9801, 115.9465, 122.7717)  # blue, green, red
SHAPE = (30, 46)
SLOT = 24
CASES = (
    # size before, size after, mirrored
    ((13, 19), (29, 43), False),
    ((19, 13), (28, 19), True),
    ((12, 20), (12, 33), False),  # the height stays
    ((1, 1), (5, 7), True),
    ((15, 20), (30, 40), True),  # twice: centres lie at quarters
    ((24, 24), (25, 25), False),  # the whole slot
)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Noise in every slot, beside the pictures too; sizes before and after; what is mirrored."""
    random = torch.Generator().manual_seed(0)
    pixels_BSS3 = torch.randint(256, (len(CASES), SLOT, SLOT, 3), dtype=torch.uint8, generator=random)
    before, after, mirrored = zip(*CASES, strict=True)
    return (
        pixels_BSS3,
        torch.tensor(before, dtype=torch.int32),
        torch.tensor(after, dtype=torch.float32),
        torch.tensor(mirrored),
    )


def by_pillow(pixels_BSS3: Tensor) -> Tensor:
    """(B, 3, H, W) fp32: each picture resized by Pillow alone, turned round, and put into zeros."""
    image_B3HW = torch.zeros((len(CASES), 3, *SHAPE))
    for slot, ((height, width), (new_height, new_width), mirrored) in enumerate(CASES):
        picture = Image.fromarray(pixels_BSS3[slot, :height, :width].numpy())
        levels = np.asarray(picture.resize((new_width, new_height), Image.Resampling.BILINEAR))
        levels = levels[:, ::-1] if mirrored else levels
        for channel, level in enumerate(MEAN):
            plane = torch.from_numpy(levels[:, :, 2 - channel].astype(np.float32)) - level
            image_B3HW[slot, channel, :new_height, :new_width] = plane
    return image_B3HW
