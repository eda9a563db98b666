"""Triton operations between GPT-3's products and the libraries' attention on a GPU, at the widths of GPT-3 and of a
rank of four: 16 bit against float64, FP8 against the reference, and one graph whose scales follow its uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.ops import bias_gelu, causal_attention, layer_norm_1p, qkv_gradient
from common.ops.bench import gpt3 as size
from common.ops.fp8_cast.reference import E4M3, Fp8Tensor, Scaling, cast_reference, widen_fp8
from common.ops.operation import Operation, OperationRequest

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device with FP8 units", allow_module_level=True)

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SCALES = pytest.mark.parametrize("known", [False, True], ids=["first use", "later use"])
TOKENS = 1003
FP8_TOKENS = 1024
HEADS = size.HEADS // size.RANKS[0]
FEED_FORWARD = size.FEED_FORWARD // size.RANKS[0]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.full((), scale, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda"))


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << power,), float("nan"), device="cuda") for power in range(8)]
    del held


def pair(operation: Operation) -> tuple:
    return operation.function("triton"), operation.reference


def assert_close(found: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert found is not None
    assert expected is not None
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.2e}"


def codes(x8: Fp8Tensor) -> Tensor:
    """Numbers of the codes in order of their values."""
    byte = x8.data.view(torch.uint8).int()
    return torch.where(byte < 128, byte, 128 - byte)


def assert_same_fp8(call: Callable[[int, Scaling], Fp8Tensor | Tensor | None], scale: float) -> None:
    """Ours (0) and the reference (1) give the same bytes but for neighbours of a middle, and leave the same scale.

    Where terms cancel to almost nothing, the rounding of the terms decides: less than a millionth of the largest.
    """
    states = [scaling(scale), scaling(scale)]
    poison()
    found, expected = (call(which, state) for which, state in enumerate(states))
    assert isinstance(found, Fp8Tensor)
    assert isinstance(expected, Fp8Tensor)
    largest = widen_fp8(expected).abs().max()
    cancelled = widen_fp8(expected).abs() < 1e-6 * largest
    apart = (codes(found) - codes(expected)).abs()
    assert apart[~cancelled].max() <= 1
    assert widen_fp8(found)[cancelled].abs().sum() <= 1e-5 * largest * cancelled.sum()
    assert apart[~cancelled].count_nonzero() <= apart.numel() // 1000
    torch.testing.assert_close(found.scale_inverse, expected.scale_inverse, rtol=1e-5, atol=0)
    torch.testing.assert_close(states[0].scale, states[1].scale, rtol=1e-5, atol=0)
    assert not states[0].pending.any()
    assert (found.transposed is None) == (expected.transposed is None)
    if found.transposed is not None:
        assert torch.equal(found.transposed.view(torch.uint8), found.data.view(torch.uint8).t())


def norm_inputs(tokens: int, features: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Residual, delta, what is added to every row, weight, bias."""
    return (
        random(tokens, features, dtype=dtype) * 3 + 2,
        random(tokens, features, dtype=dtype, seed=1),
        random(features, dtype=dtype, seed=2),
        random(features, dtype=dtype, seed=3) / 4,
        random(features, dtype=dtype, seed=4),
    )


@DTYPES
@pytest.mark.parametrize("features", [size.HIDDEN, 16384, 8192, 5000, 768])
def test_norm_equals_float64(features: int, dtype: torch.dtype) -> None:
    ours, reference = pair(layer_norm_1p.LAYER_NORM_1P)
    residual, delta, added, weight, bias = norm_inputs(TOKENS, features, dtype)
    poison()
    found = ours.forward(residual, delta, added, weight, bias, size.EPSILON)
    expected = reference.forward(found.residual.double(), None, None, weight.double(), bias.double(), size.EPSILON)
    assert_close(found.residual, residual.double() + delta.double() + added.double(), TOLERANCE[dtype])
    assert_close(found.moments, expected.moments, 1e-5)
    assert_close(found.y, expected.y, TOLERANCE[dtype])
    assert_close(ours.recompute(found.residual, found.moments, weight, bias), expected.y, TOLERANCE[dtype])
    without = ours.forward(found.residual, None, None, weight, bias, size.EPSILON)
    assert without.residual is found.residual
    assert_close(without.y, expected.y, TOLERANCE[dtype])

    dy = random(TOKENS, features, dtype=dtype, seed=5)
    poison()
    dx, _ = ours.backward(dy, found.residual, found.moments, weight, delta)
    given = (dy.double(), expected.residual, expected.moments)
    wide_dx, _ = reference.backward(*given, weight.double(), delta.double())
    assert_close(dx, wide_dx, TOLERANCE[dtype])
    for with_dx in (dx, None):
        poison()
        sums = ours.parameter_gradients(dy, found.residual, found.moments, with_dx)
        wide = reference.parameter_gradients(*given, None if with_dx is None else with_dx.double())
        assert_close(sums.weight, wide.weight, 1e-4)
        assert_close(sums.bias, wide.bias, 1e-4)
        if with_dx is None:
            assert sums.added is None
        else:
            assert_close(sums.added, wide.added, 1e-4)


