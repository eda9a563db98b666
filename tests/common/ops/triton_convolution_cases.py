"""Test properties of the Triton batch norm and of kernels around convolutions that cases cannot express.

tests/test_interpreted_kernels.py runs this file. Fresh memory holds NaN.
"""

from __future__ import annotations

import pytest
import torch

from common.ops.batch_norm.reference import BatchNormState, batch_norm_reference
from common.ops.batch_norm.triton import batch_norm
from common.ops.conv_bias_relu import cudnn

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")


def test_a_mean_far_from_zero_keeps_the_variance() -> None:
    random = torch.Generator().manual_seed(0)
    x = (2 * torch.randn((4, 8, 6, 6), generator=random) + 1e4).contiguous(memory_format=torch.channels_last)
    narrow, wide = (
        BatchNormState(*(torch.ones(8, dtype=dtype) for _ in range(4))) for dtype in (torch.float32, torch.float64)
    )
    y, expected = batch_norm(x, narrow), batch_norm_reference(x.double(), wide)
    torch.testing.assert_close(narrow.running_var.double(), wide.running_var, rtol=1e-5, atol=0)
    assert (y - expected).norm() < 2e-3 * expected.norm()


def test_what_is_not_needed_is_not_computed() -> None:
    dy, y = (torch.ones(2, 24, 5, 7).contiguous(memory_format=torch.channels_last) for _ in range(2))
    assert cudnn.masked(dy, None, False)[0] is dy
    assert cudnn.masked(dy, None, True)[0] is dy
    assert cudnn.masked(dy, y, False)[1] is None


def test_not_a_number_stays_one_and_passes_no_gradient() -> None:
    dy, broken = (torch.ones(2, 24, 5, 7).contiguous(memory_format=torch.channels_last) for _ in range(2))
    broken[0, 0, 0, 0] = torch.nan
    y = cudnn.epilogue_(torch.zeros_like(broken), torch.zeros(24), broken, True)
    assert torch.equal(y.isnan(), broken.isnan())
    assert cudnn.masked(dy, y, False)[0][0, 0, 0, 0] == 0


def test_no_pictures() -> None:
    empty = torch.empty(0, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    assert cudnn.epilogue_(empty, torch.zeros(8), None, True).shape == empty.shape
