"""Triton operations of a decoder and the libraries' attention on a GPU, at the widths of Llama-2-70B: 16 bit against
float64, FP8 against the reference, and one graph whose scales follow its uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.ops import causal_attention, lora_input, rms_norm, rope, swiglu, transpose_fp8
from common.ops.bench import decoder as size
from common.ops.causal_attention.reference import CausalAttention
from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Scaling, cast_reference, widen_fp8
from common.ops.lora_input.reference import Region
from common.ops.operation import Operation, OperationRequest

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device with FP8 units", allow_module_level=True)

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SCALES = pytest.mark.parametrize("known", [False, True], ids=["first use", "later use"])
TOKENS = 1003
FP8_TOKENS = 2048
"""A quarter of a row, since the references take several times as much memory in fp32."""
MASK_SEED = 1 << 35


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


def assert_same_fp8(call: Callable[[int, Scaling], Fp8Tensor | None], scale: float) -> None:
    """Ours (0) and the reference (1) give the same bytes but for neighbours of a middle, and leave the same scale.

    Where terms cancel to almost nothing, the rounding of the terms decides: less than a millionth of the largest.
    """
    states = [scaling(scale), scaling(scale)]
    poison()
    found, expected = (call(which, state) for which, state in enumerate(states))
    assert found is not None
    assert expected is not None
    cancelled = widen_fp8(expected).abs() < 1e-6 * widen_fp8(expected).abs().max()
    apart = (codes(found) - codes(expected)).abs()
    assert apart[~cancelled].max() <= 1
    assert widen_fp8(found)[cancelled].abs().sum() <= 1e-5 * widen_fp8(expected).abs().max() * cancelled.sum()
    assert apart.count_nonzero() <= apart.numel() // 1000
    torch.testing.assert_close(found.scale_inverse, expected.scale_inverse, rtol=1e-5, atol=0)
    torch.testing.assert_close(states[0].scale, states[1].scale, rtol=1e-5, atol=0)
    assert not states[0].pending.any()


@DTYPES
@pytest.mark.parametrize("features", [size.HIDDEN, 16384, 5000])
def test_norm_equals_float64(features: int, dtype: torch.dtype) -> None:
    ours, reference = pair(rms_norm.RMS_NORM)
    residual, delta = random(TOKENS, features, dtype=dtype) * 3, random(TOKENS, features, dtype=dtype, seed=1)
    weight, dy = random(features, dtype=dtype, seed=2), random(TOKENS, features, dtype=dtype, seed=3)
    poison()
    found = ours.forward(residual, delta, weight, size.EPSILON)
    expected = reference.forward(found.residual.double(), None, weight.double(), size.EPSILON)
    assert torch.equal(found.residual, (residual.float() + delta.float()).to(dtype))
    assert_close(found.y, expected.y, TOLERANCE[dtype])
    assert torch.equal(ours.recompute(found.residual, found.inverse_rms, weight), found.y)
    dx, _ = ours.backward(dy, found.residual, found.inverse_rms, weight, delta)
    wide, _ = reference.backward(dy.double(), expected.residual, expected.inverse_rms, weight.double(), delta.double())
    assert_close(dx, wide, TOLERANCE[dtype])
    of_weight = ours.weight_gradient(dy, found.residual, found.inverse_rms)
    assert_close(of_weight, reference.weight_gradient(dy.double(), expected.residual, expected.inverse_rms), 1e-4)


@SCALES
def test_norm_writes_fp8(known: bool) -> None:
    functions = pair(rms_norm.RMS_NORM)
    residual, delta = random(FP8_TOKENS, size.HIDDEN), random(FP8_TOKENS, size.HIDDEN, seed=1)
    weight, dy = random(size.HIDDEN, seed=2), random(FP8_TOKENS, size.HIDDEN, seed=3) * 1e-7
    assert_same_fp8(
        lambda which, state: functions[which].forward(residual, delta, weight, size.EPSILON, half=False, fp8=state).y8,
        30.0 if known else 0.0,
    )
    inverse_rms = functions[1].forward(residual, None, weight, size.EPSILON).inverse_rms
    assert_same_fp8(
        lambda which, state: functions[which].backward(dy, residual, inverse_rms, weight, delta * 1e-7, fp8=state)[1],
        1e10 if known else 0.0,
    )


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads"), [(size.HEADS, size.KV_HEADS), (8, 1)])
def test_rope_equals_float64(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    ours, reference = pair(rope.ROPE)
    cos, sin = rope.tables(torch.arange(TOKENS, device="cuda") + 7000, size.HEAD_SIZE, size.ROPE_BASE)
    qkv = random(TOKENS, (heads + 2 * kv_heads) * size.HEAD_SIZE, dtype=dtype)
    poison()
    found = ours.forward(qkv, cos, sin, heads, kv_heads)
    expected = reference.forward(qkv.double(), cos.double(), sin.double(), heads, kv_heads)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, TOLERANCE[dtype])
    back, _ = ours.backward(*found, cos, sin)
    assert_close(back, qkv.double(), 2 * TOLERANCE[dtype])


@SCALES
def test_gradient_of_rope_in_fp8(known: bool) -> None:
    functions = pair(rope.ROPE)
    cos, sin = rope.tables(torch.arange(FP8_TOKENS, device="cuda"), size.HEAD_SIZE, size.ROPE_BASE)
    gradients = [
        random(FP8_TOKENS, heads, size.HEAD_SIZE, seed=heads) * 1e-6
        for heads in (size.HEADS, size.KV_HEADS, size.KV_HEADS)
    ]
    assert_same_fp8(
        lambda which, state: functions[which].backward(*gradients, cos, sin, half=False, fp8=state)[1],
        5e9 if known else 0.0,
    )


@DTYPES
@pytest.mark.parametrize("features", [size.FEED_FORWARD, 1030])
def test_swiglu_equals_float64(features: int, dtype: torch.dtype) -> None:
    ours, reference = pair(swiglu.SWIGLU)
    gate_up, dy = random(TOKENS, 2 * features, dtype=dtype) * 3, random(TOKENS, features, dtype=dtype, seed=1)
    poison()
    assert_close(ours.forward(gate_up).y, reference.forward(gate_up.double()).y, TOLERANCE[dtype])
    found, _ = ours.backward(dy, gate_up)
    assert_close(found, reference.backward(dy.double(), gate_up.double())[0], TOLERANCE[dtype])


@SCALES
def test_swiglu_writes_fp8_and_saves_it(known: bool) -> None:
    functions = pair(swiglu.SWIGLU)
    gate_up = random(FP8_TOKENS, 2 * size.FEED_FORWARD)
    scale = 20.0 if known else 0.0
    assert_same_fp8(lambda which, state: functions[which].forward(gate_up, fp8=state, save_fp8=scaling()).y8, scale)
    assert_same_fp8(lambda which, state: functions[which].forward(gate_up, fp8=scaling(), save_fp8=state).saved, scale)
    saved, dy = cast_reference(gate_up, scaling(), E4M3, False), random(FP8_TOKENS, size.FEED_FORWARD, seed=1) * 1e-6
    assert_same_fp8(lambda which, state: functions[which].backward(dy, saved, fp8=state)[1], 1e9 if known else 0.0)


@DTYPES
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_the_input_of_an_adapter_equals_the_reference(p: float, dtype: torch.dtype) -> None:
    ours, reference = pair(lora_input.LORA_INPUT)
    mask = DropoutMask(p, torch.tensor(MASK_SEED, device="cuda"), 3)
    x, weight = random(TOKENS, size.HIDDEN, dtype=dtype), random(size.HIDDEN, dtype=dtype, seed=1)
    inverse_rms = random(TOKENS, dtype=torch.float32, seed=2).abs()
    du = random(TOKENS, size.RANK, dtype=dtype, seed=3)
    a = random(size.RANK, size.HIDDEN, dtype=dtype, seed=4)
    rows = torch.randperm(8 * TOKENS, device="cuda")[:TOKENS]
    for region in (Region(), Region(rows, 2 * size.HIDDEN, size.HIDDEN)):
        poison()
        assert torch.equal(ours.dropped(x, mask, region), reference.dropped(x, mask, region))
        found = ours.dropped_norm(x, inverse_rms, weight, mask, region)
        assert_close(found, reference.dropped_norm(x, inverse_rms, weight, mask, region).double(), TOLERANCE[dtype])
        dx = ours.add_input_gradient(x.clone(), du, a, mask, region)
        expected = reference.add_input_gradient(x.double(), du.double(), a.double(), mask, region)
        assert_close(dx, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("to", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [*size.LINEAR.values(), (130, 258)])
def test_transpose_moves_every_byte(shape: tuple[int, int], to: torch.dtype) -> None:
    byte = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
    scratch = torch.empty(byte.numel(), dtype=to, device="cuda")
    found = transpose_fp8.TRANSPOSE_FP8.function("triton")(byte.view(to), scratch)
    assert torch.equal(found.view(torch.uint8), byte.t())


LIBRARIES = pytest.mark.parametrize("name", list(causal_attention.CAUSAL_ATTENTION.fast))


def library(name: str, dtype: torch.dtype) -> CausalAttention:
    request = OperationRequest(torch.device("cuda"), dtype, {"head_size": size.HEAD_SIZE})
    reason = causal_attention.CAUSAL_ATTENTION.unsupported(name, request)
    if reason is not None:
        pytest.skip(reason)
    function: CausalAttention = causal_attention.CAUSAL_ATTENTION.function(name)
    return function


def attention_inputs(queries: int, keys: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the context; k and v are the beginnings of longer rows."""
    q, do = (random(2, queries, 16, size.HEAD_SIZE, dtype=dtype, seed=seed) for seed in (0, 1))
    k, v = (random(2, keys + 64, kv_heads, size.HEAD_SIZE, dtype=dtype, seed=seed)[:, :keys] for seed in (2, 3))
    return [q, k, v, do]


