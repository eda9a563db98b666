"""Sizes of pictures after resizing, padded shapes of their batches, and the network's input, computed on the device.

Legend: P pictures, B pictures of a batch, H W padded height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.ops.resize import RESIZE
from common.errors import DataError
from common.ops.operation import OperationRequest, select

Shape = tuple[int, int]
"""Height and width, px."""


def resized_size(height: int, width: int, min_size: int, max_size: int) -> Shape:
    """Return height and width, px, of a picture after resizing, as in the reference (``Resize.get_size``).

    The shorter side becomes ``min_size``. If the longer side would then exceed ``max_size``, the shorter side becomes
    the rounded value for which the longer one is ``max_size``. The longer side follows and is rounded down; because of
    the rounding of the shorter side, it can exceed ``max_size`` by up to half the ratio of the sides.

    Args:
        height, width: size of the published picture, px.
    """
    short, long = min(height, width), max(height, width)
    size = min_size
    if long / short * size > max_size:
        size = round(max_size * short / long)
    other = int(size * long / short)
    return (other, size) if width < height else (size, other)


def resized_sizes(size_P2: NDArray[np.int64], min_size: int, max_size: int) -> NDArray[np.int64]:
    """Return (P, 2) heights and widths after :func:`resized_size`, given those of the published pictures."""
    sizes, inverse = np.unique(size_P2, axis=0, return_inverse=True)
    resized = [resized_size(height, width, min_size, max_size) for height, width in sizes.tolist()]
    found: NDArray[np.int64] = np.array(resized, np.int64).reshape(-1, 2)[inverse.reshape(-1)]
    return found


def orientation(size_P2: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (P,) 0 for pictures that are wider than high, and 1 for the others, from published sizes."""
    return (size_P2[:, 0] >= size_P2[:, 1]).astype(np.int64)


class PaddedShapes:
    """Padded shapes of batches. A batch gets the smallest shape that fits all its pictures.

    Args:
        shapes: available heights and widths.
        resized_P2: heights and widths of all pictures after resizing.
        describe: returns the name of the picture with the given index, for messages.

    Raises:
        DataError: a picture fits none of the shapes.
    """

    def __init__(self, shapes: Sequence[Shape], resized_P2: NDArray[np.int64], describe: Callable[[int], str]) -> None:
        self._shapes = sorted(shapes, key=lambda shape: shape[0] * shape[1])
        self._resized_P2 = resized_P2
        self._listed = f"none of reader.shapes={[list(shape) for shape in shapes]}: add a shape"
        fits_P = np.zeros(len(resized_P2), bool)
        for shape in self._shapes:
            fits_P |= np.all(resized_P2 <= shape, axis=1)
        if not fits_P.all():
            index = int(np.argmin(fits_P))
            height, width = resized_P2[index].tolist()
            raise DataError(
                f"{describe(index)} is resized to a height of {height} px and a width of {width} px, which fit "
                f"{self._listed}"
            )

    def require_common(self, group_P: NDArray[np.int64]) -> None:
        """Check that a common shape fits all pictures of a group, because any of them can be in one batch.

        Raises:
            DataError: the message names the largest sides.
        """
        for group in np.unique(group_P):
            height, width = self._resized_P2[group_P == group].max(0).tolist()
            if self._smallest(height, width) is None:
                raise DataError(
                    f"a batch of pictures can be {height} px high and {width} px wide, which fit {self._listed}"
                )

    def of(self, indices: Sequence[int]) -> Shape:
        """Return the shape of a batch of the pictures with these indices; the first of shapes with equal area."""
        height, width = self._resized_P2[np.asarray(indices)].max(0).tolist()
        shape = self._smallest(height, width)
        assert shape is not None, "the shapes were not checked for such batches"
        return shape

    def _smallest(self, height: int, width: int) -> Shape | None:
        return next((shape for shape in self._shapes if height <= shape[0] and width <= shape[1]), None)


class Preparer:
    """Resizes, mirrors, normalises and pads. Nothing waits for the device, so that a CUDA graph can include it.

    Args:
        facts: mean of the pictures and side of their slots.

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
        example_batch = {
            "pixels": torch.zeros((pictures, side, side, 3), dtype=torch.uint8, device=self._device),
            "decoded_size": torch.ones((pictures, 2), dtype=torch.int32, device=self._device),
            "size": torch.ones((pictures, 2), device=self._device),
            "transform": torch.zeros((pictures, 4), device=self._device),
        }
        for shape in shapes:
            self(example_batch, shape)

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
