"""The Triton kernels of group norm against the reference in float64; run by tests/test_interpreted_kernels.py.
Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from common.ops.group_norm import triton as group_norm_triton
from common.ops.group_norm.reference import group_norm_reference
from common.ops.tiling.tiles import Tile

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Case(NamedTuple):
    """A call: channels of each input, groups, pixels, and what is asked for."""

    parts: tuple[int, ...]
    groups: int
    size: tuple[int, int] = (5, 3)
    samples: int = 2
    silu: bool = True
    added: bool = False
    keep: bool = False
    dtype: torch.dtype = torch.float32
    parameters: torch.dtype | None = None
    mean: float = 1.0


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(case: Case) -> dict[str, Tensor]:
    """The inputs of a call."""
    channels, parameters = sum(case.parts), case.parameters or case.dtype
    found = {
        f"input {index}": (random(case.samples, part, *case.size, seed=index) + case.mean).to(case.dtype)
        for index, part in enumerate(case.parts)
    }
    found = {name: x.contiguous(memory_format=torch.channels_last) for name, x in found.items()}
    found["weight"] = (1 + random(channels, seed=2) / 2).to(parameters)
    found["bias"] = (random(channels, seed=3) / 2).to(parameters)
    if case.added:
        found["added"] = random(case.samples, channels, seed=4).to(case.dtype)
    return found


def run(function: Callable[..., Any], case: Case, wide: bool) -> dict[str, Tensor]:
    """The result and all gradients."""
    leaves = {name: (x.double() if wide else x).detach().requires_grad_() for name, x in tensors(case).items()}
    inputs = tuple(leaves[f"input {index}"] for index in range(len(case.parts)))
    result = function(
        inputs, leaves["weight"], leaves["bias"], case.groups, 1e-5,
        silu=case.silu, added_NC=leaves.get("added"), keep=case.keep,
    )  # fmt: skip
    y, kept = result if case.keep else (result, ())
    for x, same in zip(inputs, kept, strict=case.keep):
        assert torch.equal(x, same)
    assert y.is_contiguous(memory_format=torch.channels_last)
    read = [y, *kept]
    d_read = [random(*value.shape, seed=5 + index).to(case.dtype).to(value.dtype) for index, value in enumerate(read)]
    torch.autograd.backward(read, d_read)
    return {"result": y.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def check(case: Case) -> None:
    found, expected = run(group_norm_triton.group_norm, case, False), run(group_norm_reference, case, True)
    given = tensors(case)
    assert found.keys() == expected.keys() == {"result", *given}
    for name, reference in expected.items():
        assert found[name].dtype == given.get(name, given["input 0"]).dtype
        error = (found[name].double() - reference).norm() / reference.norm().clamp(min=1e-6)
        assert error < TOLERANCE[case.dtype], f"{name}: relative error {error:.2e}"


FEATURES = {
    "16 groups of two": Case((32,), 16, samples=1),
    "32 groups without activation": Case((96,), 32, silu=False, size=(3, 1), samples=1),
    "a group for each channel": Case((16,), 16),
    "one group of all": Case((24,), 1),
    "added": Case((16,), 4, added=True),
    "kept": Case((16,), 4, keep=True),
    "a pair whose parts share a group": Case((20, 10), 2),
    "a kept pair": Case((32, 16), 16, keep=True),
    "a kept pair of odd parts": Case((6, 18), 4, keep=True, silu=False),
    "a single pixel": Case((24,), 3, (1, 1)),
    "a pixel more than a tile": Case((16,), 4, (13, 5)),
    "whole tiles": Case((16,), 4, (4, 4), keep=True),
    "tiles whole in pixels but not in channels": Case((6, 18), 4, (4, 4)),
    "fp16": Case((16,), 4, dtype=torch.float16, keep=True),
    "bf16": Case((16, 32), 16, dtype=torch.bfloat16),
    "fp16 with wide parameters": Case((16,), 4, dtype=torch.float16, parameters=torch.float32, added=True),
}
WAYS = ("held", "read again", "several launches", "several launches of many tiles")
QUICK = {
    ("held", "16 groups of two"),
    ("held", "added"),
    ("held", "a pair whose parts share a group"),
    ("held", "a kept pair of odd parts"),
    ("held", "bf16"),
    ("read again", "32 groups without activation"),
    ("read again", "added"),
    ("read again", "a kept pair of odd parts"),
    ("read again", "fp16 with wide parameters"),
    ("several launches", "added"),
    ("several launches", "a kept pair of odd parts"),
    ("several launches", "fp16"),
    ("several launches", "whole tiles"),
    ("several launches", "tiles whole in pixels but not in channels"),
    ("several launches of many tiles", "added"),
    ("several launches of many tiles", "a pair whose parts share a group"),
}
"""What runs whenever tests do: each feature in one of the ways at least, each way with several features."""


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send everything through one of the ways that sizes choose between, in small tiles."""
    slabs, tiles = group_norm_triton.SLAB_TILES, group_norm_triton.TILES
    for name in list(slabs):
        most = 0 if way.startswith("several") else 1 << 20
        held = 1 << 20 if way == "held" else 0
        monkeypatch.setitem(slabs, name, group_norm_triton.SlabTile(most, 8, held, 128, 256, 1))
    if way.endswith("many tiles"):
        for name in list(tiles):
            # 15 pixels are four tiles: of 16 channels for three programs, of more for one
            monkeypatch.setitem(tiles, name, Tile(16, 64, 4, 6, 1))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the ways."""
    take(request.param, monkeypatch)
    way: str = request.param
    return way


@pytest.mark.parametrize(
    ("way", "feature"),
    [
        pytest.param(way, feature, marks=[] if (way, feature) in QUICK else [pytest.mark.slow])
        for way, feature in itertools.product(WAYS, FEATURES)
    ],
    indirect=["way"],
)
def test_group_norm_equals_plain(way: str, feature: str) -> None:
    check(FEATURES[feature])


def test_group_norm_far_from_zero_keeps_its_variance(way: str) -> None:
    case = Case((16,), 4, (8, 8), silu=False, mean=300.0)
    x, weight, bias = tensors(case).values()
    found = group_norm_triton.group_norm((x,), weight, bias, 4, 1e-5, silu=False)
    expected = group_norm_reference((x.double(),), weight.double(), bias.double(), 4, 1e-5, silu=False)
    assert (found - expected).abs().max() < 1e-3


def test_channels_far_from_each_other_keep_the_variance_of_their_group(way: str) -> None:
    """As after an embedding of time: the means of channels differ by more than their deviations."""
    x, weight, bias = tensors(Case((16,), 4, (4, 4))).values()
    added = 50 * random(2, 16, seed=7)
    found = group_norm_triton.group_norm((x,), weight, bias, 4, 1e-5, silu=True, added_NC=added)
    wide = (x.double(),), weight.double(), bias.double()
    expected = group_norm_reference(*wide, 4, 1e-5, silu=True, added_NC=added.double())
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("way", "case"),
    [
        ("several launches", Case((8,), 2, keep=True, samples=1)),
        ("held", Case((4, 8), 2, keep=True, samples=1)),
        pytest.param("read again", Case((4, 8), 2, keep=True), marks=pytest.mark.slow),
        pytest.param("several launches of many tiles", Case((4, 8), 2, keep=True), marks=pytest.mark.slow),
    ],
    indirect=["way"],
)
def test_gradients_that_do_not_come_are_none(case: Case, way: str) -> None:
    for used in itertools.product((False, True), repeat=1 + len(case.parts)):
        if any(used):
            found, expected = (gradients(f, case, used, w) for f, w in (("triton", False), ("reference", True)))
            assert found.keys() == expected.keys()
            for name, reference in expected.items():
                error = (found[name].double() - reference).norm() / reference.norm()
                assert error < 3e-6, f"{used} {name}: relative error {error:.2e}"


def gradients(function: str, case: Case, used: tuple[bool, ...], wide: bool) -> dict[str, Tensor]:
    """Of all inputs, where only some results are read."""
    leaves = {name: (x.double() if wide else x).detach().requires_grad_() for name, x in tensors(case).items()}
    inputs = tuple(leaves[f"input {index}"] for index in range(len(case.parts)))
    call = {"triton": group_norm_triton.group_norm, "reference": group_norm_reference}[function]
    y, kept = call(inputs, leaves["weight"], leaves["bias"], case.groups, 1e-5, silu=True, keep=True)
    read = [value for value, wanted in zip((y, *kept), used, strict=True) if wanted]
    torch.autograd.backward(read, [random(*value.shape, seed=8 + i).to(value.dtype) for i, value in enumerate(read)])
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize("way", ["held", pytest.param("several launches", marks=pytest.mark.slow)], indirect=True)
def test_inputs_and_gradients_of_any_layout_are_taken(way: str) -> None:
    x, weight, bias = tensors(Case((16,), 4)).values()
    d_y, d_kept = random(2, 16, 5, 3, seed=9), random(2, 24, 5, 3, seed=10)[:, :16]
    found = []
    for x_NCHW in (x, x.contiguous()):
        leaves = [value.detach().requires_grad_() for value in (x_NCHW, weight, bias)]
        y, kept = group_norm_triton.group_norm((leaves[0],), *leaves[1:], 4, 1e-5, silu=True, keep=True)
        found.append([y, *torch.autograd.grad([y, *kept], leaves, [d_y, d_kept])])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_the_gradient_of_a_kept_input_is_added_in_the_pass_that_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    original = group_norm_triton.backward

    def record(dy: Tensor, kept: Any, *rest: Any) -> Any:
        given.append(list(kept))
        return original(dy, kept, *rest)

    monkeypatch.setattr(group_norm_triton, "backward", record)
    x, weight, bias = (value.requires_grad_() for value in tensors(Case((16,), 4)).values())
    y, (kept,) = group_norm_triton.group_norm((x,), weight, bias, 4, 1e-5, silu=True, keep=True)
    assert kept.data_ptr() == x.data_ptr()
    d_kept = random(2, 16, 5, 3, seed=9)
    torch.autograd.backward([y, kept], [random(2, 16, 5, 3, seed=8), d_kept])
    assert len(given) == 1
    assert torch.equal(given[0][0], d_kept)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_result_is_the_same(mode: Callable[[], Any]) -> None:
    x, weight, bias = tensors(Case((16,), 4)).values()
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
def test_slabs_are_a_group_or_as_many_as_are_worth_reading(
    parts: tuple[int, ...], groups: int, pixels: int, expected: tuple[int, bool] | None
) -> None:
    sizes = group_norm_triton.Sizes(2, pixels, parts, groups)
    slab = group_norm_triton.cut_slabs(group_norm_triton.SLAB_TILES["forward"], sizes)
    assert (None if slab is None else (slab.arguments["GROUPS"], slab.arguments["HELD"])) == expected
