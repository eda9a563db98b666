"""Test group norm, LayerNorm after addition, GEGLU and bias gradients on code paths that small inputs do not take.

tests/test_interpreted_kernels.py runs this file. Fresh memory holds NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from common.ops import bias_gradient
from common.ops.add_layer_norm import add_layer_norm_reference
from common.ops.add_layer_norm import triton as norm_triton
from common.ops.geglu import triton as geglu_triton
from common.ops.group_norm import GROUP_NORM, group_norm_reference
from common.ops.group_norm import triton as group_norm_triton
from common.ops.group_norm.cases import CASES
from common.ops.operation import AUTO, OperationRequest
from common.ops.tile import Tile
from tests.capturable import Capturable
from tests.operation_checks import check

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

# Group norm


CPU = torch.device("cpu")
PATHS = ("held", "read again", "several launches", "several launches of many tiles")
FEW = {"samples": 2, "side": (5, 3), "inputs": 1, "keep": True, "added": False}
ONE = {**FEW, "channels": 16, "groups": 4}
ADDED = {**ONE, "added": True, "keep": False}
ODD_PAIR = {**FEW, "channels": 24, "groups": 4, "inputs": 2, "first": 6, "silu": False}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(*parts: int, side: tuple[int, int] = (5, 3), mean: float = 1.0) -> list[Tensor]:
    """Return inputs of two samples, weight and bias."""
    inputs = [random(2, part, *side, seed=index) + mean for index, part in enumerate(parts)]
    inputs = [x.contiguous(memory_format=torch.channels_last) for x in inputs]
    return [*inputs, 1 + random(sum(parts), seed=2) / 2, random(sum(parts), seed=3) / 2]


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one of the code paths that depend on sizes, with small tiles."""
    path: str = request.param
    slabs, tiles = group_norm_triton.SLAB_TILES, group_norm_triton.TILES
    for name in list(slabs):
        most = 0 if path.startswith("several") else 1 << 20
        held = 1 << 20 if path == "held" else 0
        slab = {"most": most, "columns": 8, "held": held, "elements": 128, "elements_per_warp": 256, "stages": 1}
        monkeypatch.setitem(slabs, name, slabs[name].replace(**slab))
    if path.endswith("many tiles"):
        for name in list(tiles):
            # 15 pixels are four tiles: of 16 channels for three programs, of more for one
            monkeypatch.setitem(tiles, name, Tile(columns=16, elements=64, warps=4, programs=6, stages=1))
    return path


@pytest.mark.parametrize(
    ("path", "dtype", "sizes"),
    [
        ("held", torch.float32, {**ONE, "side": (13, 5), "groups": 16}),
        ("held", torch.bfloat16, {**FEW, "channels": 48, "groups": 16, "inputs": 2, "first": 16, "keep": False}),
        ("read again", torch.float16, {**ADDED, "parameters": torch.float32}),
        ("read again", torch.float32, ODD_PAIR),
        ("read again", torch.float32, {**ONE, "side": (3, 1), "channels": 96, "groups": 32, "silu": False}),
        ("several launches", torch.float32, ADDED),
        ("several launches", torch.float32, ODD_PAIR),
        ("several launches", torch.float16, {**ONE, "side": (4, 4)}),
        ("several launches", torch.float32, {**ODD_PAIR, "side": (4, 4), "keep": False}),
        ("several launches of many tiles", torch.float32, ADDED),
        (
            "several launches of many tiles",
            torch.float32,
            {**FEW, "samples": 1, "channels": 30, "groups": 2, "inputs": 2, "first": 20},
        ),
    ],
    indirect=["path"],
)
def test_each_path_gives_what_the_reference_does(path, dtype, sizes):
    check(GROUP_NORM, "triton", CASES[0], sizes, dtype, CPU)


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize(("mean", "apart", "limit"), [(300.0, 0.0, 1e-3), (1.0, 50.0, 1e-5)])
def test_values_and_channels_far_from_zero_keep_the_variance_of_their_group(mean, apart, limit, path):
    """After an embedding of time, the means of channels differ by more than their deviations."""
    x, weight, bias = tensors(16, side=(8, 8), mean=mean)
    added = apart * random(2, 16, seed=7)
    found = group_norm_triton.group_norm((x,), weight, bias, 4, 1e-5, silu=True, added_NC=added)
    wide = (x.double(),), weight.double(), bias.double()
    expected = group_norm_reference(*wide, 4, 1e-5, silu=True, added_NC=added.double())
    assert (found - expected).abs().max() < limit


@pytest.mark.parametrize(
    ("path", "parts"), [("several launches", (8,)), ("held", (4, 8)), ("read again", (4, 8))], indirect=["path"]
)
def test_gradients_that_do_not_come_are_none(parts, path):
    for used in itertools.product((False, True), repeat=1 + len(parts)):
        if any(used):
            found = gradients(group_norm_triton.group_norm, parts, used, wide=False)
            expected = gradients(group_norm_reference, parts, used, wide=True)
            for value, reference in zip(found, expected, strict=True):
                assert (value is None) == (reference is None)
                if value is not None:
                    assert (value.double() - reference).norm() < 3e-6 * reference.norm()


