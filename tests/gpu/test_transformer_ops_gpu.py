"""Triton operations of a transformer on a GPU: fp16 and bf16 against float64, one graph for all batches, repeatable."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.ops import attention, bias_gelu, cross_entropy, dropout, dropout_add_norm
from common.ops.attention.reference import HEAD_DIMS
from common.ops.cross_entropy.reference import NO_LABEL
from common.ops.dropout.reference import DropoutMask, keep_mask
from common.ops.operation import Operation

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}
HEADS, HEAD_DIM, LENGTH = 4, 64, 512
LENGTHS = (512, 1, 5, 63, 64, 65, 300, 211, 0, 0)
TOKENS = sum(LENGTHS) + 67
Inputs = dict[str, Tensor | None]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def seed_of(value: int) -> Tensor:
    return torch.tensor(value, device="cuda")


def sequences(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    ends = torch.tensor(lengths).cumsum(0)
    starts = torch.where(torch.tensor(lengths) > 0, ends - torch.tensor(lengths), 0)
    return starts.int().cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda")


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << power,), float("nan"), device="cuda") for power in range(6)]
    del held


def gradients_of(function: Callable[..., Tensor], inputs: Inputs, d_output: Tensor) -> dict[str, Tensor]:
    leaves = {name: None if x is None else x.clone().requires_grad_() for name, x in inputs.items()}
    poison()
    y = function(*leaves.values())
    y.backward(d_output)
    return {"output": y.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf is not None}


def compare(operation: Operation, inputs: Inputs, d_output: Tensor, dtype: torch.dtype, *rest: object) -> None:
    """Triton in ``dtype`` against the reference in float64, on the same rounded inputs."""
    given = {name: None if x is None else x.to(dtype) for name, x in inputs.items()}
    wide = {name: None if x is None else x.double() for name, x in given.items()}

    def call(name: str) -> Callable[..., Tensor]:
        return lambda *tensors: operation.function(name)(*tensors, *rest)

    found = gradients_of(call("triton"), given, d_output.to(dtype))
    expected = gradients_of(call("reference"), wide, d_output.to(dtype).double())
    for name, reference in expected.items():
        error = (found[name].double() - reference).norm() / reference.norm()
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5])
def test_dropout_mask_is_the_references(p: float) -> None:
    for site, seed in ((0, 5), (1, -1), (16, 1 << 40), (77, 3)):
        y = dropout.DROPOUT.function("triton")(torch.ones(3_000_001, device="cuda"), p, seed_of(seed), site)
        assert torch.equal(y != 0, keep_mask(seed_of(seed), site, y.numel(), p))


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_attention_equals_float64(dtype: torch.dtype, head_dim: int, p: float) -> None:
    qkv, d_context = random(TOKENS, 3, HEADS, head_dim), random(TOKENS, HEADS, head_dim, seed=1)
    rest = (*sequences(), LENGTH, DropoutMask(p, seed_of(1 << 35), 7))
    compare(attention.ATTENTION, {"qkv": qkv}, d_context, dtype, *rest)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_attention_sums_the_gradient_of_a_bias(dtype: torch.dtype) -> None:
    d_context = random(TOKENS, HEADS, HEAD_DIM, dtype=dtype, seed=1)
    qkv, bias = random(TOKENS, 3, HEADS, HEAD_DIM, dtype=dtype), random(3 * HEADS * HEAD_DIM, dtype=dtype, seed=2)
    gradients = []
    for name, to in (("triton", dtype), ("reference", torch.float64)):
        given: Inputs = {"qkv": qkv.to(to), "bias": bias.to(to)}
        call = functools.partial(attention_of, attention.ATTENTION.function(name))
        gradients.append(gradients_of(call, given, d_context.to(to))["bias"].double().view(3, -1))
    found, expected = gradients
    # a key's bias adds the same to all scores of a row: of its gradient rounding alone is left
    scale = expected.norm()
    assert (found - expected).norm() < TOLERANCE[dtype] * scale
    assert found[1].norm() < TOLERANCE[dtype] * scale


def attention_of(function: Callable[..., Tensor], qkv: Tensor, bias: Tensor) -> Tensor:
    context: Tensor = function(qkv, *sequences(), LENGTH, DropoutMask(0.1, seed_of(3), 1), bias)
    return context


def test_attention_zeroes_the_rows_of_no_sequence() -> None:
    qkv = random(TOKENS, 3, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    d_context = random(TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16, seed=1)
    used = sum(LENGTHS)
    qkv[used:], d_context[used:] = float("nan"), float("nan")
    function = attention.ATTENTION.function("triton")
    found = gradients_of(
        lambda x: function(x, *sequences(), LENGTH, DropoutMask(0.1, seed_of(3), 1)), {"qkv": qkv}, d_context
    )
    for value in found.values():
        assert value[:used].isfinite().all()
        assert value[used:].eq(0).all()


@pytest.mark.parametrize("max_length", [LENGTH, 513])
def test_attention_mask_is_the_references(max_length: int) -> None:
    """Equal scores and one-hot values: the context is the mask."""
    qkv = torch.zeros(64, 3, HEADS, 64, device="cuda", dtype=torch.bfloat16)
    qkv[:, 2] = torch.eye(64, device="cuda")[:, None]
    context = attention.ATTENTION.function("triton")(
        qkv, *sequences((64,)), max_length, DropoutMask(0.1, seed_of(9), 4)
    )
    token, head = torch.arange(64, device="cuda")[:, None, None], torch.arange(HEADS, device="cuda")[None, :, None]
    index = (token * HEADS + head) * max_length + torch.arange(64, device="cuda")
    assert torch.equal(context != 0, keep_mask(seed_of(9), 4, index, 0.1))


def test_attention_in_one_graph_serves_every_batch() -> None:
    function = attention.ATTENTION.function("triton")
    qkv = random(TOKENS, 3, HEADS, HEAD_DIM, dtype=torch.bfloat16).requires_grad_()
    bias = torch.zeros(3 * HEADS * HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d_context = random(TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16, seed=1)
    starts, lengths = sequences()
    seed = seed_of(1)

    def step() -> list[Tensor]:
        context = function(qkv, starts, lengths, LENGTH, DropoutMask(0.1, seed, 3), bias)
        return [context, *torch.autograd.grad(context, (qkv, bias), d_context)]

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = step()
        seen = []
        for value, batch in enumerate((LENGTHS, (100, 512, 3, 0, 0, 0, 0, 0, 0, 0), (0,) * 10)):
            for target, source in zip((starts, lengths), sequences(batch), strict=True):
                target.copy_(source)
            seed.fill_(value)
            for tensor in captured:
                tensor.fill_(float("nan"))
            graph.replay()
            eager = step()
            torch.cuda.synchronize()
            for tensor, reference in zip(captured, eager, strict=True):
                assert torch.equal(tensor, reference)
            seen.append(captured[0].clone())
        assert not torch.equal(seen[0], seen[1])
        assert seen[2].eq(0).all()


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("absent", [(), ("bias", "residual")])
@pytest.mark.parametrize("features", [64, 1000, 1024])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_norm_equals_float64(dtype: torch.dtype, features: int, absent: tuple[str, ...], p: float) -> None:
    inputs: Inputs = {
        "x": random(3001, features),
        "bias": random(features, seed=1),
        "residual": random(3001, features, seed=2),
        "weight": random(features, seed=3),
        "norm_bias": random(features, seed=4),
    }
    inputs |= dict.fromkeys(absent)
    dy = random(3001, features, seed=5)
    compare(dropout_add_norm.DROPOUT_ADD_NORM, inputs, dy, dtype, 1e-12, DropoutMask(p, seed_of(8), 2))


def norm_inputs(tokens: int, features: int, dtype: torch.dtype) -> list[Tensor]:
    """x, bias, residual, weight and the norm's bias, which require gradients."""
    shapes = ((tokens, features), (features,), (tokens, features), (features,), (features,))
    return [random(*shape, dtype=dtype, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_norm_adds_the_gradients_of_its_readers(dtype: torch.dtype, used: tuple[int, ...]) -> None:
    inputs = norm_inputs(3001, 1024, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    d_outputs = [random(3001, 1024, dtype=dtype, seed=5 + index) for index in used]
    poison()
    found, expected = (
        dropout_add_norm.DROPOUT_ADD_NORM.function(name)(*tensors, 1e-12, DropoutMask(0.1, seed_of(8), 2), twice=True)
        for name, tensors in (("triton", inputs), ("reference", wide))
    )
    torch.autograd.backward([found[index] for index in used], d_outputs)
    torch.autograd.backward([expected[index] for index in used], [dy.double() for dy in d_outputs])
    assert found[0].data_ptr() == found[1].data_ptr()
    for x, reference in zip(inputs, wide, strict=True):
        assert x.grad is not None
        assert reference.grad is not None
        assert (x.grad.double() - reference.grad).norm() < TOLERANCE[dtype] * reference.grad.norm()


def test_norm_for_two_readers_in_a_graph_follows_its_inputs() -> None:
    inputs = norm_inputs(3001, 1024, torch.bfloat16)
    seed, first, second = seed_of(1), random(3001, 1024).bfloat16(), random(3001, 1024, seed=1).bfloat16()
    norm = dropout_add_norm.DROPOUT_ADD_NORM.function("triton")

    def step() -> list[Tensor]:
        pair = norm(*inputs, 1e-12, DropoutMask(0.1, seed, 2), twice=True)
        return [*pair, *torch.autograd.grad(pair, inputs, (first, second))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        for value in range(3):
            seed.fill_(value)
            second.mul_(-2)
            for tensor in captured:
                tensor.detach().fill_(float("nan"))
            graph.replay()
            eager = step()
            torch.cuda.synchronize()
            for tensor, reference in zip(captured, eager, strict=True):
                assert torch.equal(tensor, reference)


@pytest.mark.parametrize("shape", [(3001, 4096), (7, 1030)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_gelu_equals_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    inputs: Inputs = {"x": random(*shape) * 2, "bias": random(shape[1], seed=1)}
    compare(bias_gelu.BIAS_GELU, inputs, random(*shape, seed=2), dtype)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_cross_entropy_equals_float64(dtype: torch.dtype, inplace: bool) -> None:
    rows, vocabulary = 300, 30522
    logits = (random(rows, 30528) * 3).to(dtype)
    labels = logits[:, :vocabulary].argmax(1).int()
    labels[::3] = torch.randint(vocabulary, (rows,)).int().cuda()[::3]
    labels[::7] = NO_LABEL
    weights = random(rows, seed=1)
    wide = logits.double().requires_grad_()
    losses, correct = cross_entropy.CROSS_ENTROPY.reference(wide, labels, vocabulary)
    losses.backward(weights.double())
    logits[:, vocabulary:], logits[::7] = float("nan"), float("nan")
    leaf = logits.clone().requires_grad_()
    found, found_correct = cross_entropy.CROSS_ENTROPY.function("triton")(leaf, labels, vocabulary, inplace)
    (gradient,) = torch.autograd.grad(found, leaf, weights)
    assert torch.equal(found_correct, correct)
    assert gradient[::7].eq(0).all()
    assert wide.grad is not None
    assert (found.double() - losses).norm() < 1e-5 * losses.norm()
    assert (gradient.double() - wide.grad).norm() < TOLERANCE[dtype] * wide.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_evaluation_are_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    from benchmarks.bert.model import _wide_logits

    hidden, table, bias = (
        random(300, 1024, dtype=dtype),
        random(30528, 1024, dtype=dtype, seed=1),
        random(30528).to(dtype),
    )
    logits = _wide_logits(hidden, table, bias)
    expected = hidden.double() @ table.double().t() + bias.double()
    assert logits.dtype == torch.float32
    assert (logits.double() - expected).norm() < 1e-5 * expected.norm()


def test_results_are_the_same_in_every_run() -> None:
    x, residual = random(5000, 256, dtype=torch.bfloat16), random(5000, 256, dtype=torch.bfloat16, seed=1)
    parameters = {name: random(256, dtype=torch.bfloat16, seed=2) for name in ("bias", "weight", "norm_bias")}
    norm = dropout_add_norm.DROPOUT_ADD_NORM.function("triton")
    qkv = random(TOKENS, 3, HEADS, HEAD_DIM, dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        inputs: Inputs = {"x": x, "residual": residual, **parameters}
        first = gradients_of(
            lambda x, residual, bias, weight, norm_bias: norm(
                x, bias, residual, weight, norm_bias, 1e-12, DropoutMask(0.1, seed_of(5), 1)
            ),
            inputs,
            x,
        )
        second = gradients_of(
            lambda qkv: attention.ATTENTION.function("triton")(
                qkv, *sequences(), LENGTH, DropoutMask(0.1, seed_of(5), 2)
            ),
            {"qkv": qkv},
            qkv[:, 0],
        )
        return [*first.values(), *second.values()]

    for one, other in zip(run(), run(), strict=True):
        assert torch.equal(one, other)
