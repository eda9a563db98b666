"""Test DeepCAM on a GPU: the network against float64, the memory format of activations, and a captured evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.deepcam.config import Facts
from benchmarks.deepcam.evaluate import evaluation_of
from benchmarks.deepcam.model import OPERATIONS, DeepLab
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation
from common.mlperf.fixed import fixed_facts
from common.nn.batch_norm import BatchNorm2d
from tests.gpu.support import OnDevice, eager_and_captured_scores, relative_error

pytestmark = pytest.mark.gpu

NARROW = fixed_facts(
    Facts,
    "deepcam",
    image_size=[96, 128],
    stem=[16, 32],
    entry=[32, 48, 64],
    middle_blocks=2,
    exit=[64, 96, 96, 128],
    decoder=32,
    low_level=16,
)
SAMPLES = 4


def build(device: str, dtype: torch.dtype) -> DeepLab:
    network = DeepLab(NARROW, generator=torch.Generator().manual_seed(1)).cast(dtype).to(device)
    network.choose_implementations({}, dtype)
    return network


def images(device: str, dtype: torch.dtype) -> Tensor:
    x_NHWC = torch.randn(SAMPLES, 96, 128, 16, generator=torch.Generator().manual_seed(2))
    return x_NHWC.to(device, dtype).movedim(-1, 1)


def test_activations_and_their_gradients_keep_channels_last() -> None:
    network = build("cuda", torch.bfloat16)
    found: dict[str, Tensor] = {}

    def note(name: str, y: Tensor) -> None:
        found[name] = y
        y.register_hook(lambda dy: found.update({f"gradient of {name}": dy}))

    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) and name != "aspp.pooled":  # one pixel has any format
            module.register_forward_hook(lambda _module, _inputs, y, name=name: note(name, y))
    network(images("cuda", torch.bfloat16)).square().sum().backward()
    assert len(found) > 100
    for name, tensor in found.items():
        assert tensor.is_contiguous(memory_format=torch.channels_last), name


def test_every_operation_has_a_kernel_by_default() -> None:
    network = DeepLab(NARROW).cuda()
    assert network.choose_implementations({}, torch.bfloat16) == dict.fromkeys(OPERATIONS, "triton")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 0.2)], ids=str)
def test_logits_follow_float64(dtype: torch.dtype, tolerance: float) -> None:
    expected = build("cpu", torch.float64)(images("cpu", torch.float64)).detach()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = build("cuda", dtype)(images("cuda", dtype)).detach().double().cpu()
    assert relative_error(found, expected) < tolerance


def test_gradients_and_statistics_follow_float64() -> None:
    found: dict[str, dict[str, Tensor]] = {}
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        network = build(device, dtype)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            network(images(device, dtype)).square().sum().backward()
        gradients = {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}
        assert len(gradients) == len(list(network.parameters()))
        found[device] = {**gradients, **dict(network.named_buffers())}
    for name, expected in found["cpu"].items():
        assert relative_error(found["cuda"][name].double().cpu(), expected) < 3e-2, name


def test_a_captured_evaluation_gives_what_an_eager_one_does() -> None:
    """The last image of the second batch is padding."""
    generator, batches = torch.Generator().manual_seed(3), []
    for number in range(2):
        weight = torch.ones(SAMPLES)
        weight[SAMPLES - number :] = 0
        batches.append(
            {
                "x": torch.randn(SAMPLES, 96, 128, 16, generator=generator),
                "y": torch.randint(3, (SAMPLES, 96, 128), generator=generator, dtype=torch.uint8),
                "shift": torch.zeros(16),
                "scale": torch.ones(16),
                "weight": weight,
            }
        )
    source = OnDevice(batches, 2 * SAMPLES - 1)

    def made(example: dict[str, Tensor], capture: bool) -> tuple[CountedEvaluation, DeepLab]:
        network = build("cuda", torch.float32)
        for norm in network.modules():
            if isinstance(norm, BatchNorm2d):  # without statistics of its own, every pixel would have one class
                norm.momentum = 1.0
        network(example["x"].movedim(-1, 1))
        layout = Layout(device="cuda")
        return evaluation_of(network, torch.float32, example, lambda _: source, layout, capture), network

    eager, captured = eager_and_captured_scores(source, made)
    assert eager["eval_samples"] == captured["eval_samples"] == 7
    assert captured["mean_iou"] == pytest.approx(eager["mean_iou"], rel=1e-6)
