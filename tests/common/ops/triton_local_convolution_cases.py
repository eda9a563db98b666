"""The Triton convolution of one input channel against sums over its taps in float64, whole and split into slabs; run
by tests/test_interpreted_kernels.py. Fresh memory holds NaN here."""

from __future__ import annotations

import contextlib
import itertools
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
from common.ops.local_convolution import triton as local_convolution_triton
from common.ops.operation import AUTO, OperationRequest

pytestmark = pytest.mark.usefixtures("bfloat16_products", "poisoned_memory")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
CPU = torch.device("cpu")
SHAPES = [
    (1, 5, 6, 7, 32),  # voxels are no multiple of a tile's
    (2, 8, 8, 8, 16),  # and are
    (3, 1, 2, 1, 24),  # taps that lie outside on both sides
    (1, 3, 5, 4, 80),  # more filters than a program's
    (2, 4, 6, 3, 3),  # fewer than the matrix units take
]
"""N, D, H, W, C out."""


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles on a device of several multiprocessors, so that a program has many tiles."""
    monkeypatch.setattr(local_convolution_triton, "multiprocessors", lambda device: 3)
    for name, tile in local_convolution_triton.TILES.items():
        monkeypatch.setitem(local_convolution_triton.TILES, name, tile._replace(voxels=32, programs=1))


def case(shape: tuple[int, ...], stride: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Image, weight and gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    samples, *volume, filters = shape
    x = torch.randn(samples, 1, *volume, generator=generator)
    weight = torch.randn(filters, 1, 3, 3, 3, generator=generator)
    dy = torch.randn(samples, filters, *((size - 1) // stride + 1 for size in volume), generator=generator)
    return x.to(dtype), weight.to(dtype), dy.to(dtype)


def exact(x: Tensor, weight: Tensor, dy: Tensor, stride: int) -> dict[str, Tensor]:
    """``y[o] = sum of W[k] x[s o + k - 1]`` and its gradients, tap by tap in float64."""
    x, weight, dy = x.double(), weight.double(), dy.double()
    padded, y, dweight = F.pad(x, (1,) * 6), torch.zeros_like(dy), torch.zeros_like(weight)
    dx = torch.zeros_like(padded)
    for tap in itertools.product(range(3), repeat=3):
        seen = tuple(
            slice(first, first + stride * (size - 1) + 1, stride) for first, size in zip(tap, dy.shape[2:], strict=True)
        )
        of_tap = weight[:, 0, *tap].view(1, -1, 1, 1, 1)
        y += of_tap * padded[:, :, *seen]
        dweight[:, 0, *tap] = (dy * padded[:, :, *seen]).sum((0, 2, 3, 4))
        dx[:, :, *seen] += (of_tap * dy).sum(1, keepdim=True)
    return {"y": y, "dx": dx[:, :, 1:-1, 1:-1, 1:-1], "dweight": dweight}


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, name: str) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


def built(weight: Tensor, stride: int, exchange: Any = None) -> SpatialConv3d:
    layer = SpatialConv3d(1, len(weight), stride, exchange=exchange, implementation="triton", dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_result_and_gradients_equal_the_sums_over_taps(shape: tuple[int, ...], stride: int) -> None:
    x, weight, dy = case(shape, stride)
    layer = built(weight, stride)
    y = layer(x.requires_grad_())
    y.backward(dy)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    found = {"y": y.detach(), "dx": x.grad, "dweight": layer.weight.grad}
    for name, expected in exact(x.detach(), weight, dy, stride).items():
        assert_close(found[name], expected, torch.float32, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_up_in_fp32(dtype: torch.dtype) -> None:
    x, weight, dy = case((2, 5, 6, 7, 32), 1, dtype)
    layer = built(weight, 1)
    y = layer(x)
    y.backward(dy.contiguous(memory_format=torch.channels_last_3d))
    expected = exact(x, weight, dy, 1)
    assert y.dtype == layer.weight.grad.dtype == dtype
    assert_close(y.detach(), expected["y"], dtype, "y")
    assert_close(layer.weight.grad, expected["dweight"], dtype, "dweight")


def test_voxels_beyond_the_volume_add_nothing() -> None:
    """The last tile is not full. A missing voxel would see the last one, and even 0 times infinity would count."""
    x, weight, dy = case((1, 3, 3, 5, 16), 1)
    x[0, 0, 2, 2, 4] = torch.inf
    _, dweight = LOCAL_CONVOLUTION.function("triton")().backward(dy, x, weight, 1, (False, True))
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
    x, weight, dy = case((2, 6, 4, 5, 16), 1)
    parts, dweight = [], torch.zeros_like(weight)
    for first in (0, 2, 4):
        low = x[:, :, first - 1] if first else None
        high = x[:, :, first + 2] if first < 4 else None
        layer = built(weight, 1, Neighbours(low, high, overlap))
        y = layer(x[:, :, first : first + 2])
        y.backward(dy[:, :, first : first + 2])
        parts.append(y.detach())
        dweight += layer.weight.grad
    expected = exact(x, weight, dy, 1)
    assert_close(torch.cat(parts, 2), expected["y"], torch.float32, "y")
    assert_close(dweight, expected["dweight"], torch.float32, "dweight")


def test_auto_takes_the_kernels_for_one_channel_alone() -> None:
    chosen = [
        LOCAL_CONVOLUTION.select(AUTO, OperationRequest(CPU, torch.float32, {"channels": channels}))
        for channels in (1, 2)
    ]
    assert [implementation.name for implementation in chosen] == ["triton", "reference"]
    with pytest.raises(UnsupportedImplementation, match="1 input channel, not 32"):
        LOCAL_CONVOLUTION.select("triton", OperationRequest(CPU, torch.float32, {"channels": 32}))
