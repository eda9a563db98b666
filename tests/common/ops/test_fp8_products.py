"""Test FP8 products on a CPU: quantization against its definition, products against float64, and scales."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.errors import UnsupportedImplementation
from common.ops.fp8_cast.reference import LARGEST_SCALE, Fp8Tensor, cast_reference
from common.ops.linear import fp8
from common.ops.linear.fp8 import Fp8LinearProduct, same_weights
from common.ops.operation import OperationRequest
from common.optim.momentum import SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from common.step.graphs import StepRunner
from common.step.train_step import Losses, TrainStep, accumulate
from tests import fp8_oracle as oracle
from tests.drawn_tensors import normal, scaling
from tests.fp8_oracle import E4M3, E5M2

CPU = torch.device("cpu")
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of rounding to a dtype."""


class Layer(nn.Module):
    """A linear layer with the product under test."""

    def __init__(self, columns: int, rows: int, *, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        weight = normal(rows, columns, seed=rows + columns, dtype=torch.float32) / math.sqrt(columns)
        self.weight = nn.Parameter(weight.to(dtype))
        self.bias = nn.Parameter(normal(rows, seed=1, dtype=dtype))
        self.product = Fp8LinearProduct(self.weight)

    def forward(self, x: Tensor | Fp8Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def scales_of(layer: Layer) -> np.ndarray:
    assert isinstance(layer.product, Fp8LinearProduct)
    return layer.product.scales.numpy().copy()


# --- casts


def awkward(dtype: torch.dtype) -> Tensor:
    """Return all values of the format, the middles between them, their neighbours in bf16, and values out of range."""
    codes = torch.from_numpy(oracle.CODES[dtype])
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middles]).to(torch.bfloat16)
    bits = values.view(torch.int16)
    near = torch.cat([bits - 1, bits + 1])[torch.cat([bits, bits]) > 0].view(torch.bfloat16)
    beyond = torch.tensor([460.0, 6e4, 1e30, 3e-39], dtype=torch.bfloat16)
    every = torch.cat([values, near, beyond])
    every = torch.cat([every, -every])
    return F.pad(every, (0, -len(every) % 32)).view(-1, 32)


@pytest.mark.parametrize("scale", [1.0, 37.3])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_casts_scale_in_fp32_round_to_nearest_even_and_saturate(dtype, scale):
    x = awkward(dtype)
    found = cast_reference(x, scaling(scale), dtype, False)
    assert found.data.dtype == dtype
    expected = oracle.encode(x.float().numpy() * np.float32(scale), dtype)
    np.testing.assert_array_equal(found.data.view(torch.uint8).numpy(), expected)
    assert found.scale_inverse.item() == np.float32(1) / np.float32(scale)


def test_the_transpose_holds_the_same_bytes():
    found = cast_reference(normal(64, 48), scaling(), E4M3, True)
    assert found.transposed.is_contiguous()
    assert torch.equal(found.transposed.view(torch.uint8), found.data.view(torch.uint8).t())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_what_is_not_finite_becomes_nan_and_leaves_the_scale(dtype, value):
    x, state = normal(32, 32), scaling(3.0)
    x[5, 7] = value
    found = cast_reference(x, state, dtype, False)
    expected = torch.zeros(32, 32, dtype=torch.bool)
    expected[5, 7] = True
    assert torch.equal(found.data.float().isnan(), expected)
    assert state.scale.item() == 3.0


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_a_use_leaves_the_scale_of_its_own_amax(dtype):
    state = scaling()
    for seed, size in enumerate((1.0, 1e-6, 300.0)):
        x = (normal(600, 32, seed=seed, dtype=torch.float32) * size).to(torch.bfloat16)
        used = oracle.first_scale(x, dtype) if seed == 0 else np.float32(state.scale.item())
        found = cast_reference(x, state, dtype, False)
        assert found.scale_inverse.item() == np.float32(1) / used
        assert state.scale.item() == oracle.scale_of(x.float().abs().max().item(), dtype)


