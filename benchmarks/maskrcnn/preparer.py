"""Conversion of a reader's batch to the network's input, on the device.

Legend: B pictures, H W padded height and width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.ops.resize import RESIZE
from benchmarks.maskrcnn.pictures import Shape
from common.ops.operation import OperationRequest, select


class Preparer:
    """Resizes, mirrors, normalises and pads. Nothing waits for the device, so that a CUDA graph can include it.

    Args:
        facts: mean of the pictures and side of their slots.
        implementations: ``model.implementations``.
        dtype: dtype of the pictures.

    Attributes:
        choice: name of the chosen implementation of ``resize``.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """

    def __init__(
        self, facts: Facts, implementations: Mapping[str, str], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.choice, self._resize = select(implementations, "resize", RESIZE, OperationRequest(device, dtype))
        self._facts, self._device, self._dtype = facts, device, dtype

    def warm_up(self, pictures: int, shapes: Iterable[Shape]) -> None:
        """Prepare a synthetic batch of ``pictures`` slots in each shape, which compiles the kernels."""
        side = self._facts.longest_side
        made_up = {
            "pixels": torch.zeros((pictures, side, side, 3), dtype=torch.uint8, device=self._device),
            "decoded_size": torch.ones((pictures, 2), dtype=torch.int32, device=self._device),
            "size": torch.ones((pictures, 2), device=self._device),
            "transform": torch.zeros((pictures, 4), device=self._device),
        }
        for shape in shapes:
            self(made_up, shape)

    def __call__(self, tensors: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
        """Return a training batch with ``image`` instead of ``pixels`` and ``decoded_size``.

        ``image`` (B, 3, H, W) is channels_last, blue first, minus the mean, and zero outside the pictures.

        Args:
            tensors: a reader's batch, on the device.
            shape: key of the batch, H and W.
        """
        return self._prepared(tensors, tensors["transform"][:, 2] > 0, shape)

    def evaluation(self, tensors: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
        """Return an evaluation batch with ``image`` and ``original`` instead of ``pixels`` and ``decoded_size``.

        ``image`` is as in training. ``original`` (B, 2) fp32 has the heights and widths before resizing, px.
        """
        decoded_B2 = tensors["decoded_size"]
        prepared = self._prepared(tensors, torch.zeros_like(decoded_B2[:, 0], dtype=torch.bool), shape)
        return prepared | {"original": decoded_B2.float()}

    def _prepared(self, tensors: Mapping[str, Tensor], mirrored_B: Tensor, shape: Shape) -> dict[str, Tensor]:
        rest = {name: tensor for name, tensor in tensors.items() if name not in ("pixels", "decoded_size")}
        image = self._resize(
            tensors["pixels"],
            tensors["decoded_size"],
            tensors["size"],
            mirrored_B,
            self._facts.mean,
            shape,
            self._dtype,
        )
        return {"image": image, **rest}