def assert_attends(found: tuple[Tensor, ...], given: list[Tensor], scale: float, dtype: torch.dtype) -> None:
    """Context, log-sum-exp and gradients are those of the reference in float64."""
    reference = causal_attention.CAUSAL_ATTENTION.reference
    *wide, do = (x.double() for x in given)
    context, saved = reference.forward(*wide, scale)
    expected = (context, saved.lse, *reference.backward(do, saved))
    tolerances = (TOLERANCE[dtype], 1e-3, *[2 * TOLERANCE[dtype]] * 3)
    for value, wanted, tolerance in zip(found, expected, tolerances, strict=True):
        assert value.shape == wanted.shape
        assert_close(value, wanted, tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "kv_heads"), [(1024, 1024, 2), (512, 2048, 2), (512, 512, 16), (320, 1000, 4), (200, 200, 1)]
)
@LIBRARIES
def test_attention_of_a_library_equals_float64(
    name: str, queries: int, keys: int, kv_heads: int, dtype: torch.dtype
) -> None:
    attention = library(name, dtype)
    *qkv, do = given = attention_inputs(queries, keys, kv_heads, dtype)
    poison()
    o, saved = attention.forward(*qkv, 0.1)
    assert o.is_contiguous()
    assert_attends((o, saved.lse, *attention.backward(do, saved)), given, 0.1, dtype)