@pytest.mark.parametrize("scale", [0.0, 5.0])
def test_frozen_scales_are_used_and_left(scale):
    x, state = normal(32, 32), scaling(scale)
    found = cast_reference(x, state, E4M3, False, frozen_scales=True)
    assert found.scale_inverse.item() == np.float32(1) / (np.float32(scale) if scale else oracle.first_scale(x, E4M3))
    assert state.scale.item() == scale


@pytest.mark.parametrize(
    ("value", "before", "inverse", "after"),
    [(0.0, 5.0, 1 / np.float32(5), 5.0), (0.0, 0.0, 1.0, 0.0), (1e-40, 0.0, 1 / LARGEST_SCALE, LARGEST_SCALE)],
    ids=["zeros", "zeros at first", "denormal numbers"],
)
def test_scales_of_zeros_and_tiny_values(value, before, inverse, after):
    state = scaling(before)
    found = cast_reference(torch.full((16, 16), value, dtype=torch.bfloat16), state, E4M3, False)
    assert found.scale_inverse.item() == inverse
    assert state.scale.item() == after


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e5])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_the_first_use_is_as_precise_as_the_format(dtype, size):
    x = (normal(1000, 64, dtype=torch.float32) * size).to(torch.bfloat16)
    x[1:256:3] *= 2  # rows that are not all sampled
    found = cast_reference(x, scaling(), dtype, False)
    error = found.data.float() * found.scale_inverse - x.float()
    mantissa_bits = {E4M3: 3, E5M2: 2}[dtype]
    assert error.norm() / x.float().norm() < 2.0 ** -(mantissa_bits + 1)


# --- products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_result_and_gradients_equal_float64_products_of_quantised_operands(dtype):
    layer = Layer(48, 32, dtype=dtype)
    for iteration in range(2):
        x = normal(80, 48, seed=iteration, dtype=dtype).requires_grad_()
        dy = normal(80, 32, seed=9 + iteration, dtype=dtype)
        scales = list(scales_of(layer))
        if iteration == 0:
            operands = ((x, E4M3), (layer.weight, E4M3), (dy, E5M2))
            scales = [oracle.first_scale(tensor, kind) for tensor, kind in operands]
        layer.zero_grad()
        y = layer(x)
        y.backward(dy)
        qx, qw = oracle.quantised(x, scales[0], E4M3), oracle.quantised(layer.weight, scales[1], E4M3)
        qdy = oracle.quantised(dy, scales[2], E5M2)
        bias = layer.bias.detach().double().numpy()
        for found, expected in (
            (y, qx @ qw.T + bias),
            (x.grad, qdy @ qw),
            (layer.weight.grad, qdy.T @ qx),
            (layer.bias.grad, dy.double().numpy().sum(0)),
        ):
            assert found.dtype == dtype
            # Half a unit in the last place, and fp32 sums of up to 80 terms.
            step, size = HALF_STEP[dtype], np.abs(expected).max()
            np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=1.01 * step, atol=1e-5 * size)


def test_a_result_without_bias_and_with_leading_dimensions():
    layer = Layer(32, 16)
    x = normal(4, 8, 32)
    found = layer.product(x, layer.weight, None)
    flat = Layer(32, 16)
    assert torch.equal(found.view(32, 16), flat.product(x.view(32, 32), flat.weight, None))


def test_a_detached_bias_is_added_but_not_differentiated():
    layer, plain = Layer(32, 16), Layer(32, 16)
    x, dy = normal(16, 32), normal(16, 16, seed=2)
    found, expected = layer.product(x, layer.weight, layer.bias.detach()), plain(x)
    found.backward(dy)
    expected.backward(dy)
    assert torch.equal(found, expected)
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert layer.bias.grad is None


@pytest.mark.parametrize("transpose", [True, False], ids=["with transpose", "without"])
def test_an_fp8_input_gives_what_its_source_gives_and_passes_the_gradient_on(transpose):
    x, dy = normal(32, 48).requires_grad_(), normal(32, 16, seed=2)
    given, plain = Layer(48, 16), Layer(48, 16)
    x8 = cast_reference(x, scaling(), E4M3, transpose)
    unwritten = torch.full((), math.nan, dtype=x.dtype).expand(x.shape)
    placeholder = _Same.apply(x, unwritten)
    y = given(Fp8Tensor(x8.data, x8.transposed, x8.scale_inverse, placeholder))
    y.backward(dy)
    found = x.grad
    x.grad = None
    expected = plain(x)
    expected.backward(dy)
    assert torch.equal(y, expected)
    assert torch.equal(found, x.grad)
    assert torch.equal(given.weight.grad, plain.weight.grad)
    assert scales_of(given)[0] == 0.0  # the kernel that casts keeps that scale


