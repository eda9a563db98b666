"""Test attention without a mask against a formula in float64, and the calls of libraries."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from cpu_attention import on_cpu_backward, on_cpu_forward
from torch import Tensor

from common import optional_packages
from common.errors import UnsupportedImplementation
from common.ops.causal_attention import cudnn_frontend
from common.ops.causal_attention.parts import Library
from common.ops.causal_attention.reference import Saved
from common.ops.dense_attention import DENSE_ATTENTION, Attention, LibraryAttention
from common.ops.operation import AUTO, OperationRequest
from tests.capturable import Capturable

SHAPES = pytest.mark.parametrize(
    ("queries", "keys", "heads"), [(7, 7, 3), (16, 5, 2), (3, 11, 1), (1, 1, 2)], ids=["self", "fewer", "more", "one"]
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, queries, heads, size = q.shape
    parts = []
    for row in range(rows):
        for head in range(heads):
            weights = (q[row, :, head] @ k[row, :, head].T / size**0.5).exp()
            parts.append(weights @ v[row, :, head] / weights.sum(1, keepdim=True))
    return torch.stack(parts).view(rows, heads, queries, size).transpose(1, 2)


def on_cpu_into(do: Tensor, saved: Saved, causal: bool, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    assert all(not gradient.is_contiguous() for gradient in gradients)
    for target, gradient in zip(gradients, on_cpu_backward(do, saved, causal), strict=True):
        target.copy_(gradient)


EVERY = {
    "plain": DENSE_ATTENTION.function("reference"),
    "joined": LibraryAttention(Library(on_cpu_forward, on_cpu_backward)),
    "in place": LibraryAttention(Library(on_cpu_forward, on_cpu_backward, into=on_cpu_into)),
}
KINDS = pytest.mark.parametrize("attention", EVERY.values(), ids=EVERY)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@KINDS
@SHAPES
def test_attention_and_its_gradients_are_the_formula(attention, queries, keys, heads):
    leaves = [random(2, length, heads, 8, seed=length).requires_grad_() for length in (queries, keys, keys)]
    do = random(2, queries, heads, 8, seed=4)
    expected, found = by_formula(*leaves), attention(*leaves)
    assert found.is_contiguous()
    close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, leaves, do), torch.autograd.grad(expected, leaves, do), strict=True
    ):
        close(one, other)


def check_both_ways(attention: Attention, tolerance: float = 1e-11) -> None:
    """Check packed and separate inputs, with a gradient that is not contiguous."""
    qkv, do = random(2, 7, 3, 2, 8).requires_grad_(), random(2, 2, 7, 8, seed=3).transpose(1, 2)
    expected = by_formula(*qkv.unbind(2))
    (reference,) = torch.autograd.grad(expected, qkv, do)
    for o in (attention.packed(qkv), attention(*qkv.unbind(2))):
        close(o, expected, tolerance)
        (gradient,) = torch.autograd.grad(o, qkv, do)
        assert gradient.is_contiguous()
        close(gradient, reference, tolerance)


@KINDS
def test_queries_keys_and_values_of_one_product(attention):
    check_both_ways(attention)


@KINDS
def test_views_of_wider_rows(attention):
    """Keys and values are views of one product that computes those of several blocks."""
    wide = random(2, 5, 3 * 2 * 2 * 8).requires_grad_()
    k, v = wide[..., 32:64].unflatten(-1, (2, 2, 8)).unbind(2)
    q = random(2, 6, 2, 8, seed=1).requires_grad_()
    do = random(2, 6, 2, 8, seed=2)
    found = torch.autograd.grad(attention(q, k, v), (q, wide), do, retain_graph=True)
    expected = torch.autograd.grad(by_formula(q, k, v), (q, wide), do)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@KINDS
def test_both_directions_are_capturable(attention):
    qkv = random(2, 7, 3, 2, 8).requires_grad_()
    with Capturable():
        torch.autograd.grad(attention.packed(qkv).sum(), qkv)
        torch.autograd.grad(attention(*qkv.unbind(2)).sum(), qkv)


def test_plain_in_half_precision_computes_in_single():
    q, k, v = (random(2, 5, 2, 8, seed=seed).half() for seed in range(3))
    attention = DENSE_ATTENTION.function("reference")
    assert torch.equal(attention(q, k, v), attention(q.float(), k.float(), v.float()).half())


@KINDS
def test_shapes_that_mean_nothing_are_refused(attention):
    q, k = random(2, 5, 2, 8), random(2, 6, 2, 8)
    for wrong in ((q, k, q), (q, k[:1], k[:1]), (q, k[:, :, :1], k[:, :, :1]), (q[0], k[0], k[0])):
        with pytest.raises(ValueError, match="attention of queries"):
            attention(*wrong)
    with pytest.raises(ValueError, match="not \\(rows, length, 3, heads, size\\)"):
        attention.packed(random(2, 5, 2, 2, 8))


# The libraries' operators: shapes only, without a GPU


@pytest.mark.parametrize("name", ["cudnn", "flash"])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (64, 77)])
def test_pytorchs_operators_take_what_they_are_given(name, queries, keys):
    attention = DENSE_ATTENTION.function(name)
    q, k, v = (
        torch.empty(2, length, 5, 64, dtype=torch.bfloat16, device="meta").requires_grad_()
        for length in (queries, keys, keys)
    )
    o = attention(q, k, v)
    assert o.shape == q.shape
    assert o.is_contiguous()
    gradients = torch.autograd.grad(o, (q, k, v), torch.empty_like(o))
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    qkv = torch.empty(2, queries, 3, 5, 64, dtype=torch.bfloat16, device="meta").requires_grad_()
    o = attention.packed(qkv)
    assert o.is_contiguous()
    assert torch.autograd.grad(o, qkv, torch.empty_like(o))[0].is_contiguous()


SIZES = {"head_size": 64, "queries": 4096, "keys": 77}


def on_hopper(dtype: torch.dtype = torch.bfloat16, **sizes: int) -> OperationRequest:
    return OperationRequest(torch.device("cuda"), dtype, SIZES | sizes)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91700)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


@pytest.mark.usefixtures("hopper")
def test_cudnn_comes_first_and_flash_where_there_is_none(monkeypatch):
    assert DENSE_ATTENTION.select(AUTO, on_hopper()).name == "cudnn"
    assert DENSE_ATTENTION.select(AUTO, on_hopper(torch.float32)).name == "reference"
    assert DENSE_ATTENTION.select(AUTO, on_hopper(head_size=60)).name == "reference"
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.setattr(optional_packages, "_import_all", "{0.name} is not installed".format)
    assert DENSE_ATTENTION.select(AUTO, on_hopper()).name == "flash"


@pytest.mark.usefixtures("hopper")
def test_an_old_cudnn_takes_multiples_of_64_alone(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8907)
    with pytest.raises(UnsupportedImplementation, match="cuDNN 8907 takes multiples of 64 keys, not 77"):
        DENSE_ATTENTION.select("cudnn", on_hopper())
    assert DENSE_ATTENTION.select("cudnn", on_hopper(keys=128)).name == "cudnn"


# Libraries that nobody has on a CPU: functions of their signatures that compute as PyTorch's do


def test_flash_attention_4_is_asked_as_its_signature_says(monkeypatch):
    def forward(q, k, v, *, softmax_scale, causal, return_lse) -> tuple[Tensor, Tensor, None]:
        assert return_lse
        return (*on_cpu_forward(q, k, v, softmax_scale, causal)[:2], None)

    def backward(q, k, v, out, dout, lse, softmax_scale, causal, *, deterministic, dq, dk, dv) -> None:
        found = on_cpu_backward(dout, Saved(q, k, v, out, lse, softmax_scale, "all"), causal)
        for target, gradient in zip((dq, dk, dv), found, strict=True):
            target.copy_(gradient)

    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    check_both_ways(DENSE_ATTENTION.function("flash_attention_4"))


def test_cudnns_graph_is_built_for_the_strides_of_the_gradients(monkeypatch):
    """The graphs of this test compute on a CPU what cuDNN's compute."""

    class ForwardCall:
        def __init__(self, key: cudnn_frontend.GraphKey) -> None:
            self.key = key

        def run(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> None:
            assert [tuple(layout) for layout in self.key[2:5]] == [layout_of(x) for x in (q, k, v)]
            found = on_cpu_forward(q, k, v, self.key.scale, self.key.causal)
            o.copy_(found[0])
            lse.copy_(found[1])

    class BackwardCall(ForwardCall):
        def __init__(self, key: cudnn_frontend.GraphKey, layouts: tuple[cudnn_frontend.TensorLayout, ...]) -> None:
            super().__init__(key)
            self.layouts = layouts

        def run(self, q, k, v, o, do, lse, *gradients) -> None:
            assert [tuple(layout) for layout in self.layouts] == [layout_of(x) for x in gradients]
            saved = Saved(q, k, v, o, lse.double(), self.key.scale, "all")
            for target, gradient in zip(gradients, on_cpu_backward(do, saved, self.key.causal), strict=True):
                target.copy_(gradient)

    def layout_of(x_BSHD: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        x_BHSD = x_BSHD.transpose(1, 2)
        return tuple(x_BHSD.shape), x_BHSD.stride()

    monkeypatch.setattr(cudnn_frontend, "_forward_graph", ForwardCall)
    monkeypatch.setattr(cudnn_frontend, "_backward_graph", BackwardCall)
    check_both_ways(DENSE_ATTENTION.function("cudnn_frontend"), tolerance=1e-6)  # log-sum-exp is fp32
