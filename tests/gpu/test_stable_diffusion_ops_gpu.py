"""Attention, upsampling convolution, noising and loss of Stable Diffusion on a GPU: against float64, or for attention
the reference in fp32, in every implementation, captured, and without a wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.stable_diffusion.diffusion import abar
from benchmarks.stable_diffusion.ops import noising, velocity_loss
from common.nn.upsample_convolution import UpsampleConvolution
from common.ops import dense_attention, upsample_convolution
from common.ops.bench import diffusion as size
from common.ops.dense_attention import Attention
from common.ops.operation import AUTO, OperationRequest
from tests.common.ops import upsample_convolution_oracle

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA = torch.device("cuda")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}
HALF = [torch.float16, torch.bfloat16]
LIBRARIES = list(dense_attention.DENSE_ATTENTION.fast)
LENGTHS = [(*level, keys) for level in size.TOKENS_AND_HEADS for keys in (0, size.CAPTION)]
LATENT_SCALE = 0.18215


@pytest.fixture(autouse=True)
def exact_single_precision() -> Iterator[None]:
    """Products in fp32 are not rounded to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << power,), float("nan"), device="cuda") for power in range(8)]
    del held


def error(found: Tensor, formula: Tensor) -> float:
    return float((found.double() - formula.double()).norm() / formula.double().norm())


