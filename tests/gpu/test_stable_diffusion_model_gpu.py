"""Test the U-Net at its real size on a GPU: against its definition and diffusers, and in half precision."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from benchmarks.stable_diffusion.config import Facts
from benchmarks.stable_diffusion.model import UNet
from common.mlperf.fixed import fixed_facts
from tests.benchmarks.stable_diffusion.public_names import to_published
from tests.benchmarks.stable_diffusion.small_unet import inputs, velocity

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Turn off TF32, and free the memory after each test."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    gc.collect()
    torch.cuda.empty_cache()


def real(dtype: torch.dtype) -> UNet:
    generator = torch.Generator(CUDA).manual_seed(0)
    return UNet(fixed_facts(Facts, "stable_diffusion"), generator=generator, device=CUDA, dtype=dtype, zero_std=0.02)


def batch(model: UNet, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [tensor.to(CUDA) for tensor in inputs(count, dtype, model.architecture)]


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def test_the_real_size_in_fp32_is_the_definition_with_all_gradients():
    model = real(torch.float32)
    x, t, context = batch(model, 1, torch.float32)
    published = to_published({name: p.detach() for name, p in model.named_parameters()}, model.architecture)
    state = {name: tensor.clone().requires_grad_() for name, tensor in published.items()}
    with torch.device(CUDA):  # where the definition makes its frequencies
        wanted = velocity(x, t, context, state, model.architecture)
    wanted.square().mean().backward()
    found = model(x, t, context)
    found.square().mean().backward()
    assert distance(found.detach(), wanted.detach()) < 1e-4
    ours = to_published({name: p.grad for name, p in model.named_parameters()}, model.architecture)
    far = {name: distance(ours[name], tensor.grad) for name, tensor in state.items()}
    assert max(far.values()) < 2e-3, max(far, key=lambda name: far[name])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.01), (torch.bfloat16, 0.06)])
def test_half_precision_stays_near_fp32(dtype, tolerance):
    model = real(dtype)
    shape = model.architecture
    wide = UNet(shape, device=CUDA, dtype=torch.float32)
    wide.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    x, t, context = batch(model, 2, dtype)
    found, wanted = model(x, t, context), wide(x.float(), t, context.float())
    assert distance(found.detach(), wanted.detach()) < tolerance
    scale = 1024.0
    (found.float().square().mean() * scale).backward()
    (wanted.square().mean() * scale).backward()
    ours = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    theirs = torch.cat([p.grad.flatten() for p in wide.parameters()])
    assert torch.isfinite(ours).all()
    assert distance(ours, theirs) < 3 * tolerance