class _Same(torch.autograd.Function):
    """Acts as a kernel that writes only FP8: its 16-bit result is never read."""

    @staticmethod
    def forward(ctx, x: Tensor, unwritten: Tensor) -> Tensor:
        return unwritten.view_as(unwritten)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_arrives(value):
    layer, x = Layer(32, 16), normal(16, 32).requires_grad_()
    dy = normal(16, 16, seed=2)
    dy[3, 5] = value
    layer(x).backward(dy)
    for gradient in (x.grad[3], layer.weight.grad[5]):
        assert not gradient.isfinite().any()
    assert x.grad[4].isfinite().all()


def test_backward_keeps_two_transposes_in_fp8_and_their_scales():
    layer, x, kept = Layer(48, 32), normal(64, 48).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    assert sorted(t.numel() * t.element_size() for t in kept) == [4, 4, 32 * 48, 64 * 48]


# --- the life of the scales


def test_forward_passes_may_come_before_their_backward_passes():
    layer = Layer(32, 16)
    inputs = [(normal(16, 32, seed=s, dtype=torch.float32) * 10.0**s).to(torch.bfloat16) for s in (0, 1)]
    outputs = [layer(x) for x in inputs]
    scales = (oracle.first_scale(inputs[0], E4M3), oracle.scale_of(inputs[0].float().abs().max().item(), E4M3))
    dy = torch.zeros(16, 16, dtype=torch.bfloat16)
    dy[3] = 1.0  # then the gradient of every row of the weight is row 3 of the quantised input
    for x, scale, output in reversed(list(zip(inputs, scales, outputs, strict=True))):
        layer.zero_grad()
        output.backward(dy)
        expected = np.broadcast_to(oracle.quantised(x, scale, E4M3)[3], (16, 32))
        np.testing.assert_allclose(layer.weight.grad.double().numpy(), expected, rtol=2.0**-8)


def test_two_micro_batches_add_up():
    layer, other = Layer(32, 16), Layer(32, 16)
    batches = [(normal(16, 32, seed=s), normal(16, 16, seed=s + 5)) for s in (0, 1)]
    sums = 0.0
    for x, dy in batches:
        layer(x).backward(dy)
        other.zero_grad()
        other(x).backward(dy)
        sums = sums + other.weight.grad.float()
    assert torch.equal(layer.weight.grad, sums.to(torch.bfloat16))


def test_same_weights_casts_the_weight_once_a_step():
    model = nn.Sequential(Layer(32, 16), Layer(16, 32))
    x = normal(16, 32)
    model(x)
    first = [scales_of(layer)[1] for layer in model]
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(2)
    with same_weights(model):
        model(x)
    assert [scales_of(layer)[1] for layer in model] == first
    model(x)
    assert [scales_of(layer)[1] for layer in model] == [scale / 2 for scale in first]


def test_same_weights_gives_the_same_result():
    layer, x = Layer(32, 16), normal(16, 32)
    layer(x)
    again = layer(x)  # by now the scales are those of these very tensors
    with same_weights(layer):
        assert torch.equal(layer(x), again)


def test_same_weights_before_any_cast_is_an_error():
    layer = Layer(32, 16)
    with same_weights(layer), pytest.raises(RuntimeError, match="there is no FP8 weight yet"):
        layer(normal(16, 32))


def test_evaluation_is_exact_and_moves_no_scale():
    layer, x = Layer(32, 16), normal(7, 32)
    layer(normal(16, 32)).sum().backward()
    before = scales_of(layer)
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    np.testing.assert_array_equal(scales_of(layer), before)


def test_a_model_that_is_cast_keeps_its_scales():
    layer = Layer(32, 16)
    layer(normal(16, 32)).backward(normal(16, 16, seed=3))
    before = scales_of(layer)
    layer.half()
    assert layer.weight.dtype == torch.float16
    assert scales_of(layer).dtype == np.float32
    np.testing.assert_array_equal(scales_of(layer), before)