@pytest.mark.parametrize(("queries", "keys"), [(512, 512), (256, 768)])
@LIBRARIES
def test_attention_of_a_library_in_a_graph_follows_its_inputs(name: str, queries: int, keys: int) -> None:
    attention = library(name, torch.bfloat16)
    *qkv, do = given = attention_inputs(queries, keys, 2, torch.bfloat16)

    def both() -> tuple[Tensor, ...]:
        o, saved = attention.forward(*qkv, 0.1)
        return o, saved.lse, *attention.backward(do, saved)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = both()
        for replay in range(2):
            for which, x in enumerate(given):
                x.copy_(random(*x.shape, seed=10 + 4 * replay + which))
            graph.replay()
            assert_attends(found, given, 0.1, torch.bfloat16)


def test_a_layers_operations_in_a_graph_follow_their_inputs_and_scales() -> None:
    """Norm, attention and SwiGLU, forward and backward: what is captured gives in every replay what eager code does."""
    norm, act = rms_norm.RMS_NORM.function("triton"), swiglu.SWIGLU.function("triton")
    attention = causal_attention.CAUSAL_ATTENTION.function("cudnn")
    x, weight = random(512, 1024), random(1024, seed=1)
    qkv = random(1, 512, 8, 128, seed=2)

    def step(states: list[Scaling]) -> list[Tensor]:
        normed = norm.forward(x, x, weight, 1e-5, fp8=states[0])
        activated = act.forward(normed.y, fp8=states[1], save_fp8=states[2])
        d_gate_up, _ = act.backward(x[:, :512].contiguous(), activated.saved)
        dx, dx8 = norm.backward(d_gate_up, normed.residual, normed.inverse_rms, weight, fp8=states[3])
        context, _ = attention.forward(qkv, qkv[:, :, :2], qkv[:, :, 2:4], 0.1)
        return [normed.y8.data.view(torch.uint8), activated.y8.data.view(torch.uint8), dx, dx8.scale_inverse, context]

    ours, eager = [scaling() for _ in range(4)], [scaling() for _ in range(4)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step([scaling() for _ in range(4)])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step(ours)
        for _ in range(3):
            x.mul_(1.5)
            graph.replay()
            for found, expected in zip(captured, step(eager), strict=True):
                assert torch.equal(found, expected)
        assert [state.scale.item() for state in ours] == [state.scale.item() for state in eager]
