"""Pictures have the same values in every dtype that the network can have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.data.batches import Block
from common.distributed.layout import Layout
from tests.benchmarks.resnet.small_records import settings

BLOCK = Block(index=0, first_epoch=1, epochs=1, start_sample=0, samples=61)


def pictures(root: Path, dtype: torch.dtype) -> Tensor:
    """The first batch of ``root``, in ``dtype``."""
    source = settings(image_size=32, eval_resize=36, classes=10, dtype=dtype).open_train(root, Layout(), 8)
    try:
        return next(iter(source.batches(BLOCK))).tensors["image"]
    finally:
        source.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_pictures_are_the_float32_ones_rounded_to_the_dtype(dtype, digits):
    found = pictures(digits, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, pictures(digits, torch.float32).to(dtype))
