"""Mask R-CNN's network on one GPU: narrow dtypes follow float64, channels stay last, a graph equals an eager pass.

So does an update in which a group has a learning rate of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.model import MaskRCNN
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from common.nn.batch_norm import FrozenBatchNorm2d
from common.optim.groups import ParameterGroup
from common.optim.momentum import SGD
from common.optim.optimizer import Optimizer
from common.step.capture import capturing
from common.step.train_step import apply_gradients

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

FACTS = replace(
    fixed_facts(Facts, "maskrcnn"), classes=10, layers=(1, 2, 1, 1), pyramid_channels=64, box_channels=128,
    mask_convolutions=2,
)  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16)


def build(dtype: torch.dtype, implementation: str = "reference") -> MaskRCNN:
    """A network whose norms and heads are not those of a fresh one, with the same weights in every dtype."""
    generator = torch.Generator().manual_seed(0)
    network = MaskRCNN(FACTS, generator)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, FrozenBatchNorm2d):
                for buffer, low, high in zip(
                    module.buffers(), (0.5, -0.3, -0.3, 0.8), (1.0, 0.3, 0.3, 1.5), strict=True
                ):
                    buffer.uniform_(low, high, generator=generator)
        for name, parameter in network.named_parameters():
            if not name.startswith("backbone."):
                parameter.normal_(0.0, 0.05, generator=generator)
            parameter.copy_(parameter.half())
    network.cast(dtype).to("cuda")
    network.choose_implementations({"convolution": implementation, "selected_logits": "reference"})
    return network


def inputs(dtype: torch.dtype, regions: int = 24) -> list[Tensor]:
    """Pictures, and features of regions for both heads."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 3, 128, 192), (regions, 64, 7, 7), (regions, 64, 14, 14)]
    values = [torch.randn(shape, generator=generator).half() for shape in shapes]
    return [value.to("cuda", dtype, memory_format=torch.channels_last) for value in values]


def classes_of(masks: Tensor) -> Tensor:
    """Of each region, some without an object."""
    number = torch.arange(len(masks), device=masks.device)
    return torch.where(number % 4 == 3, -1, number % 3)


def results(network: MaskRCNN, image: Tensor, boxes: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """By name, in the dtype of the weights."""
    found = {}
    for number, output in enumerate(network.propose(network.pyramid(image)), 2):
        found |= {f"logits {number}": output.logits_NAHW, f"deltas {number}": output.deltas_NAHW}
    classes, deltas = network.box_head(boxes)
    return found | {"classes": classes, "boxes": deltas, "masks": network.mask_head(masks, classes_of(masks))}


def weighted_sum(found: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    total = torch.zeros((), device="cuda")
    for name, value in found.items():
        total = total + (value.to(torch.promote_types(value.dtype, torch.float32)) * weights[name]).sum()
    return total


def weights_like(found: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(value.shape, generator=generator).cuda() / 64 for name, value in found.items()}


def results_and_gradients(network: MaskRCNN, dtype: torch.dtype) -> dict[str, Tensor]:
    """By name, in float64."""
    found = results(network, *inputs(dtype))
    weighted_sum(found, weights_like(found)).backward()
    gradients = {f"gradient of {n}": p.grad for n, p in network.named_parameters() if p.grad is not None}
    return {name: value.detach().double() for name, value in {**found, **gradients}.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients_follow_float64(dtype: torch.dtype) -> None:
    expected = results_and_gradients(build(torch.float64), torch.float64)
    usual = results_and_gradients(build(dtype), dtype)
    found = results_and_gradients(build(dtype, "cudnn"), dtype)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        exact = expected[name]
        error, reference = ((v - exact).norm() / exact.norm() for v in (value, usual[name]))
        # rounding turns ReLUs over, in every implementation others
        assert error < max(1e-2, 2.5 * reference), f"{name}: {error:.1e}, not {reference:.1e}"


@pytest.mark.parametrize("implementation", ["reference", "auto"])
def test_what_goes_between_parts_keeps_channels_last(implementation: str) -> None:
    network = build(torch.bfloat16, implementation)
    image = inputs(torch.bfloat16)[0]
    levels = network.pyramid(image)
    outputs = [value for output in network.propose(levels) for value in output]
    for value in (*levels, *outputs):
        assert value.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("implementation", ["reference", "auto"])
def test_a_captured_pass_both_ways_waits_for_nothing_and_equals_an_eager_one(implementation: str) -> None:
    network, values = build(torch.bfloat16, implementation), inputs(torch.bfloat16)
    weights = weights_like(results(network, *values))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(weighted_sum(results(network, *values), weights), trained)

    with torch.cuda.stream(stream):
        gradients()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = [gradient.clone() for gradient in gradients()]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream):
            captured = gradients()
        graph.replay()
        stream.synchronize()
    for (name, _), found, expected in zip(
        [pair for pair in network.named_parameters() if pair[1].requires_grad], captured, eager, strict=True
    ):
        assert (found - expected).norm() <= 2e-2 * expected.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_groups_own_learning_rate_is_followed_by_the_kernels_in_a_graph(dtype: torch.dtype) -> None:
    def optimizer_of(implementation: str) -> tuple[Optimizer, list[torch.nn.Parameter]]:
        generator = torch.Generator().manual_seed(0)
        weight, bias = (
            torch.nn.Parameter(torch.randn(size, generator=generator).to("cuda", dtype)) for size in (10_001, 77)
        )
        groups = [
            ParameterGroup({"weight": weight}, 1e-4, learning_rate_in_momentum=False),
            ParameterGroup({"bias": bias}, schedule=lambda step: 0.5 - 0.125 * step, learning_rate_in_momentum=False),
        ]
        optimizer = Optimizer(
            groups, SGD(0.9), lambda step: 0.0625 * (step + 1.0), Layout(device=torch.device("cuda")),
            grad_divisor=1.0, implementation=implementation,
        )  # fmt: skip
        return optimizer, [weight, bias]

    skip = torch.zeros((), device="cuda")
    (ours, mine), (reference, others) = optimizer_of("triton"), optimizer_of("reference")

    def one(optimizer: Optimizer, parameters: list[torch.nn.Parameter]) -> None:
        optimizer.begin()
        for parameter in parameters:
            parameter.grad.fill_(0.25)
        optimizer.arm()
        apply_gradients([optimizer], skip)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one(ours, mine)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream):
            one(ours, mine)
        for _ in range(2):
            graph.replay()
        for _ in range(3):
            one(reference, others)
        stream.synchronize()
    for found, expected in zip(mine, others, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
