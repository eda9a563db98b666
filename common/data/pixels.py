"""From 8-bit pixels to what a network takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Normalizer:
    """``(pixel - mean) / std`` through one table per channel: exact, and bfloat16 without numpy's support.

    Args:
        mean, std: of each channel, in levels of 0 to 255.
        dtype: of the result.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> None:
        values = torch.arange(256, dtype=torch.float32)[:, None]
        table = (values - torch.tensor(mean)) / torch.tensor(std)
        self._bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        self._table = table.to(dtype).T.contiguous().view(self._bits).numpy()  # (C, 256)

    def write(self, pixels_HWC: NDArray[np.uint8], out_HWC: Tensor) -> None:
        """Fill the first channels of ``out_HWC``, as many as there are means; the others stay as they are."""
        out = out_HWC.view(self._bits).numpy()
        for channel, levels in enumerate(self._table):
            out[:, :, channel] = np.take(levels, pixels_HWC[:, :, channel])
