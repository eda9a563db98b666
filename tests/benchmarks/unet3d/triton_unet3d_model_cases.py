"""The network out of our kernels against the reference in float64; run by
tests/test_interpreted_kernels.py. Tiles are large here: the interpreter's time goes by their number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.unet3d.model import OPERATIONS, UNet3D, UNet3DArchitecture
from benchmarks.unet3d.ops.instance_norm import triton as instance_norm_triton
from benchmarks.unet3d.ops.output_convolution import triton as output_convolution_triton
from benchmarks.unet3d.ops.upsample import triton as upsample_triton
from common.ops.local_convolution import triton as local_convolution_triton

REFERENCES = dict.fromkeys(OPERATIONS, "reference")
SHAPE = (1, 1, 64, 32, 32)


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (instance_norm_triton.TILES, upsample_triton.BACKWARD_TILES):
        for name, tile in table.items():
            monkeypatch.setitem(table, name, tile.replace(elements=1 << 18))
    for table in (local_convolution_triton.TILES, output_convolution_triton.TILES):
        for name, tile in table.items():
            monkeypatch.setitem(table, name, tile.replace(voxels=8192))
    products = upsample_triton.FORWARD_TILES
    monkeypatch.setitem(products, "forward", products["forward"].replace(rows=1024))


def logits_and_gradients(
    implementations: dict[str, str], dtype: torch.dtype
) -> tuple[dict[str, str], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    architecture = UNet3DArchitecture(classes=3, filters=(3, 4, 5, 6, 7), norm_epsilon=1e-5)
    model = UNet3D(architecture, generator, implementations=implementations, dtype=dtype)
    image, gradient = (torch.randn(1, size, *SHAPE[2:], generator=generator).to(dtype) for size in (1, 3))
    logits = model(image)
    logits.backward(gradient)
    found = {"logits": logits.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return model.chosen(), found


def test_logits_and_gradients_are_close_to_the_reference():
    chosen, found = logits_and_gradients({}, torch.float32)
    assert chosen == {
        "instance_norm": "triton",
        "upsample": "triton",
        "convolution": "reference+triton",
        "output_convolution": "triton",
        "halo": "none",
    }
    _, expected = logits_and_gradients(REFERENCES, torch.float64)
    for name, reference in expected.items():
        error = float((found[name].double() - reference).norm() / reference.norm())
        assert error < 1e-3, f"{name}: relative error {error:.2e}"
