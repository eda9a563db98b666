"""Packed planes and the symmetries of the board."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.minigo.features import PADDED_PLANES, PLANES, FeatureBits, feature_bytes, symmetry_tables
from tests.benchmarks.minigo.sizes import packed, random_planes


@pytest.mark.parametrize(("board", "expected"), [(19, 587), (9, 132), (5, 41)])
def test_a_position_has_as_many_bytes_as_its_planes_need(board, expected):
    assert feature_bytes(board) == expected == packed(random_planes(1, board)).shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planes_are_the_packed_ones_and_the_padding_is_zero(dtype):
    planes = random_planes(3, 9)
    found = FeatureBits(9, "cpu").planes(packed(planes), dtype)
    assert found.shape == (3, PADDED_PLANES, 9, 9)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_array_equal(found[:, :PLANES].float().numpy(), planes)
    assert not found[:, PLANES:].any()


def test_symmetries_are_eight_different_ones_of_the_square():
    corners = {tuple(table.reshape(3, 3)[[0, 0, 2, 2], [0, 2, 0, 2]]) for table in symmetry_tables(3)}
    assert len(corners) == 8
    for corner in corners:
        assert set(corner) == {0, 2, 6, 8}
        assert corner[0] + corner[3] == 8


def test_symmetries_are_rotations_of_the_board_and_of_its_mirror_image():
    x = np.arange(25).reshape(5, 5)
    for symmetry, table in enumerate(symmetry_tables(5)):
        expected = np.rot90(x if symmetry < 4 else x[:, ::-1], symmetry % 4)
        np.testing.assert_array_equal(x.reshape(-1)[table].reshape(5, 5), expected)


def test_planes_and_distribution_are_transformed_together_and_pass_stays():
    symmetry = torch.arange(8, dtype=torch.uint8)
    stones = np.zeros((8, PLANES, 5, 5), np.uint8)
    stones[:, 4, 0, 1] = 1
    pi = torch.zeros(8, 26)
    pi[:, 1], pi[:, 25] = 0.75, 0.25
    features = FeatureBits(5, "cpu")
    seen = features.planes(packed(stones), torch.float32, symmetry)[:, 4].flatten(1)
    moved = features.apply(pi, symmetry)
    assert len({int(row.argmax()) for row in seen}) == 8
    torch.testing.assert_close(moved[:, :25], 0.75 * seen)
    assert torch.all(moved[:, 25] == 0.25)