def gradients(
    function: Callable[..., Any], parts: tuple[int, ...], used: tuple[bool, ...], *, wide: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs if only some results are used."""
    leaves = [(x.double() if wide else x).requires_grad_() for x in tensors(*parts)]
    y, kept = function(tuple(leaves[: len(parts)]), *leaves[len(parts) :], 2, 1e-5, silu=True, keep=True)
    read = [value for value, wanted in zip((y, *kept), used, strict=True) if wanted]
    d_read = [random(*value.shape, seed=8 + index).to(value.dtype) for index, value in enumerate(read)]
    return torch.autograd.grad(read, leaves, d_read, allow_unused=True)


def test_the_gradient_of_a_kept_input_is_added_in_the_pass_that_writes_it(monkeypatch):
    given = []
    original = group_norm_triton.backward

    def record(dy: Tensor, kept: Any, *rest: Any) -> Any:
        given.append(list(kept))
        return original(dy, kept, *rest)

    monkeypatch.setattr(group_norm_triton, "backward", record)
    x, weight, bias = (value.requires_grad_() for value in tensors(16))
    y, (kept,) = group_norm_triton.group_norm((x,), weight, bias, 4, 1e-5, silu=True, keep=True)
    assert kept.data_ptr() == x.data_ptr()
    d_kept = random(2, 16, 5, 3, seed=9)
    torch.autograd.backward([y, kept], [random(2, 16, 5, 3, seed=8), d_kept])
    assert len(given) == 1
    assert torch.equal(given[0][0], d_kept)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_result_is_the_same(mode):
    x, weight, bias = tensors(16)
    expected = group_norm_triton.group_norm((x.requires_grad_(),), weight, bias, 4, 1e-5, silu=True)
    with mode():
        y, (kept,) = group_norm_triton.group_norm((x,), weight, bias, 4, 1e-5, silu=True, keep=True)
    assert not y.requires_grad
    assert torch.equal(y, expected)
    assert kept.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("parts", "groups", "pixels", "expected"),
    [
        ((320,), 16, 4096, None),
        ((640,), 16, 1024, (1, False)),
        ((1280, 640), 16, 1024, None),
        ((320,), 32, 1024, (4, False)),
        ((640,), 16, 256, (1, True)),
        ((1280, 1280), 16, 64, (1, True)),
    ],
)
def test_slabs_are_a_group_or_as_many_as_are_worth_reading(parts, groups, pixels, expected):
    sizes = group_norm_triton.Sizes(2, pixels, parts, groups)
    slab = group_norm_triton.cut_slabs(group_norm_triton.SLAB_TILES["forward"], sizes)
    assert (None if slab is None else (slab.arguments["GROUPS"], slab.arguments["HELD"])) == expected


# GEGLU, LayerNorm after addition, and bias gradients


SUMS = bias_gradient.BIAS_GRADIENT.function("triton")


def test_geglu_far_from_zero_is_the_product_or_nothing():
    x = torch.tensor([[3.0, 3.0, 3.0, 30.0, -30.0, 0.0]], requires_grad=True)
    y = geglu_triton.geglu(x, None)
    y.backward(torch.ones(1, 3))
    assert y.tolist() == [[90.0, 0.0, 0.0]]
    assert x.grad.tolist() == [[30.0, 0.0, 0.0, 3.0, 0.0, 1.5]]


def test_layer_norm_far_from_zero_keeps_its_variance():
    x, weight, bias = random(4, 256) + 1e3, random(256, seed=1), random(256, seed=2)
    _, normed = norm_triton.add_layer_norm(x, None, weight, bias, 1e-5)
    _, expected = add_layer_norm_reference(x.double(), None, weight.double(), bias.double(), 1e-5)
    assert (normed - expected).abs().max() < 1e-3


def test_layer_norm_with_nothing_to_add_writes_no_sum_and_adds_both_gradients_in_its_pass(monkeypatch):
    given = []
    original = norm_triton.backward

    def record(d_sum: Tensor | None, *rest: object) -> tuple[Tensor, Tensor]:
        given.append(d_sum)
        return original(d_sum, *rest)

    monkeypatch.setattr(norm_triton, "backward", record)
    x, weight, bias = (value.requires_grad_() for value in (random(4, 32), random(32, seed=1), random(32, seed=2)))
    total, normed = norm_triton.add_layer_norm(x, None, weight, bias, 1e-5)
    assert total.data_ptr() == x.data_ptr()
    d_total = random(4, 32, seed=3)
    torch.autograd.backward([total, normed], [d_total, random(4, 32, seed=4)])
    assert len(given) == 1
    assert torch.equal(given[0], d_total)


def test_sums_of_rows_are_capturable():
    with Capturable():
        SUMS(random(9, 20)[:, :12], torch.float32)


def test_half_precision_sums_beyond_its_own_steps():
    """In fp16, 4,096 + 1 is rounded to 4,096."""
    assert SUMS(torch.ones(5000, 4, dtype=torch.float16), torch.float32).tolist() == [5000.0] * 4


def test_double_precision_is_left_to_pytorch():
    request = OperationRequest(torch.device("cpu"), torch.float64, {})
    assert bias_gradient.BIAS_GRADIENT.select(AUTO, request).name == "reference"
