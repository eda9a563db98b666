"""The dense networks of DLRM-DCNv2 and DLRM, and their operations, on a GPU: against float64, captured, repeatable, and
without overflow of offsets in large tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.dlrm import model as dlrm
from benchmarks.dlrm.ops import dot_interaction
from benchmarks.dlrm_dcnv2 import model as dlrm_dcnv2
from benchmarks.dlrm_dcnv2.ops import cross_network
from common.ops import linear_relu, logit
from common.ops.operation import AUTO, OperationRequest
from common.recommendation.click_network import ClickArchitecture, loss
from tests.benchmarks.dlrm import dot_interaction_oracle
from tests.benchmarks.dlrm_dcnv2 import cross_network_oracle
from tests.common.ops import linear_relu_oracle

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA = torch.device("cuda")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
SAMPLES = 6912
TABLES, WIDTH = 26, 128


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << power,), float("nan"), device="cuda") for power in range(8)]
    del held


def assert_close(found: list[Tensor], formulas: list[Tensor], dtype: torch.dtype) -> None:
    for number, (value, formula) in enumerate(zip(found, formulas, strict=True)):
        assert value.dtype == dtype
        error = (value.double() - formula).norm() / formula.norm()
        assert error < TOLERANCE[dtype], f"{number}: relative error {error:.2e}"


def captured(run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What the third replay of a graph leaves."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        for value in found:
            value.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    return found


# Linear layers with ReLU


@pytest.mark.parametrize("name", linear_relu.LINEAR_RELU.names)
@pytest.mark.parametrize("sizes", [(SAMPLES, 16, 512), (SAMPLES, 480, 1024), (SAMPLES, 512, 256), (777, 40, 24)])
@DTYPES
def test_linear_layers_equal_float64(dtype: torch.dtype, sizes: tuple[int, int, int], name: str) -> None:
    given = linear_relu_oracle.inputs(*sizes, dtype, device="cuda")
    leaves = [value.requires_grad_() for value in given[:3]]
    poison()
    y = linear_relu.LINEAR_RELU.function(name)(*leaves)
    found = [y.detach(), *torch.autograd.grad(y, leaves, given.dy)]
    assert_close(found, linear_relu_oracle.expected(given, y.detach() > 0), dtype)


def test_a_gradient_in_wider_rows_is_read_in_place() -> None:
    given = linear_relu_oracle.inputs(SAMPLES, 256, WIDTH, torch.bfloat16, device="cuda")
    leaves = [value.requires_grad_() for value in given[:3]]
    wide = torch.full((SAMPLES, 3456), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, :WIDTH] = given.dy
    y = linear_relu.LINEAR_RELU.function("fused")(*leaves)
    for one, other in zip(
        torch.autograd.grad(y, leaves, given.dy, retain_graph=True),
        torch.autograd.grad(y, leaves, wide[:, :WIDTH]),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", logit.LOGIT.names)
@pytest.mark.parametrize(("samples", "inputs"), [(SAMPLES, 256), (1001, 200)])
@DTYPES
def test_logits_equal_float64(dtype: torch.dtype, samples: int, inputs: int, name: str) -> None:
    random = torch.Generator("cuda").manual_seed(inputs)
    leaves = [
        torch.randn(shape, device="cuda", generator=random).to(dtype).requires_grad_()
        for shape in ((samples, inputs), (1, inputs), (1,))
    ]
    dlogit = torch.randn(samples, device="cuda", generator=random)
    poison()
    found = logit.LOGIT.function(name)(*leaves)
    x, weight, bias = (leaf.detach().double() for leaf in leaves)
    assert_close([found.detach()], [x @ weight[0] + bias], torch.float32)
    formulas = [torch.outer(dlogit.double(), weight[0]), (dlogit.double() @ x)[None], dlogit.double().sum()[None]]
    assert_close(list(torch.autograd.grad(found, leaves, dlogit)), formulas, dtype)


# The cross network


def run_cross(name: str, given: cross_network_oracle.Inputs) -> list[Tensor]:
    leaves = [leaf.requires_grad_() for leaf in given.leaves()]
    y = cross_network.CROSS_NETWORK.function(name)(given.x0, given.v, given.w, given.b)
    return [y.detach(), *torch.autograd.grad(y, leaves, given.dy)]


@pytest.mark.parametrize("name", cross_network.CROSS_NETWORK.names)
@pytest.mark.parametrize("sizes", [(SAMPLES, 3456, 512, 3), (1000, 3456, 512, 2), (300, 200, 40, 3)], ids=str)
@DTYPES
def test_cross_network_equals_float64(dtype: torch.dtype, sizes: tuple[int, int, int, int], name: str) -> None:
    given = cross_network_oracle.inputs(*sizes, dtype, device="cuda")
    poison()
    assert_close(run_cross(name, given), cross_network_oracle.expected(given), dtype)


@pytest.mark.parametrize("name", ["triton", "fused"])
def test_captured_cross_network_is_the_eager_one_bit_by_bit(name: str) -> None:
    given = cross_network_oracle.inputs(SAMPLES, 3456, 512, 3, torch.bfloat16, device="cuda")
    eager = run_cross(name, given)
    for one, other in zip(captured(lambda: run_cross(name, given)), eager, strict=True):
        assert torch.equal(one, other)


def test_more_elements_of_x0_than_int32_counts() -> None:
    samples, kept = 700_000, 1000
    assert samples * 3456 > 2**31
    given = cross_network_oracle.inputs(kept, 3456, 512, 1, torch.bfloat16, device="cuda")
    x0 = torch.zeros(samples, 3456, dtype=torch.bfloat16, device="cuda")
    x0[-kept:] = given.x0
    function = cross_network.CROSS_NETWORK.function("triton")
    with torch.no_grad():
        y = function(x0, given.v, given.w, given.b)
    assert_close([y[-kept:]], cross_network_oracle.expected(given)[:1], torch.bfloat16)
    assert not y[:-kept].any()


# The dot interaction


@pytest.mark.parametrize("name", dot_interaction.DOT_INTERACTION.names)
@pytest.mark.parametrize("sizes", [(SAMPLES, 27, 128, 480), (1001, 27, 128, 479), (77, 9, 40, 80)], ids=str)
@DTYPES
def test_dot_interaction_equals_loops_in_float64(
    dtype: torch.dtype, sizes: tuple[int, int, int, int], name: str
) -> None:
    x, dy = dot_interaction_oracle.inputs(*sizes, dtype, device="cuda")
    poison()
    y = dot_interaction.DOT_INTERACTION.function(name)(x.requires_grad_(), sizes[3])
    found = [y.detach(), *torch.autograd.grad(y, x, dy)]
    assert_close(found, list(dot_interaction_oracle.expected(x, dy)), dtype)


def test_more_elements_of_vectors_than_int32_counts() -> None:
    samples, kept = 700_000, 1000
    some, some_dy = dot_interaction_oracle.inputs(kept, 27, 128, 480, torch.bfloat16, device="cuda")
    x = torch.zeros(samples, 27, 128, dtype=torch.bfloat16, device="cuda")
    dy = torch.zeros(samples, 480, dtype=torch.bfloat16, device="cuda")
    x[-kept:], dy[-kept:] = some, some_dy
    y = dot_interaction.DOT_INTERACTION.function("triton")(x.requires_grad_(), 480)
    (dx,) = torch.autograd.grad(y, x, dy)
    expected = dot_interaction_oracle.expected(some, some_dy)
    assert_close([y[-kept:].detach(), dx[-kept:]], list(expected), torch.bfloat16)
    assert not y[:-kept].any()
    assert not dx[:-kept].any()


# Whole networks


def dense_network(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """At its full size."""
    generator = torch.Generator().manual_seed(1)
    if name == "dlrm":
        sizes = ClickArchitecture(13, WIDTH, (512, 256, WIDTH), (1024, 1024, 512, 256, 1))
        return dlrm.DenseNetwork(sizes, TABLES, {}, CUDA, dtype, generator)
    crossed = dlrm_dcnv2.Architecture(13, WIDTH, (512, 256, WIDTH), (1024, 1024, 512, 256, 1), 3, 512)
    return dlrm_dcnv2.DenseNetwork(crossed, TABLES, {}, CUDA, dtype, generator)


def train(model: torch.nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Loss, gradient of the vectors, and gradients of the parameters, of one micro-batch."""
    random = torch.Generator("cuda").manual_seed(2)
    dense = torch.randn(SAMPLES, 13, device="cuda", generator=random)
    vectors = 0.1 * torch.randn(SAMPLES, TABLES * WIDTH, device="cuda", generator=random)
    label = torch.randint(2, (SAMPLES,), device="cuda", generator=random).float()
    vectors = vectors.to(dtype).requires_grad_()

    click = model.head(torch.cat([model.bottom(dense.to(dtype)), vectors], 1))
    mean = loss(click, label.to(click.dtype))
    return [mean.detach(), *torch.autograd.grad(1024 * mean, [vectors, *model.parameters()])]


