"""Triton's class entropies and their gradients against float64; run by tests/test_interpreted_kernels.py. Fresh memory
holds NaN here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.ssd300.ops.class_entropy import triton as class_entropy_triton
from benchmarks.ssd300.ops.class_entropy.reference import class_entropy_reference
from benchmarks.ssd300.ops.head_results import HeadChannels

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def made_up(classes: int, dtype: torch.dtype, padding: int) -> tuple[list[HeadChannels], list[Tensor], Tensor]:
    """Results of two levels, of 3 x 2 and 1 x 1 cells, for three pictures, and classes; one row has large logits."""
    random = torch.Generator().manual_seed(classes)
    channels = [HeadChannels(3, classes), HeadChannels(2, classes)]
    results = []
    for head, (height, width) in zip(channels, ((3, 2), (1, 1)), strict=True):
        count = head.logits + head.offsets + padding
        results.append((3 * torch.randn((3, height, width, count), generator=random)).to(dtype).permute(0, 3, 1, 2))
    results[0][0, :classes, 0, 0] = torch.linspace(-300, 300, classes).to(dtype)
    return channels, results, torch.randint(classes, (3, 3 * 6 + 2), generator=random)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("classes", "padding"), [(81, 3), (4, 0), (16, 5)])
def test_entropies_offsets_and_gradients_are_the_formulas(classes: int, padding: int, dtype: torch.dtype) -> None:
    channels, results, classes_NA = made_up(classes, dtype, padding)
    mine = [y.clone().requires_grad_() for y in results]
    wide = [y.double().requires_grad_() for y in results]
    found, expected = (
        class_entropy_triton.class_entropy(channels, mine, classes_NA),
        class_entropy_reference(channels, wide, classes_NA),
    )
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1].double(), expected[1])
    random = torch.Generator().manual_seed(1)
    weights = torch.rand(found[0].shape, generator=random), torch.rand(found[1].shape, generator=random).to(dtype)
    gradients = torch.autograd.grad(found, mine, weights)
    wanted = torch.autograd.grad(expected, wide, [weight.double() for weight in weights])
    for gradient, reference, head in zip(gradients, wanted, channels, strict=True):
        assert gradient.dtype == dtype
        assert gradient.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(gradient.double(), reference, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] / 8)
        assert not gradient[:, head.logits + head.offsets :].any()


def test_results_may_lie_channels_first() -> None:
    channels, results, classes_NA = made_up(4, torch.float32, 0)
    found = class_entropy_triton.class_entropy(channels, [y.contiguous() for y in results], classes_NA)
    expected = class_entropy_triton.class_entropy(channels, results, classes_NA)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