def test_a_checkpoint_carries_the_scales_and_training_goes_on_with_them():
    layer, resumed = Layer(32, 16), Layer(32, 16)
    layer(normal(16, 32)).backward(normal(16, 16, seed=3))
    resumed.load_state_dict(layer.state_dict())
    x = normal(16, 32, seed=4)
    assert scales_of(layer).all()
    assert torch.equal(layer(x), resumed(x))


class Mlp(nn.Module):
    """A network that learns to shift every feature by one position."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Layer(32, 64)
        self.down = Layer(64, 32)
        for layer in (self.up, self.down):
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def loss(self, batch: Batch) -> Losses:
        x = batch.tensors["x"]
        loss = (self(x) - x.roll(1, 1)).float().square().mean()
        return Losses(loss, {"loss": loss.detach()})


def batches(count: int) -> list[Batch]:
    return [Batch({"x": normal(64, 32, seed=100 + index)}, samples=64) for index in range(count)]


def build(model: Mlp, accumulation: int) -> tuple[TrainStep, Optimizer]:
    layout = Layout()
    optimizer = Optimizer(
        [ParameterGroup(dict(model.named_parameters()))],
        SGD(0.9),
        lambda step: torch.full((), 0.5),
        layout,
        grad_divisor=accumulation,
    )
    return TrainStep(accumulate(model.loss), [optimizer], layout), optimizer


def test_warm_up_leaves_no_trace_in_the_scales():
    model = Mlp()
    step, _ = build(model, 2)
    runner = StepRunner(step, model, 2)
    runner.warm_up(batches(1))
    for layer in (model.up, model.down):
        assert not scales_of(layer).any()
        assert not layer.product.pending.any()


def test_a_skipped_step_moves_the_scales_but_not_the_weights():
    model = Mlp()
    step, _ = build(model, 1)
    model.up.bias.data[3] = math.inf
    weights = model.down.weight.detach().clone()
    report = step(batches(1))
    assert step.read(report.names, report.values.tolist()).overflow
    assert torch.equal(model.down.weight, weights)
    assert scales_of(model.up)[0] > 0


# --- what cannot be served


def test_a_cpu_is_served():
    assert fp8.unsupported(OperationRequest(CPU, torch.bfloat16, {"columns": 64})) is None


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (OperationRequest(CPU, torch.float32, {"columns": 64}), "not of torch.float32"),
        (OperationRequest(CPU, torch.float16, {"columns": 40}), "40 columns are not a multiple of 16"),
        (OperationRequest(torch.device("meta"), torch.float16, {"columns": 64}), "CUDA device, not meta"),
    ],
)
def test_unsupported_names_the_reason(request_, reason):
    assert reason in (fp8.unsupported(request_) or "")


@pytest.mark.parametrize(("capability", "served"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_a_gpu_needs_fp8_units(monkeypatch, capability, served):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = fp8.unsupported(OperationRequest(torch.device("cuda"), torch.bfloat16, {"columns": 64}))
    assert (reason is None) == served
    assert served or "compute capability 8.9" in str(reason)


def test_rows_of_a_weight_that_are_no_multiple_of_16_are_refused():
    with pytest.raises(UnsupportedImplementation, match="40 x 64 can't be multiplied in FP8: 40"):
        Layer(64, 40)


@pytest.mark.parametrize("rows", [0, 17])
def test_rows_of_an_input_that_are_no_multiple_of_16_are_refused(rows):
    layer = Layer(32, 16)
    with pytest.raises(UnsupportedImplementation, match=f"a product of {rows} rows"):
        layer(normal(rows, 32))
    assert not scales_of(layer).any()


def test_an_input_of_other_columns_is_refused():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        Layer(32, 16)(normal(16, 64))


def test_an_fp8_input_in_evaluation_is_refused():
    layer, x8 = Layer(32, 16), cast_reference(normal(16, 32), scaling(), E4M3, True)
    with torch.no_grad(), pytest.raises(TypeError, match="takes the tensor itself"):
        layer(x8)
