"""Test CosmoFlow on a GPU: the network against float64, the memory format of its volumes, and a captured evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.cosmoflow.evaluate import evaluation_of
from benchmarks.cosmoflow.model import ConvPool, CosmoFlow, CosmoFlowArchitecture, FirstConvPool
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation
from tests.gpu.support import OnDevice, eager_and_captured_scores, relative_error

pytestmark = pytest.mark.gpu

ARCHITECTURE = CosmoFlowArchitecture(size=32, filters=(32, 64, 128), hidden=(128, 64), slope=0.3, output_scale=1.2)
SAMPLES = 4


def build(device: str, dtype: torch.dtype) -> CosmoFlow:
    return CosmoFlow(ARCHITECTURE, generator=torch.Generator().manual_seed(1), device=device, dtype=dtype)


def counts(seed: int = 2) -> Tensor:
    shape = (SAMPLES, *[ARCHITECTURE.size] * 3, 4)
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int16)


def test_volumes_and_their_gradients_keep_channels_last() -> None:
    model = build("cuda", torch.bfloat16)
    found: dict[str, Tensor] = {}

    def note(name: str, x: Tensor, y: Tensor) -> None:
        found[f"input of {name}"], found[name] = x, y
        y.register_hook(lambda dy: found.update({f"gradient of {name}": dy}))

    for name, module in model.named_modules():
        if isinstance(module, ConvPool | FirstConvPool):
            module.register_forward_hook(lambda _module, inputs, y, name=name: note(name, inputs[0], y))
    model(counts().cuda()).square().sum().backward()
    assert len(found) == 3 * len(ARCHITECTURE.filters)
    for name, tensor in found.items():
        assert tensor.is_contiguous(memory_format=torch.channels_last_3d), name


def test_every_operation_has_a_kernel_by_default() -> None:
    assert set(build("cuda", torch.bfloat16).chosen().values()) == {"triton"}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 5e-2)], ids=str)
def test_estimates_follow_float64(dtype: torch.dtype, tolerance: float) -> None:
    expected = build("cpu", torch.float64)(counts()).detach()
    found = build("cuda", dtype)(counts().cuda()).detach().double().cpu()
    assert relative_error(found, expected) < tolerance


def test_gradients_follow_float64() -> None:
    found: dict[str, dict[str, Tensor]] = {}
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        model = build(device, dtype)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            model(counts().to(device)).square().sum().backward()
        found[device] = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert len(found["cuda"]) == len(list(model.parameters()))
    for name, expected in found["cpu"].items():
        assert relative_error(found["cuda"][name].double().cpu(), expected) < 1e-2, name


def test_a_captured_evaluation_gives_what_an_eager_one_does() -> None:
    """The last cube of the second batch is padding."""
    generator, batches = torch.Generator().manual_seed(3), []
    for number in range(2):
        weight = torch.ones(SAMPLES)
        weight[SAMPLES - number :] = 0
        batches.append({"x": counts(number), "y": torch.rand(SAMPLES, 4, generator=generator), "weight": weight})
    source = OnDevice(batches, 2 * SAMPLES - 1)

    def made(example: dict[str, Tensor], capture: bool) -> tuple[CountedEvaluation, CosmoFlow]:
        model = build("cuda", torch.float32)
        return evaluation_of(model, example, lambda _: source, Layout(device="cuda"), capture), model

    eager, captured = eager_and_captured_scores(source, made)
    assert eager["eval_samples"] == captured["eval_samples"] == 7
    assert captured["mean_absolute_error"] == pytest.approx(eager["mean_absolute_error"], rel=1e-6)
