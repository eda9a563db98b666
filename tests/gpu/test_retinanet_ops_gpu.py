"""RetinaNet's loss and convolutions on a GPU: against float64, captured, repeatable, and without overflow of offsets in
large tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.retinanet.ops import focal_loss
from common.ops import conv_bias_relu
from common.ops.operation import AUTO, Choice, OperationRequest
from tests.benchmarks.retinanet.focal_loss_oracle import ALPHA, GAMMA, Level, by_torchvision, level
from tests.common.ops.conv_bias_relu_oracle import Case, Inputs, expected, inputs

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}
HALF = [torch.float16, torch.bfloat16]
CONVOLUTIONS = [
    Case(2, 256, 256, 25, 25, 3, 1, 1, 1),
    Case(4, 64, 256, 50, 49, 1, 1, 0, 1),
    Case(2, 256, 512, 50, 50, 1, 2, 0, 1),
    Case(2, 128, 128, 40, 41, 3, 1, 1, 32),
    Case(2, 256, 256, 28, 26, 3, 2, 1, 32),
    Case(2, 3, 64, 64, 62, 7, 2, 3, 1),
    Case(2, 256, 36, 13, 13, 3, 1, 1, 1),
    Case(1, 256, 256, 7, 7, 3, 1, 1, 1),
]


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << power,), float("nan"), device="cuda") for power in range(8)]
    del held


def assert_close(name: str, found: Tensor, formula: Tensor, tolerance: float) -> None:
    error = (found.double() - formula).norm() / formula.norm()
    assert error < tolerance, f"{name}: relative error {error:.2e}"


# Focal loss


def loss_of(case: Level, scale: Tensor) -> list[Tensor]:
    """Loss, and gradients of the scaled loss."""
    logits, bias = case.logits.detach().requires_grad_(), case.bias.detach().requires_grad_()
    poison()
    function = focal_loss.FOCAL_LOSS.function("triton")
    loss = function(logits, bias, case.classes, case.weight, ALPHA, GAMMA, scale)
    return [loss.detach(), *torch.autograd.grad(loss * scale, [logits, bias])]


@pytest.mark.parametrize(
    "size", [(2, 25, 25, 9, 264), (3, 13, 13, 9, 264), (1, 7, 7, 9, 264), (2, 9, 10, 9, 3), (2, 6, 5, 3, 20)], ids=str
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_loss_equals_float64(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    case = level(*size, dtype, device="cuda")
    found = loss_of(case, torch.tensor(64.0, device="cuda"))
    assert found[0].dtype == torch.float32
    assert found[1].is_contiguous(memory_format=torch.channels_last)
    for name, value, formula in zip(("loss", "logits", "bias"), found, by_torchvision(case, scale=64.0), strict=True):
        assert_close(name, value, formula, TOLERANCE[torch.float32 if name == "loss" else dtype])


def test_loss_of_the_finest_level_equals_float64() -> None:
    case = level(4, 100, 100, 9, 264, torch.float16, device="cuda")
    found = loss_of(case, torch.tensor(64.0, device="cuda"))
    for name, value, formula in zip(("loss", "logits", "bias"), found, by_torchvision(case, scale=64.0), strict=True):
        assert_close(name, value, formula, TOLERANCE[torch.float32 if name == "loss" else torch.float16])


def test_more_logits_than_int32_counts() -> None:
    pictures = 100
    shape = (pictures, 9 * 264, 100, 100)
    logits = torch.empty(shape, device="cuda", dtype=torch.float16, memory_format=torch.channels_last).normal_()
    assert logits.numel() > 1 << 31
    classes = torch.randint(-2, 264, (pictures, 120_087), device="cuda")[:, :90_000]
    weight = torch.rand(pictures, device="cuda") / pictures
    case = Level(logits, torch.full((9 * 264,), -3.0, device="cuda", dtype=torch.float16), classes, weight)
    scale = torch.tensor(4.0, device="cuda")
    _, d_logits, _ = loss_of(case, scale)
    for picture in (0, pictures - 1):
        own = slice(picture, picture + 1)
        alone = case._replace(logits=logits[own], classes=classes[own], weight=weight[own])
        assert torch.equal(d_logits[own], loss_of(alone, scale)[1])


def test_loss_is_captured_and_gives_the_same_bits_in_every_run() -> None:
    case = level(3, 25, 25, 9, 264, torch.float16, device="cuda")
    logits, bias = case.logits.requires_grad_(), case.bias.requires_grad_()
    scale = torch.tensor(256.0, device="cuda")
    function = focal_loss.FOCAL_LOSS.function("triton")

    def step() -> list[Tensor]:
        loss = function(logits, bias, case.classes, case.weight, ALPHA, GAMMA, scale)
        return [loss.detach(), *torch.autograd.grad(loss * scale, [logits, bias])]

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = step()
        for seed in range(2):
            with torch.no_grad():
                logits.copy_(level(3, 25, 25, 9, 264, torch.float16, spread=1.0 + seed, device="cuda").logits)
            scale.fill_(64.0 * (seed + 1))
            for tensor in captured:
                tensor.fill_(float("nan"))
            graph.replay()
            eager = step()
            torch.cuda.synchronize()
            for tensor, reference in zip(captured, eager, strict=True):
                assert reference.isfinite().all()
                assert torch.equal(tensor, reference)


# Convolutions


def implementation(name: str, case: Case, dtype: torch.dtype) -> Choice:
    """The one of this name, if it serves the convolution."""
    sizes = {
        "channels": case.channels_in,
        "filters": case.channels_out,
        "kernel": case.kernel,
        "stride": case.stride,
        "groups": case.groups,
    }
    return conv_bias_relu.CONV_BIAS_RELU.select(name, OperationRequest(torch.device("cuda"), dtype, sizes))


def run(name: str, case: Case, given: Inputs, relu: bool, added: bool, frozen_bias: bool) -> dict[str, Tensor]:
    """Result and gradients by name."""
    function = implementation(name, case, given.x.dtype).function
    leaves = {"x": given.x, "weight": given.weight}
    leaves |= {} if frozen_bias else {"bias": given.bias}
    leaves |= {"residual": given.residual} if added else {}
    leaves = {key: value.detach().requires_grad_() for key, value in leaves.items()}
    poison()
    y = function(
        leaves["x"], leaves["weight"], leaves.get("bias", given.bias), case.stride, case.padding, case.groups, relu,
        leaves.get("residual"),
    )  # fmt: skip
    poison()
    gradients = torch.autograd.grad(y, list(leaves.values()), given.dy)
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("name", conv_bias_relu.CONV_BIAS_RELU.names)
@pytest.mark.parametrize(
    ("relu", "added", "frozen_bias"),
    [(True, False, True), (True, True, True), (True, False, False), (False, False, False), (False, True, False)],
)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_convolutions_equal_float64(
    dtype: torch.dtype, case: Case, relu: bool, added: bool, frozen_bias: bool, name: str
) -> None:
    given = inputs(case, dtype, "cuda")
    found = run(name, case, given, relu, added, frozen_bias)
    assert found["y"].is_contiguous(memory_format=torch.channels_last)
    formulas = expected(case, given, relu, added, mask=found["y"] > 0)
    exact = dict(zip(("y", "x", "weight", "bias", "residual"), formulas, strict=False))
    for key, value in found.items():
        assert value.dtype == dtype
        assert_close(key, value, exact[key], TOLERANCE[dtype])


def test_cudnn_is_chosen_for_half_and_the_reference_for_the_rest() -> None:
    assert implementation(AUTO, CONVOLUTIONS[0], torch.float16).name == "cudnn"
    assert implementation(AUTO, CONVOLUTIONS[3], torch.bfloat16).name == "cudnn"
    assert implementation(AUTO, CONVOLUTIONS[0], torch.float32).name == "reference"


@pytest.mark.parametrize("name", conv_bias_relu.CONV_BIAS_RELU.names)
@pytest.mark.parametrize("case", [CONVOLUTIONS[0], CONVOLUTIONS[4]], ids=str)
def test_convolutions_are_captured(case: Case, name: str) -> None:
    given = inputs(case, torch.float16, "cuda")
    chosen = implementation(name, case, torch.float16).function
    leaves = [value.requires_grad_() for value in (given.x, given.weight, given.bias, given.residual)]

    def step() -> list[Tensor]:
        y = chosen(*leaves[:3], case.stride, case.padding, case.groups, True, leaves[3])
        return [y.detach(), *torch.autograd.grad(y, leaves, given.dy)]

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = step()
        with torch.no_grad():
            given.x.normal_()
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
    formulas = expected(case, given, True, True, mask=captured[0] > 0)
    for key, value, formula in zip(("y", "x", "weight", "bias", "residual"), captured, formulas, strict=True):
        assert_close(key, value, formula, TOLERANCE[torch.float16])
