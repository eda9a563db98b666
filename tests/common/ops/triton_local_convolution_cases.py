"""Test the Triton convolution of one input channel as a layer, in slabs, with infinite voxels, and its selection.

Cases of the operation cannot express this. tests/test_interpreted_kernels.py runs this file. Fresh memory holds NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.distributed.spatial.convolution import SpatialConv3d
from common.distributed.spatial.halo import Halos
from common.errors import UnsupportedImplementation
from common.ops.local_convolution import LOCAL_CONVOLUTION
from common.ops.operation import AUTO, OperationRequest

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")


def case(samples: int, volume: tuple[int, int, int], filters: int) -> tuple[Tensor, Tensor, Tensor]:
    """Image, weight and gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((samples, 1, *volume), (filters, 1, 3, 3, 3), (samples, filters, *volume))
    x, weight, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, dy


def expected(x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """Return the result and the gradients of image and weight, in float64."""
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    y = F.conv3d(*leaves, padding=1)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found.double() - expected).norm() < 2e-6 * expected.norm()


def built(weight: Tensor, exchange: Any = None) -> SpatialConv3d:
    layer = SpatialConv3d(1, len(weight), 1, exchange=exchange, implementation="triton", dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def test_a_layer_has_both_gradients() -> None:
    x, weight, dy = case(2, (4, 6, 3), 3)
    layer = built(weight)
    y = layer(x.requires_grad_())
    y.backward(dy)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    for found, exact in zip((y.detach(), x.grad, layer.weight.grad), expected(x.detach(), weight, dy), strict=True):
        assert found is not None
        assert_close(found, exact)


def test_voxels_beyond_the_volume_add_nothing() -> None:
    """The last tile is not full. A missing voxel would see the last one, and even 0 times infinity would count."""
    x, weight, dy = case(1, (3, 3, 5), 16)
    x[0, 0, 2, 2, 4] = torch.inf
    _, dweight = LOCAL_CONVOLUTION.function("triton").backward(dy, x, weight, 1, (False, True))
    finite = torch.ones(3, 3, 3, dtype=torch.bool)
    finite[1:, 1:, 1:] = False  # no voxel of the volume has the last one behind it
    assert dweight[:, 0, finite].isfinite().all()
    assert dweight[:, 0, ~finite].isinf().all()


class Neighbours:
    """An exchange that hands out planes of the whole volume."""

    def __init__(self, low: Tensor | None, high: Tensor | None, overlap: bool) -> None:
        self._halos, self.overlap = Halos(low, high), overlap

    def start(self, planes: Tensor, **directions: bool) -> Neighbours:
        return self

    @contextlib.contextmanager
    def received(self) -> Iterator[Halos]:
        yield self._halos


@pytest.mark.parametrize("overlap", [True, False])
def test_slabs_of_a_first_layer_equal_the_whole(overlap: bool) -> None:
    x, weight, dy = case(2, (6, 4, 5), 16)
    parts, dweight = [], torch.zeros_like(weight)
    for first in (0, 2, 4):
        low = x[:, :, first - 1] if first else None
        high = x[:, :, first + 2] if first < 4 else None
        layer = built(weight, Neighbours(low, high, overlap))
        y = layer(x[:, :, first : first + 2])
        y.backward(dy[:, :, first : first + 2])
        parts.append(y.detach())
        dweight += layer.weight.grad
    y, _, expected_dweight = expected(x, weight, dy)
    assert_close(torch.cat(parts, 2), y)
    assert_close(dweight, expected_dweight)


def test_auto_takes_the_kernels_for_one_channel_alone() -> None:
    chosen = [
        LOCAL_CONVOLUTION.select(AUTO, OperationRequest(CPU, torch.float32, {"channels": channels}))
        for channels in (1, 2)
    ]
    assert [implementation.name for implementation in chosen] == ["triton", "reference"]
    with pytest.raises(UnsupportedImplementation, match="1 input channel, not 32"):
        LOCAL_CONVOLUTION.select("triton", OperationRequest(CPU, torch.float32, {"channels": 32}))
