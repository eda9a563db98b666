"""Conversion of 8-bit pixels to normalised network inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Normalizer:
    """Computes ``(pixel - mean) / std`` with one lookup table per channel, for any dtype, including bfloat16.

    Args:
        mean, std: values per channel, on the scale 0 to 255.
        dtype: dtype of the result.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> None:
        values = torch.arange(256, dtype=torch.float32)[:, None]
        table = (values - torch.tensor(mean)) / torch.tensor(std)
        self._bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        self._table = table.to(dtype).T.contiguous().view(self._bits).numpy()  # (C, 256)

    def write(self, pixels_HWC: NDArray[np.uint8], out_HWC: Tensor) -> None:
        """Normalise ``pixels_HWC`` into the first channels of ``out_HWC``, one per mean; keep the other channels."""
        out = out_HWC.view(self._bits).numpy()
        for channel, levels in enumerate(self._table):
            out[:, :, channel] = np.take(levels, pixels_HWC[:, :, channel])
