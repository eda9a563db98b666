"""The Triton kernel of the augmentation against the reference; run by
tests/test_interpreted_kernels.py."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from benchmarks.unet3d.crop import Crop, Draws, Slab
from benchmarks.unet3d.ops.augment import AUGMENT
from benchmarks.unet3d.ops.augment.reference import parameters

SHAPE, SIZE = (19, 25, 31), (8, 13, 11)
VOXELS = 19 * 25 * 31
SLABS = [Slab(SIZE, 0, 8), Slab(SIZE, 2, 2)]
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]


def made(name: str, volumes: Tensor, labels: Tensor, crops: list[Crop], slab: Slab, dtype: torch.dtype):
    given = parameters(crops, slab)
    return AUGMENT.function(name)(volumes, labels, *given.values(), slab, dtype)


@pytest.mark.parametrize("slab", SLABS, ids=str)
@pytest.mark.parametrize(("cached", "dtype"), DTYPES, ids=str)
def test_kernel(slab: Slab, cached: torch.dtype, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    volumes = torch.randn(2 * VOXELS, generator=generator).to(cached)
    labels = torch.randint(3, (2 * VOXELS,), generator=generator).byte()
    crops = [
        Crop(
            VOXELS * (number % 2), SHAPE, (number, 11 - number, 2 * number), Draws(flips, 1 + 0.1 * number, noise, seed)
        )
        for number, (flips, noise, seed) in enumerate(
            zip(product((False, True), repeat=3), [0.0, 0.1] * 4, [0, 1, 2**63 - 1, 5, 1 << 40, 3, 8, 9], strict=True)
        )
    ]
    image, label = made("triton", volumes, labels, crops, slab, dtype)
    expected, expected_label = made("reference", volumes, labels, crops, slab, dtype)
    assert image.dtype == dtype
    assert image.stride() == expected.stride()
    assert torch.equal(label, expected_label)
    rounding = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(image.float(), expected.float(), rtol=rounding, atol=2e-6)
    if dtype == torch.float32:
        assert torch.equal(image[0], expected[0])  # no brightness, no noise: nothing to round