@SCALES
@pytest.mark.parametrize("half", [False, True])
def test_norm_writes_fp8(half: bool, known: bool) -> None:
    functions = pair(layer_norm_1p.LAYER_NORM_1P)
    given = norm_inputs(FP8_TOKENS, size.HIDDEN, torch.bfloat16)
    assert_same_fp8(
        lambda which, state: functions[which].forward(*given, size.EPSILON, half=half, fp8=state).y8,
        30.0 if known else 0.0,
    )
    residual, delta, _, weight, bias = given
    moments = functions[1].forward(residual, None, None, weight, bias, size.EPSILON).moments
    dy = random(FP8_TOKENS, size.HIDDEN, seed=5) * 1e-7
    assert_same_fp8(
        lambda which, state: functions[which].backward(dy, residual, moments, weight, delta * 1e-7, fp8=state)[1],
        1e10 if known else 0.0,
    )


@DTYPES
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("features", [FEED_FORWARD, size.FEED_FORWARD, 1030])
def test_gelu_equals_float64(features: int, biased: bool, dtype: torch.dtype) -> None:
    ours, reference = pair(bias_gelu.BIAS_GELU_PASSES)
    x, dy = random(TOKENS, features, dtype=dtype) * 2, random(TOKENS, features, dtype=dtype, seed=1)
    bias = random(features, dtype=dtype, seed=2) if biased else None
    wide_bias = None if bias is None else bias.double()
    poison()
    assert_close(ours.forward(x, bias).y, reference.forward(x.double(), wide_bias).y, TOLERANCE[dtype])
    poison()
    found, expected = ours.backward(dy, x, bias), reference.backward(dy.double(), x.double(), wide_bias)
    assert_close(found.dx, expected.dx, TOLERANCE[dtype])
    assert_close(found.bias, expected.bias, 1e-4)


@SCALES
@pytest.mark.parametrize("features", [FEED_FORWARD, size.FEED_FORWARD])
def test_gelu_writes_fp8_and_saves_it(features: int, known: bool) -> None:
    functions = pair(bias_gelu.BIAS_GELU_PASSES)
    x, bias = random(FP8_TOKENS, features), random(features, seed=2)
    scale = 20.0 if known else 0.0
    assert_same_fp8(lambda which, state: functions[which].forward(x, bias, fp8=state).y8, scale)
    assert_same_fp8(lambda which, state: functions[which].forward(x, bias, fp8=state, save_fp8=scaling()).y8, scale)
    assert_same_fp8(lambda which, state: functions[which].forward(x, bias, fp8=scaling(), save_fp8=state).saved, scale)
    assert_same_fp8(lambda which, state: functions[which].forward(x, bias, save_fp8=state).saved, scale)
    dy = random(FP8_TOKENS, features, seed=1) * 1e-6
    for saved in (x, cast_reference(x, scaling(), E4M3, False)):
        sums: list[Tensor] = []

        def back(which: int, state: Scaling, saved: Tensor | Fp8Tensor = saved, sums: list[Tensor] = sums) -> Fp8Tensor:
            gradients = functions[which].backward(dy, saved, bias, fp8=state)
            sums.append(gradients.bias)
            return gradients.dx8

        assert_same_fp8(back, 1e9 if known else 0.0)
        assert_close(sums[0], sums[1].double(), 1e-4)


def heads_of(packed: bool, dtype: torch.dtype, heads: int = HEADS, factor: float = 1.0) -> tuple[Tensor, ...]:
    """Gradients of query, key and value: views of one tensor, or tensors of their own of several strides."""
    whole = random(TOKENS, heads, 3, size.HEAD_SIZE, dtype=dtype) * factor
    q, k, v = whole.unbind(2)
    return (q, k, v) if packed else (q.contiguous(), k.transpose(0, 1).contiguous().transpose(0, 1), v)


