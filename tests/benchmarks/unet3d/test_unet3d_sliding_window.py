"""Test crop, padding, windows and importance against the rules' numbers and a direct computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.unet3d.sliding_window import Axis, SlidingWindow, cover
from common.errors import ConfigError, DataError
from tests.benchmarks.unet3d import evaluation_oracle as oracle

BENCHMARK = SlidingWindow((128, 128, 128), 0.5, -2.2)
SMALL = SlidingWindow((16, 16, 16), 0.5, oracle.PADDING_VALUE)
WINDOWS = {128: 1, 130: 1, 159: 1, 160: 2, 191: 2, 192: 2, 200: 2, 223: 2, 224: 3}


@pytest.mark.parametrize("size", WINDOWS)
def test_number_of_windows(size):
    assert len(cover(size, 128, 64).starts) == WINDOWS[size]


@pytest.mark.parametrize(
    ("size", "axis"),
    [
        (128, Axis(low=0, kept=128, padding=0, padded=128, starts=(0,))),
        (133, Axis(low=2, kept=128, padding=0, padded=128, starts=(0,))),  # 2 and 3 of the 5 are cropped
        (159, Axis(low=15, kept=128, padding=0, padded=128, starts=(0,))),
        (160, Axis(low=0, kept=160, padding=16, padded=192, starts=(0, 64))),
        (191, Axis(low=0, kept=191, padding=0, padded=192, starts=(0, 64))),  # the one voxel is added at the end
        (250, Axis(low=0, kept=250, padding=3, padded=256, starts=(0, 64, 128))),
        (100, Axis(low=0, kept=100, padding=14, padded=128, starts=(0,))),
        (70, Axis(low=3, kept=64, padding=32, padded=128, starts=(0,))),  # shorter than a window after the crop
    ],
)
def test_crop_and_padding_of_axes(size, axis):
    assert cover(size, 128, 64) == axis


def test_an_axis_that_is_cropped_completely_is_an_error():
    with pytest.raises(DataError, match="31 voxels is too short for windows of 128"):
        cover(31, 128, 64)


@pytest.mark.parametrize(("overlap", "stride"), [(0.0, 128), (0.5, 64), (0.75, 32), (0.875, 16)])
def test_windows_cover_the_padded_axis_for_every_overlap(overlap, stride):
    window = SlidingWindow((128, 128, 128), overlap, 0.0)
    assert window.strides == (stride,) * 3
    for size in range(128, 400):
        axis = cover(size, 128, stride)
        assert axis.starts[0] == 0
        assert axis.starts[-1] + 128 == axis.padded
        assert {b - a for a, b in zip(axis.starts, axis.starts[1:], strict=False)} <= {stride}


@pytest.mark.parametrize("overlap", [0.3, 0.25, 0.999])
def test_a_stride_that_does_not_divide_the_window_is_an_error(overlap):
    with pytest.raises(ConfigError, match=f"overlap={overlap}: windows of 128 voxels"):
        SlidingWindow((128, 128, 128), overlap, 0.0)


def importance_map(window: SlidingWindow) -> torch.Tensor:
    d, h, w = window.importance()
    assert d.dtype == torch.float32
    return d[:, None, None] * h[:, None] * w


def test_importance_is_1_at_the_centre_and_falls_to_the_corners():
    weight = importance_map(BENCHMARK)
    assert weight.shape == (128, 128, 128)
    assert weight.max() == weight[63, 63, 63] == weight[64, 64, 64] == weight[63, 64, 63] == 1
    corner = math.exp(-(63.5**2 - 0.5**2) / 512)
    assert corner == pytest.approx(3.8e-4, rel=0.01)
    assert weight[0, 0, 0].item() == pytest.approx(corner, rel=1e-5)
    assert weight[127, 0, 127].item() == pytest.approx(corner, rel=1e-5)


def test_importance_is_the_cube_root_of_the_outer_product():
    np.testing.assert_allclose(importance_map(SMALL).numpy(), oracle.importance(), rtol=1e-6)


def test_the_direct_computation_of_these_tests_equals_monais_with_our_importance_map():
    """MONAI's map lacks the cube root; it does not crop or pad to a multiple, which this size does not need."""
    inferers = pytest.importorskip("monai.inferers")
    image, _ = oracle.volume((24, 32, 16), seed=2)
    network = oracle.Pattern().eval()
    weight = torch.from_numpy(oracle.importance())
    with torch.no_grad():
        expected = inferers.sliding_window_inference(
            torch.from_numpy(image).double()[None, None], (16, 16, 16), 3, network, overlap=0.5, roi_weight_map=weight
        )
    found, _ = oracle.average_logits(image, network)
    np.testing.assert_allclose(found, expected[0].numpy(), rtol=0, atol=1e-9)
