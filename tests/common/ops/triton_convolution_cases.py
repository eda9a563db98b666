"""Test kernels around convolutions: batch norm, epilogues, sums of upsampling weights, and one input channel.

Cases of the operations cannot express these properties. tests/test_interpreted_kernels.py runs this file. Fresh memory
holds NaN.
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
from common.ops.batch_norm.reference import BatchNormState, batch_norm_reference
from common.ops.batch_norm.triton import batch_norm
from common.ops.conv_bias_relu import cudnn as epilogue
from common.ops.local_convolution import LOCAL_CONVOLUTION
from common.ops.operation import AUTO, OperationRequest
from common.ops.upsample_convolution import summed_taps
from common.ops.upsample_convolution import triton as upsampling
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

# Batch norm and epilogues


def test_a_mean_far_from_zero_keeps_the_variance():
    random = torch.Generator().manual_seed(0)
    x = (2 * torch.randn((4, 8, 6, 6), generator=random) + 1e4).contiguous(memory_format=torch.channels_last)
    narrow, wide = (
        BatchNormState(*(torch.ones(8, dtype=dtype) for _ in range(4))) for dtype in (torch.float32, torch.float64)
    )
    y, expected = batch_norm(x, narrow), batch_norm_reference(x.double(), wide)
    torch.testing.assert_close(narrow.running_var.double(), wide.running_var, rtol=1e-5, atol=0)
    assert (y - expected).norm() < 2e-3 * expected.norm()


def test_what_is_not_needed_is_not_computed():
    dy, y = (torch.ones(2, 24, 5, 7).contiguous(memory_format=torch.channels_last) for _ in range(2))
    assert epilogue.masked(dy, None, False)[0] is dy
    assert epilogue.masked(dy, None, True)[0] is dy
    assert epilogue.masked(dy, y, False)[1] is None


def test_not_a_number_stays_one_and_passes_no_gradient():
    dy, broken = (torch.ones(2, 24, 5, 7).contiguous(memory_format=torch.channels_last) for _ in range(2))
    broken[0, 0, 0, 0] = torch.nan
    y = epilogue.epilogue_(torch.zeros_like(broken), torch.zeros(24), broken, True)
    assert torch.equal(y.isnan(), broken.isnan())
    assert epilogue.masked(dy, y, False)[0][0, 0, 0, 0] == 0


def test_no_pictures():
    empty = torch.empty(0, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    assert epilogue.epilogue_(empty, torch.zeros(8), None, True).shape == empty.shape


# Sums of the weights of an upsampling convolution


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_sums_and_their_gradient_are_the_references_to_the_bit(memory_format, dtype):
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 35, 3, 3, generator=random).to(dtype).to(memory_format=memory_format).requires_grad_()
    dtaps = torch.randn(35, 40, 4, 4, generator=random).to(dtype)  # strides differ from those of the taps
    found, plain = upsampling.summed_taps(weight), summed_taps(weight)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, plain)
    (gradient,), (reference,) = (torch.autograd.grad(taps, weight, dtaps) for taps in (found, plain))
    assert gradient.stride() == weight.stride()
    torch.testing.assert_close(gradient, reference, rtol=1e-6, atol=1e-6)


def test_both_directions_are_capturable():
    weight = torch.randn(3, 3, 3, 3).requires_grad_()
    with Capturable():
        torch.autograd.grad(upsampling.summed_taps(weight).sum(), weight)


# Convolutions of one input channel


CPU = torch.device("cpu")


def problem(samples: int, volume: tuple[int, int, int], filters: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return image, weight and gradient of the result."""
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


def test_a_layer_has_both_gradients():
    x, weight, dy = problem(2, (4, 6, 3), 3)
    layer = built(weight)
    y = layer(x.requires_grad_())
    y.backward(dy)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    for found, exact in zip((y.detach(), x.grad, layer.weight.grad), expected(x.detach(), weight, dy), strict=True):
        assert found is not None
        assert_close(found, exact)


def test_voxels_beyond_the_volume_add_nothing():
    """The last tile is not full. A missing voxel would see the last one, and even 0 times infinity would count."""
    x, weight, dy = problem(1, (3, 3, 5), 16)
    x[0, 0, 2, 2, 4] = torch.inf
    _, dweight = LOCAL_CONVOLUTION.function("triton").backward(dy, x, weight, 1, (False, True))
    finite = torch.ones(3, 3, 3, dtype=torch.bool)
    finite[1:, 1:, 1:] = False  # no voxel of the volume has the last one behind it
    assert dweight[:, 0, finite].isfinite().all()
    assert dweight[:, 0, ~finite].isinf().all()


class Neighbours:
    """An exchange whose halos are planes of the whole volume."""

    def __init__(self, low: Tensor | None, high: Tensor | None, overlap: bool) -> None:
        self._halos, self.overlap = Halos(low, high), overlap

    def start(self, planes: Tensor, **directions: bool) -> Neighbours:
        return self

    @contextlib.contextmanager
    def received(self) -> Iterator[Halos]:
        yield self._halos


@pytest.mark.parametrize("overlap", [True, False])
def test_slabs_of_a_first_layer_equal_the_whole(overlap):
    x, weight, dy = problem(2, (6, 4, 5), 16)
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


def test_auto_takes_the_kernels_for_one_channel_alone():
    chosen = [
        LOCAL_CONVOLUTION.select(AUTO, OperationRequest(CPU, torch.float32, {"channels": channels}))
        for channels in (1, 2)
    ]
    assert [implementation.name for implementation in chosen] == ["triton", "reference"]
    with pytest.raises(UnsupportedImplementation, match="1 input channel, not 32"):
        LOCAL_CONVOLUTION.select("triton", OperationRequest(CPU, torch.float32, {"channels": 32}))