@DTYPES
@pytest.mark.parametrize("packed", [True, False])
def test_gradient_of_qkv_equals_float64(packed: bool, dtype: torch.dtype) -> None:
    given = heads_of(packed, dtype)
    expected = torch.stack(given, 2).flatten(1)
    poison()
    found = qkv_gradient.QKV_GRADIENT.function("triton")(*given)
    assert torch.equal(found.d_qkv, expected)
    assert (found.d_qkv.data_ptr() == given[0].data_ptr()) == packed
    assert_close(found.bias, expected.double().sum(0), 1e-4)


@SCALES
@pytest.mark.parametrize("heads", [HEADS, size.HEADS])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("transpose", [True, False])
def test_gradient_of_qkv_in_fp8(transpose: bool, packed: bool, heads: int, known: bool) -> None:
    functions = pair(qkv_gradient.QKV_GRADIENT)
    given = heads_of(packed, torch.bfloat16, heads, 1e-6)
    assert_same_fp8(
        lambda which, state: functions[which](*given, half=False, fp8=state, transpose=transpose).d_qkv8,
        5e9 if known else 0.0,
    )


LIBRARIES = pytest.mark.parametrize("name", list(causal_attention.CAUSAL_ATTENTION.fast))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@LIBRARIES
def test_attention_reads_interleaved_heads_and_writes_their_gradients_in_place(name: str, dtype: torch.dtype) -> None:
    request = OperationRequest(torch.device("cuda"), dtype, {"head_size": size.HEAD_SIZE})
    reason = causal_attention.CAUSAL_ATTENTION.unsupported(name, request)
    if reason is not None:
        pytest.skip(reason)
    attention, reference = causal_attention.CAUSAL_ATTENTION.function(name), causal_attention.CAUSAL_ATTENTION.reference
    qkv = random(size.ROWS, 512, 8, 3, size.HEAD_SIZE, dtype=dtype)
    do = random(size.ROWS, 512, 8, size.HEAD_SIZE, dtype=dtype, seed=1)
    poison()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, saved = attention.forward(*qkv.unbind(3), 0.1)
    if name not in ("te", "flash"):  # these copy what they read, three times the result's size
        assert torch.cuda.max_memory_allocated() - before < 3 * o.numel() * o.element_size()
    assert o.is_contiguous()
    expected, wide = reference.forward(*qkv.double().unbind(3), 0.1)
    assert_close(o, expected, TOLERANCE[dtype])
    gradients = reference.backward(do.double(), wide)
    d_qkv = torch.full_like(qkv, float("nan"))
    attention.backward_into(do, saved, d_qkv.unbind(3))
    for found in (d_qkv.unbind(3), attention.backward(do, saved)):
        for gradient, wanted in zip(found, gradients, strict=True):
            assert_close(gradient, wanted, 2 * TOLERANCE[dtype])


def test_a_layers_operations_in_a_graph_follow_their_inputs_and_scales() -> None:
    """Norm, GELU and the gradient of query, key and value: what is captured gives in every replay what eager code does,
    bit for bit, so that the sums over tokens have an order of their own."""
    norm = layer_norm_1p.LAYER_NORM_1P.function("triton")
    gelu = bias_gelu.BIAS_GELU_PASSES.function("triton")
    join = qkv_gradient.QKV_GRADIENT.function("triton")
    x, bias = random(512, 3072), random(3072, seed=1)

    def step(states: list[Scaling]) -> list[Tensor]:
        normed = norm.forward(x, x, bias, bias, bias, 1e-5, fp8=states[0])
        activated = gelu.forward(normed.y, bias, fp8=states[1], save_fp8=states[2])
        back = gelu.backward(x, activated.saved, bias, fp8=states[3])
        dx, dx8 = norm.backward(x, normed.residual, normed.moments, bias, x, fp8=states[4])
        sums = norm.parameter_gradients(x, normed.residual, normed.moments, dx)
        joined = join(*dx.view(512, 8, 3, 128).unbind(2), half=False, fp8=states[5], transpose=True)
        in_fp8 = (normed.y8, activated.y8, activated.saved, back.dx8, dx8, joined.d_qkv8)
        return [
            *(x8.data.view(torch.uint8) for x8 in in_fp8), *(x8.scale_inverse for x8 in in_fp8),
            joined.d_qkv8.transposed.view(torch.uint8), dx, *sums, back.bias, joined.bias,
        ]  # fmt: skip

    ours, eager = [scaling() for _ in range(6)], [scaling() for _ in range(6)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step([scaling() for _ in range(6)])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step(ours)
        for _ in range(3):
            x.mul_(1.5)
            graph.replay()
            for found, expected in zip(captured, step(eager), strict=True):
                assert torch.equal(found, expected)
        assert [state.scale.item() for state in ours] == [state.scale.item() for state in eager]
