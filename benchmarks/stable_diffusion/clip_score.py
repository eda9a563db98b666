"""The CLIP score: cosine of the embeddings of a picture and its caption (Hessel et al. 2021, without their factor).

Pictures are preprocessed by OpenCLIP's evaluation transform for 8-bit pictures: bicubic resizing of the short side,
central square crop, normalisation with the statistics of CLIP's training set.

Legend: N pictures, H height, W width, E features of an embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.stable_diffusion.pillow_resize import resize_bicubic

MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of red, green and blue in CLIP's training set (constants of OpenCLIP)."""


def to_bytes(images_N3HW: Tensor) -> Tensor:
    """Convert pictures in [0, 1] to uint8 as the reference does: 255 times the value, truncated."""
    return (255 * images_N3HW).to(torch.uint8)


class ClipTransform:
    """Preprocessing of 8-bit pictures for CLIP's vision tower.

    Args:
        resolution: height and width of the result, px.
        dtype: dtype of the result.
        device: device of both the input pictures and the result.
    """

    def __init__(self, resolution: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._resolution, self._dtype = resolution, dtype
        wide = torch.promote_types(dtype, torch.float32)
        self._mean_311, self._deviation_311 = (
            torch.tensor(values, dtype=wide, device=device).view(3, 1, 1) for values in (MEAN, DEVIATION)
        )

    def __call__(self, pictures_N3HW: Tensor) -> Tensor:
        """Return the normalised pictures (N, 3, resolution, resolution).

        Args:
            pictures_N3HW: uint8, of any size.
        """
        height, width = pictures_N3HW.shape[2:]
        short, target = min(height, width), self._resolution
        resized = resize_bicubic(pictures_N3HW, target * height // short, target * width // short)
        top, left = (round((size - target) / 2) for size in resized.shape[2:])
        square = resized[:, :, top : top + target, left : left + target]
        pixels = square.to(self._mean_311.dtype) / 255
        return ((pixels - self._mean_311) / self._deviation_311).to(self._dtype)


def cosines(pictures_NE: Tensor, captions_NE: Tensor) -> Tensor:
    """Return the cosine of every picture with its caption: (N,) fp32, or fp64 for fp64. Normalises its inputs."""
    wide = torch.promote_types(torch.promote_types(pictures_NE.dtype, captions_NE.dtype), torch.float32)
    pictures, captions = (F.normalize(embeddings.to(wide), dim=1) for embeddings in (pictures_NE, captions_NE))
    return (pictures * captions).sum(1)