@pytest.mark.parametrize("name", ["dlrm_dcnv2", "dlrm"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.06), (torch.bfloat16, 0.2)], ids=str)
def test_networks_are_those_of_float64_but_for_rounding(dtype: torch.dtype, bound: float, name: str) -> None:
    """A result that rounding moves over zero has another gradient: a share of them all as large as the rounding."""
    model, exact = dense_network(name, dtype), dense_network(name, torch.float64)
    assert "reference" not in model.choices.values()
    assert set(exact.choices.values()) == {"reference"}
    exact.load_state_dict(model.state_dict())
    found, expected = train(model, dtype), train(exact, torch.float64)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-3)
    for value, formula in zip(found[1:], expected[1:], strict=True):
        error = (value.double() - formula).norm() / formula.norm()
        assert error < bound, f"{tuple(value.shape)}: relative error {error:.2e}"


@pytest.mark.parametrize("name", ["dlrm_dcnv2", "dlrm"])
def test_a_captured_micro_batch_is_the_eager_one(name: str) -> None:
    model = dense_network(name, torch.bfloat16)
    random = torch.Generator("cuda").manual_seed(2)
    dense = torch.randn(SAMPLES, 13, device="cuda", generator=random)
    vectors = torch.randn(SAMPLES, TABLES * WIDTH, device="cuda", generator=random).bfloat16() / 8
    label = torch.randint(2, (SAMPLES,), device="cuda", generator=random).float()

    def step() -> list[Tensor]:
        mean = loss(model.head(torch.cat([model.bottom(dense), vectors], 1)), label)
        return [mean.detach(), *torch.autograd.grad(mean, list(model.parameters()))]

    eager = step()
    for one, other in zip(captured(step), eager, strict=True):
        torch.testing.assert_close(one, other)


def test_auto_takes_the_kernels() -> None:
    request = OperationRequest(CUDA, torch.bfloat16)
    assert linear_relu.LINEAR_RELU.select(AUTO, request).name == "fused"
    sized = OperationRequest(CUDA, torch.bfloat16, {"inputs": 256})
    assert logit.LOGIT.select(AUTO, sized).name == "fused"
    assert cross_network.CROSS_NETWORK.select(AUTO, request).name == "fused"
    assert dot_interaction.DOT_INTERACTION.select(AUTO, request).name == "triton"
