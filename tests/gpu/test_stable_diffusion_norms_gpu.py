"""The norms and gates of Stable Diffusion's U-Net on a GPU: against float64 at the sizes of its layers, captured,
repeatable, and without overflow of offsets in large tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from common.ops import add_layer_norm, bias_gradient, geglu, group_norm
from common.ops.add_layer_norm.reference import add_layer_norm_reference
from common.ops.bench.latent_unet import NORMS, TRANSFORMERS, Norm
from common.ops.geglu.reference import geglu_reference
from common.ops.group_norm import triton as group_norm_triton
from common.ops.group_norm.reference import group_norm_reference
from common.ops.operation import AUTO, Operation, OperationRequest

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}
DTYPES = list(TOLERANCE)
OFFSETS = 1 << 31
"""Elements that 32 bits don't count."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << power,), float("nan"), device="cuda") for power in range(8)]
    del held


def pictures(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return random(*shape, dtype=dtype, seed=seed).contiguous(memory_format=torch.channels_last)


def results_and_gradients(
    function: Callable[..., Sequence[Tensor]], leaves: Sequence[Tensor], d_results: Sequence[Tensor]
) -> list[Tensor]:
    own = [value.detach().requires_grad_() for value in leaves]
    poison()
    results = function(*own)
    return [*(y.detach() for y in results), *torch.autograd.grad(results, own, d_results)]


def check(
    function: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    leaves: Sequence[Tensor],
    d_results: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Results and all gradients against the reference in float64, on the same rounded inputs."""
    found = results_and_gradients(function, leaves, d_results)
    wide = [value.double() for value in leaves]
    expected = results_and_gradients(reference, wide, [value.double() for value in d_results])
    for index, (value, wanted) in enumerate(zip(found, expected, strict=True)):
        error = (value.double() - wanted).norm() / wanted.norm()
        assert error < TOLERANCE[dtype], f"tensor {index}: relative error {error:.2e}"


def check_repeatable_and_captured(run: Callable[[], list[Tensor]]) -> None:
    """The same bits again, from a graph too, without waiting for the device."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = [value.clone() for value in run()]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
        for value in captured:
            value.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    for value, same, replayed in zip(expected, again, captured, strict=True):
        assert torch.equal(value, same)
        assert torch.equal(value, replayed)


# Group norm


def norm_tensors(norm: Norm, samples: int, dtype: torch.dtype, parameters: torch.dtype) -> list[Tensor]:
    """Inputs, weight, bias, and what is added."""
    channels = sum(norm.parts)
    found = [
        pictures(samples, part, norm.size, norm.size, dtype=dtype, seed=index) + 1
        for index, part in enumerate(norm.parts)
    ]
    found += [(1 + random(channels, seed=2) / 2).to(parameters), (random(channels, seed=3) / 2).to(parameters)]
    return [*found, *([random(samples, channels, dtype=dtype, seed=4)] if norm.added else [])]


def norm_function(implementation: Callable[..., Any], norm: Norm) -> Callable[..., tuple[Tensor, ...]]:
    parts = len(norm.parts)

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        inputs, (weight, bias), rest = leaves[:parts], leaves[parts : parts + 2], leaves[parts + 2 :]
        groups, epsilon = (32, 1e-6) if norm.transformer else (16, 1e-5)
        options = {"silu": not norm.transformer, "added_NC": rest[0] if rest else None}
        if norm.added:
            return (implementation(inputs, weight, bias, groups, epsilon, **options),)
        y, kept = implementation(inputs, weight, bias, groups, epsilon, **options, keep=True)
        return (y, *kept)

    return call


def norm_gradients(norm: Norm, samples: int, dtype: torch.dtype) -> list[Tensor]:
    parts = (sum(norm.parts), *(() if norm.added else norm.parts))
    return [
        pictures(samples, part, norm.size, norm.size, dtype=dtype, seed=5 + index) for index, part in enumerate(parts)
    ]


@pytest.mark.parametrize("samples", [2, 32, 64])
@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_norm_equals_float64(dtype: torch.dtype, norm: Norm, samples: int) -> None:
    function = group_norm.GROUP_NORM.function("triton")
    leaves, d_results = norm_tensors(norm, samples, dtype, dtype), norm_gradients(norm, samples, dtype)
    check(norm_function(function, norm), norm_function(group_norm_reference, norm), leaves, d_results, dtype)


@pytest.mark.parametrize("way", ["slabs", "several launches"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    "norm",
    [
        Norm((320,), 64),
        Norm((1920,), 32, added=True),
        Norm((640, 320), 16),
        Norm((2560,), 16, transformer=True),
        Norm((48, 16), 7),
        Norm((96,), 33, transformer=True),
        Norm((320,), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_group_norm_of_any_size_in_either_way_equals_float64(
    dtype: torch.dtype, norm: Norm, samples: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, tile in group_norm_triton.SLAB_TILES.items():
        most = 0 if way == "several launches" else 1 << 30
        monkeypatch.setitem(group_norm_triton.SLAB_TILES, name, tile._replace(most=most))
    function = group_norm.GROUP_NORM.function("triton")
    leaves, d_results = norm_tensors(norm, samples, dtype, torch.float32), norm_gradients(norm, samples, dtype)
    check(norm_function(function, norm), norm_function(group_norm_reference, norm), leaves, d_results, dtype)


@pytest.mark.parametrize(
    "norm",
    [Norm((320,), 64, added=True), Norm((640, 320), 64), Norm((1280, 640), 32), Norm((1280,), 8, transformer=True)],
    ids=str,
)
def test_group_norm_is_repeatable_and_captured(norm: Norm) -> None:
    leaves = [value.requires_grad_() for value in norm_tensors(norm, 4, torch.bfloat16, torch.bfloat16)]
    d_results = norm_gradients(norm, 4, torch.bfloat16)
    function = norm_function(group_norm.GROUP_NORM.function("triton"), norm)

    def run() -> list[Tensor]:
        results = function(*leaves)
        # the inputs that are handed on are no results of the graph
        return [results[0].detach(), *torch.autograd.grad(results, leaves, d_results)]

    check_repeatable_and_captured(run)


@pytest.mark.parametrize(("channels", "size"), [(320, 64), (640, 32)])
def test_group_norm_counts_its_elements_in_64_bits(channels: int, size: int) -> None:
    samples = OFFSETS // (channels * size**2) + 1
    x = torch.empty((samples, channels, size, size), dtype=torch.float16, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last).normal_(generator=torch.Generator("cuda").manual_seed(0))
    weight, bias = random(channels, dtype=torch.float16, seed=1), random(channels, dtype=torch.float16, seed=2)
    function = group_norm.GROUP_NORM.function("triton")
    last = []
    for given in (x, x[-2:]):
        leaf = given.detach().requires_grad_()
        y = function((leaf,), weight, bias, 16, 1e-5, silu=True)
        (dx,) = torch.autograd.grad(y, leaf, given)
        last.append((y[-2:].detach().clone(), dx[-2:].clone()))
        del leaf, y, dx
    for large, small in zip(*last, strict=True):
        # programs differ in number, and so their sums in the last bits
        assert torch.allclose(large.float(), small.float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("mean", [30.0, 1000.0])
@pytest.mark.parametrize(("channels", "size"), [(320, 64), (640, 32), (640, 16), (1280, 8)])
def test_group_norm_far_from_zero_keeps_its_variance(channels: int, size: int, mean: float) -> None:
    x = pictures(2, channels, size, size, dtype=torch.float32, seed=0) + mean
    weight, bias = torch.ones(channels, device="cuda"), torch.zeros(channels, device="cuda")
    found = group_norm.GROUP_NORM.function("triton")((x,), weight, bias, 16, 1e-5, silu=False)
    expected = group_norm_reference((x.double(),), weight.double(), bias.double(), 16, 1e-5, silu=False)
    assert isinstance(expected, Tensor)
    assert float((found.double() - expected).abs().max()) < 1e-6 * mean


@pytest.mark.parametrize("norm", [norm for norm in NORMS if not norm.added and len(norm.parts) == 1], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_apex_equals_float64(dtype: torch.dtype, norm: Norm) -> None:
    groups = 32 if norm.transformer else 16
    request = OperationRequest(torch.device("cuda"), dtype, {"channels": norm.parts[0], "groups": groups})
    reason = group_norm.GROUP_NORM.unsupported("apex", request)
    if reason is not None:
        pytest.skip(reason)
    leaves, d_results = norm_tensors(norm, 2, dtype, dtype), norm_gradients(norm, 2, dtype)
    function = norm_function(group_norm.GROUP_NORM.function("apex"), norm)
    check(function, norm_function(group_norm_reference, norm), leaves, d_results, dtype)


# GEGLU


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "features"),
    [(samples * side**2, 4 * channels) for samples, (channels, side) in itertools.product((2, 32), TRANSFORMERS)]
    + [(1, 1), (77, 100), (4097, 320)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_geglu_equals_float64(dtype: torch.dtype, rows: int, features: int, bias: bool) -> None:
    leaves = [random(rows, 2 * features, dtype=dtype) * 2]
    leaves += [random(2 * features, dtype=dtype, seed=1)] if bias else []
    function = geglu.GEGLU.function("triton")
    check(
        lambda x, b=None: [function(x, b)],
        lambda x, b=None: [geglu_reference(x, b)],
        leaves,
        [random(rows, features, dtype=dtype, seed=2)],
        dtype,
    )


def test_geglu_is_repeatable_and_captured() -> None:
    x, bias = random(8192, 2560, dtype=torch.bfloat16), random(2560, dtype=torch.bfloat16, seed=1)
    leaves, dy = [x.requires_grad_(), bias.requires_grad_()], random(8192, 1280, dtype=torch.bfloat16, seed=2)

    def run() -> list[Tensor]:
        y = geglu.GEGLU.function("triton")(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    check_repeatable_and_captured(run)


def test_geglu_counts_its_elements_in_64_bits() -> None:
    rows = OFFSETS // 2560 + 64
    x = torch.empty((rows, 2560), dtype=torch.float16, device="cuda").normal_()
    dy = torch.empty((rows, 1280), dtype=torch.float16, device="cuda").normal_()
    bias = random(2560, dtype=torch.float16)
    last = []
    for given, d_given in ((x, dy), (x[-64:], dy[-64:])):
        leaf = given.detach().requires_grad_()
        y = geglu.GEGLU.function("triton")(leaf, bias)
        (dx,) = torch.autograd.grad(y, leaf, d_given)
        last.append((y[-64:].detach().clone(), dx[-64:].clone()))
        del leaf, y, dx
    assert all(torch.equal(large, small) for large, small in zip(*last, strict=True))


# Residual addition and LayerNorm


@pytest.mark.parametrize("parts", ["neither", "added", "residual", "both"])
@pytest.mark.parametrize(
    ("rows", "features"),
    [(samples * side**2, channels) for samples, (channels, side) in itertools.product((2, 32), TRANSFORMERS)]
    + [(1, 7), (1001, 1024), (33, 8192)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_layer_norm_equals_float64(dtype: torch.dtype, rows: int, features: int, parts: str) -> None:
    leaves = [random(rows, features, dtype=dtype), random(features, dtype=dtype, seed=1)]
    leaves += [random(features, dtype=dtype, seed=2)]
    leaves += [random(rows, features, dtype=dtype, seed=3) + 1] if parts in ("residual", "both") else []
    leaves += [random(features, dtype=dtype, seed=4)] if parts in ("added", "both") else []

    def call(implementation: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def with_parts(x: Tensor, weight: Tensor, bias: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
            residual = rest[0] if parts in ("residual", "both") else None
            added = rest[-1] if parts in ("added", "both") else None
            return implementation(x, residual, weight, bias, 1e-5, added_C=added)

        return with_parts

    d_results = [random(rows, features, dtype=dtype, seed=5 + index) for index in range(2)]
    function = add_layer_norm.ADD_LAYER_NORM.function("triton")
    check(call(function), call(add_layer_norm_reference), leaves, d_results, dtype)


def test_add_layer_norm_is_repeatable_and_captured() -> None:
    leaves = [random(8192, 640, dtype=torch.bfloat16, seed=seed) for seed in (0, 1)]
    leaves += [random(640, dtype=torch.bfloat16, seed=seed) for seed in (2, 3, 4)]
    leaves = [value.requires_grad_() for value in leaves]
    d_results = [random(8192, 640, dtype=torch.bfloat16, seed=seed) for seed in (5, 6)]

    def run() -> list[Tensor]:
        x, residual, weight, bias, added = leaves
        results = add_layer_norm.ADD_LAYER_NORM.function("triton")(x, residual, weight, bias, 1e-5, added_C=added)
        return [*(y.detach() for y in results), *torch.autograd.grad(results, leaves, d_results)]

    check_repeatable_and_captured(run)


def test_add_layer_norm_counts_its_elements_in_64_bits() -> None:
    rows = OFFSETS // 320 + 64
    x = torch.empty((rows, 320), dtype=torch.float16, device="cuda").normal_()
    weight, bias = random(320, dtype=torch.float16), random(320, dtype=torch.float16, seed=1)
    last = []
    for given in (x, x[-64:]):
        leaf = given.detach().requires_grad_()
        total, normed = add_layer_norm.ADD_LAYER_NORM.function("triton")(leaf, leaf, weight, bias, 1e-5)
        (dx,) = torch.autograd.grad([total, normed], leaf, [given, given])
        last.append((total[-64:].detach().clone(), normed[-64:].detach().clone(), dx[-64:].clone()))
        del leaf, total, normed, dx
    assert all(torch.equal(large, small) for large, small in zip(*last, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "side"), TRANSFORMERS)
def test_gradients_of_biases_are_the_sums_over_rows(channels: int, side: int, dtype: torch.dtype) -> None:
    d_RC = random(32 * side**2 + 3, channels, dtype=dtype)
    found, expected = bias_gradient.BIAS_GRADIENT.function("triton")(d_RC, dtype), d_RC.double().sum(0)
    assert (found.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()


def test_gradients_of_biases_are_repeatable_and_captured() -> None:
    d_RC = random(32 * 64**2, 320, dtype=torch.float16)
    check_repeatable_and_captured(lambda: [bias_gradient.BIAS_GRADIENT.function("triton")(d_RC, torch.float16)])


@pytest.mark.parametrize(
    ("operation", "sizes"),
    [
        (bias_gradient.BIAS_GRADIENT, {}),
        (group_norm.GROUP_NORM, {"channels": 320, "groups": 16}),
        (group_norm.GROUP_NORM, {"channels": 960, "groups": 16, "inputs": 2}),
        (geglu.GEGLU, {}),
        (add_layer_norm.ADD_LAYER_NORM, {"features": 1280}),
    ],
)
def test_a_gpu_takes_the_kernels(operation: Operation, sizes: dict[str, int]) -> None:
    request = OperationRequest(torch.device("cuda"), torch.float16, sizes)
    assert operation.select(AUTO, request).name == "triton"