def replayed(run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What the third replay of a graph leaves, of a run that also waits for nothing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = run()
    for _ in range(3):
        for value in found:
            value.fill_(-1)
        graph.replay()
    torch.cuda.synchronize()
    return found


# Attention


def attention(name: str, dtype: torch.dtype, queries: int, keys: int) -> Attention:
    sizes = {"head_size": size.HEAD_SIZE, "queries": queries, "keys": keys}
    reason = dense_attention.DENSE_ATTENTION.unsupported(name, OperationRequest(CUDA, dtype, sizes))
    if reason is not None:
        pytest.skip(reason)
    function: Attention = dense_attention.DENSE_ATTENTION.function(name)
    return function


def attended(function: Attention, qkv: Tensor, context: Tensor | None, do: Tensor) -> list[Tensor]:
    """Context and gradients: of tokens to each other, packed, or of their queries to another's keys and values."""
    poison()
    if context is None:
        o = function.packed(qkv)
        return [o.detach(), *torch.autograd.grad(o, qkv, do)]
    o = function(qkv[:, :, 0], *context.unbind(2))
    return [o.detach(), *torch.autograd.grad(o, (qkv, context), do)]


def given(dtype: torch.dtype, rows: int, tokens: int, heads: int, keys: int) -> tuple[Tensor, Tensor | None, Tensor]:
    qkv = random(rows, tokens, 3, heads, size.HEAD_SIZE, dtype=dtype).requires_grad_()
    context = random(rows, keys, 2, heads, size.HEAD_SIZE, dtype=dtype, seed=1).requires_grad_() if keys else None
    return qkv, context, random(rows, tokens, heads, size.HEAD_SIZE, dtype=dtype, seed=2)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(("tokens", "heads", "keys"), LENGTHS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_attention_equals_single_precision(dtype: torch.dtype, tokens: int, heads: int, keys: int, name: str) -> None:
    function = attention(name, dtype, tokens, keys or tokens)
    tensors = given(dtype, 2, tokens, heads, keys)
    qkv, context, do = (None if x is None else x.detach().float() for x in tensors)
    assert qkv is not None
    assert do is not None
    qkv.requires_grad_()
    if context is not None:
        context.requires_grad_()
    found = attended(function, *tensors)
    assert found[0].is_contiguous()
    assert found[1].is_contiguous() or keys
    formulas = attended(dense_attention.DENSE_ATTENTION.reference, qkv, context, do)
    for value, formula in zip(found, formulas, strict=True):
        assert value.dtype == dtype
        assert error(value, formula) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("head_size", [8, 40, 128])
@pytest.mark.parametrize("keys", [0, 5])
def test_attention_of_other_head_sizes(name: str, head_size: int, keys: int) -> None:
    sizes = {"head_size": head_size, "queries": 130, "keys": keys or 130}
    reason = dense_attention.DENSE_ATTENTION.unsupported(name, OperationRequest(CUDA, torch.bfloat16, sizes))
    if reason is not None:
        pytest.skip(reason)
    qkv = random(3, 130, 3, 2, head_size, dtype=torch.bfloat16).requires_grad_()
    context = random(3, keys, 2, 2, head_size, dtype=torch.bfloat16, seed=1).requires_grad_() if keys else None
    do = random(3, 130, 2, head_size, dtype=torch.bfloat16, seed=2)
    found = attended(dense_attention.DENSE_ATTENTION.function(name), qkv, context, do)
    formulas = attended(dense_attention.DENSE_ATTENTION.reference, qkv, context, do)
    for value, formula in zip(found, formulas, strict=True):
        assert error(value, formula) < 2 * TOLERANCE[torch.bfloat16]  # both are rounded


@pytest.mark.parametrize("name", LIBRARIES)
def test_keys_and_values_of_one_block_among_those_of_all(name: str) -> None:
    """And a gradient that is not contiguous."""
    function = attention(name, torch.bfloat16, 256, 77)
    heads, columns = 20, 2 * 20 * size.HEAD_SIZE
    wide = random(2, 77, 3 * columns, dtype=torch.bfloat16).requires_grad_()
    q = random(2, 256, heads, size.HEAD_SIZE, dtype=torch.bfloat16, seed=1).requires_grad_()
    do = random(2, heads, 256, size.HEAD_SIZE, dtype=torch.bfloat16, seed=2).transpose(1, 2)

    def run(attend: Attention) -> list[Tensor]:
        own = wide[..., columns : 2 * columns].unflatten(-1, (2, heads, size.HEAD_SIZE))
        o = attend(q, *own.unbind(2))
        return [o.detach(), *torch.autograd.grad(o, (q, wide), do)]

    formulas = run(dense_attention.DENSE_ATTENTION.reference)
    for value, formula in zip(run(function), formulas, strict=True):
        assert error(value, formula) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("keys", [0, size.CAPTION])
def test_attention_is_captured(name: str, keys: int) -> None:
    function = attention(name, torch.float16, 1024, keys or 1024)
    tensors = given(torch.float16, 2, 1024, 10, keys)

    def run() -> list[Tensor]:
        qkv, context, do = tensors
        if context is None:
            o = function.packed(qkv)
            return [o.detach(), *torch.autograd.grad(o, qkv, do)]
        o = function(qkv[:, :, 0], *context.unbind(2))
        return [o.detach(), *torch.autograd.grad(o, (qkv, context), do)]

    for value, eager in zip(replayed(run), run(), strict=True):
        assert error(value, eager) < 1e-3  # some libraries add with atomics


def test_a_library_is_chosen() -> None:
    sizes = {"head_size": size.HEAD_SIZE, "queries": 4096, "keys": size.CAPTION}
    for dtype in HALF:
        request = OperationRequest(CUDA, dtype, sizes)
        best_first = ("flash_attention_4", "cudnn_frontend", "cudnn")
        usable = [name for name in best_first if dense_attention.DENSE_ATTENTION.unsupported(name, request) is None]
        assert dense_attention.DENSE_ATTENTION.select(AUTO, request).name == usable[0]


# Upsampling


def upsampled(name: str, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    leaves = [value.detach().requires_grad_() for value in (x, weight, bias)]
    poison()
    y = upsample_convolution.UPSAMPLE_CONVOLUTION.function(name)(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("name", upsample_convolution.UPSAMPLE_CONVOLUTION.names)
@pytest.mark.parametrize("sizes", [(2, 1280, 1280, 8, 8), (2, 640, 640, 32, 32), (3, 40, 72, 5, 9)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_upsampling_equals_float64(dtype: torch.dtype, sizes: tuple[int, ...], name: str) -> None:
    tensors = upsample_convolution_oracle.inputs(*sizes, dtype, device="cuda")
    tensors[1] = tensors[1].contiguous(memory_format=torch.channels_last)
    found = upsampled(name, *tensors)
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    tolerance = max(TOLERANCE[dtype], 5e-5)  # in fp32 cuDNN may take 3x3 convolutions by Winograd's
    for value, formula in zip(found, upsample_convolution_oracle.expected(*tensors), strict=True):
        assert value.dtype == dtype
        assert error(value, formula) < tolerance


@pytest.mark.parametrize("name", upsample_convolution.UPSAMPLE_CONVOLUTION.names)
def test_upsampling_is_captured(name: str) -> None:
    torch.manual_seed(0)
    layer = UpsampleConvolution(320).to(CUDA, torch.bfloat16, memory_format=torch.channels_last)
    assert layer.choose(name, torch.bfloat16) == name
    x = random(2, 320, 16, 16, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()
    dy = random(2, 320, 32, 32, dtype=torch.bfloat16, seed=1).contiguous(memory_format=torch.channels_last)

    def run() -> list[Tensor]:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)]

    for value, eager in zip(replayed(run), run(), strict=True):
        assert error(value, eager) < 1e-2  # weight gradients may be added with atomics


def test_summed_weights_are_those_of_pytorch_to_the_bit() -> None:
    from common.ops.upsample_convolution import triton
    from common.ops.upsample_convolution.taps import summed_taps

    for dtype in TOLERANCE:
        weight = random(1280, 640, 3, 3, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
        dtaps = random(640, 1280, 4, 4, dtype=dtype, seed=1)
        poison()
        found, expected = triton.summed_taps(weight), summed_taps(weight)
        assert torch.equal(found, expected)
        (gradient,), (wanted,) = (torch.autograd.grad(taps, weight, dtaps) for taps in (found, expected))
        assert gradient.stride() == weight.stride()
        assert error(gradient, wanted) < TOLERANCE[dtype]


# Noise and loss


def moments(samples: int, dtype: torch.dtype) -> Tensor:
    found = random(samples, 8, 64, 64, dtype=torch.float32) * 5
    found[:, 4:] -= 10
    found[0, 4, 0, 0], found[-1, 7, -1, -1] = -100.0, 25.0
    return found.to(dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_noising_equals_float64_and_the_cpu(dtype: torch.dtype, stored: torch.dtype) -> None:
    held, seed, ids = moments(32, stored), torch.tensor(-12345678901234), torch.arange(32) * 134_217_001
    exact_tables = noising.tables(abar(), LATENT_SCALE, torch.float64, torch.device("cpu"))
    expected = noising.NOISING.reference(held.cpu(), seed, ids, exact_tables)
    poison()
    found = noising.NOISING.function("triton")(
        held, seed.cuda(), ids.cuda(), noising.tables(abar(), LATENT_SCALE, dtype, CUDA)
    )
    assert torch.equal(found.t_N.cpu(), expected.t_N)
    assert found.x_t_NCHW.is_contiguous(memory_format=torch.channels_last)
    assert found.target_NCHW.is_contiguous(memory_format=torch.channels_last)
    assert (found.x_t_NCHW.dtype, found.target_NCHW.dtype) == (dtype, torch.float32)
    close = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    for value, formula in ((found.x_t_NCHW, expected.x_t_NCHW), (found.target_NCHW, expected.target_NCHW)):
        torch.testing.assert_close(value.cpu().double(), formula, rtol=close[value.dtype], atol=close[value.dtype])


@pytest.mark.parametrize("samples", [32, 2, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_loss_equals_float64(dtype: torch.dtype, samples: int) -> None:
    prediction, target = (
        random(samples, 4, 64, 64, dtype=kind, seed=seed).contiguous(memory_format=torch.channels_last)
        for seed, kind in enumerate((dtype, torch.float32))
    )
    prediction.requires_grad_()
    poison()
    loss = velocity_loss.VELOCITY_LOSS.function("triton")(prediction, target)
    (gradient,) = torch.autograd.grad(loss * 65536.0, prediction)
    difference = prediction.detach().double() - target.double()
    assert loss.item() == pytest.approx(difference.square().mean().item(), rel=1e-6)
    assert gradient.dtype == dtype
    assert error(gradient, 65536 * 2 / difference.numel() * difference) < TOLERANCE[dtype]


def test_noise_and_loss_are_captured_and_follow_seed_and_ids() -> None:
    held, seed, ids = moments(2, torch.float32), torch.tensor(3, device=CUDA), torch.arange(2, device=CUDA)
    table = noising.tables(abar(), LATENT_SCALE, torch.float16, CUDA)
    noised = noising.NOISING.function("triton")
    loss_of = velocity_loss.VELOCITY_LOSS.function("triton")

    def run() -> list[Tensor]:
        x_t, target, t_N = noised(held, seed, ids, table)
        prediction = x_t.detach().requires_grad_()
        loss = loss_of(prediction, target)
        return [x_t, target, t_N, loss.detach(), *torch.autograd.grad(loss * 1024.0, prediction)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
        before: list[Tensor] = []
        for step in range(2):
            seed.fill_(step)
            ids.add_(step)
            graph.replay()
            for value, eager in zip(captured, run(), strict=True):
                assert torch.equal(value, eager)
            assert not before or not torch.equal(captured[0], before[0])
            before = [value.clone() for value in captured]
    torch.cuda.synchronize()
