"""A reader's batch on the device: its decoded pictures become the network's input.

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
    """Resizes, mirrors, normalises and pads; nothing waits for the device, and a CUDA graph can hold it.

    Args:
        facts: mean of the pictures, and their slots.
        implementations: ``model.implementations``.
        device: of the batches.
        dtype: of the pictures.

    Attributes:
        choice: name of the implementation of ``resize``.

    Raises:
        UnsupportedImplementation: naming the key of the configuration.
    """

    def __init__(
        self, facts: Facts, implementations: Mapping[str, str], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.choice, self._resize = select(implementations, "resize", RESIZE, OperationRequest(device, dtype))
        self._facts, self._device, self._dtype = facts, device, dtype

    def warm_up(self, pictures: int, shapes: Iterable[Shape]) -> None:
        """Prepare training batches of made-up ``pictures``, one of each shape: compiles what they need."""
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
        """A training batch: ``image`` (B, 3, H, W) in channels_last memory, blue first, less its mean and zero beyond
        the pictures, in place of ``pixels`` and ``decoded_size``.

        Args:
            tensors: of a reader's batch, on the device.
            shape: its key.
        """
        return self._prepared(tensors, tensors["transform"][:, 2] > 0, shape)

    def evaluation(self, tensors: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
        """An evaluation batch: ``image`` as in training, and ``original`` (B, 2) fp32, the heights and widths of the
        pictures before they are resized, px, in place of ``pixels`` and ``decoded_size``. Arguments as in training.
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
