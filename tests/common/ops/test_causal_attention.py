"""Test causal attention against autograd of a masked softmax in float64: plain, in parts, and merged."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_attention import on_cpu_backward, on_cpu_forward
from torch import Tensor

from common import optional_packages
from common.errors import UnsupportedImplementation
from common.ops.causal_attention import CAUSAL_ATTENTION, libraries, merge, reference
from common.ops.causal_attention.parts import Library, through
from common.ops.causal_attention.reference import CausalAttention, Saved
from common.ops.operation import OperationRequest

SHAPES = pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads"), [(7, 7, 4, 2), (1, 1, 2, 2), (5, 12, 6, 2), (3, 4, 3, 1), (1, 9, 2, 1)]
)


def tensors(queries: int, keys: int, heads: int, kv_heads: int, rows: int = 2) -> list[Tensor]:
    """Return q, k, v and the gradient of the context."""
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, *shape, 8, dtype=torch.float64, generator=generator) for shape in shapes]


def by_formula(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return context and log-sum-exp, head by head. Query i sees the keys up to Sk - Sq + i."""
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    sees = torch.tensor([[j <= keys - queries + i for j in range(keys)] for i in range(queries)])
    contexts, lses = [], []
    for head in range(q.shape[2]):
        scores = q[:, :, head] @ k[:, :, head // group].transpose(1, 2) * scale
        scores = scores.masked_fill(~sees, -math.inf)
        contexts.append(scores.softmax(-1) @ v[:, :, head // group])
        lses.append(scores.logsumexp(-1))
    return torch.stack(contexts, 2), torch.stack(lses, 1)


def check(attention: CausalAttention, given: list[Tensor], scale: float) -> None:
    q, k, v, do = given
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, lse = by_formula(*leaves, scale)
    o, saved = attention.forward(q, k, v, scale)
    close(o, expected.detach())
    close(saved.lse, lse.detach())
    gradients = torch.autograd.grad(expected, leaves, do)
    for found, wanted in zip(attention.backward(do, saved), gradients, strict=True):
        close(found, wanted)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@SHAPES
@pytest.mark.parametrize("scores", [1, 200, 1 << 26], ids=["one query", "chunks", "all at once"])
def test_reference(queries, keys, heads, kv_heads, scores, monkeypatch):
    monkeypatch.setattr(reference, "MOST_SCORES", scores)
    check(CAUSAL_ATTENTION.function("reference"), tensors(queries, keys, heads, kv_heads), 0.3)


def test_reference_in_half_precision_computes_in_single():
    q, k, v, do = (x.bfloat16() for x in tensors(7, 9, 4, 2))
    attention = CAUSAL_ATTENTION.function("reference")
    o, saved = attention.forward(q, k, v, 0.3)
    wide, _ = attention.forward(q.float(), k.float(), v.float(), 0.3)
    assert torch.equal(o, wide.bfloat16())
    assert saved.lse.dtype == torch.float32
    assert [x.dtype for x in attention.backward(do, saved)] == [torch.bfloat16] * 3


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads"), [(3, 3, 3, 2), (4, 3, 2, 2)], ids=["heads", "too many queries"]
)
def test_shapes_that_mean_nothing_are_refused(queries, keys, heads, kv_heads):
    q, k, v, _ = tensors(queries, keys, heads, kv_heads)
    for attention in (CAUSAL_ATTENTION.function("reference"), CAUSAL_ATTENTION.function("flash")):
        with pytest.raises(ValueError, match="causal attention of queries"):
            attention.forward(q, k, v, 1.0)


# Parts


@SHAPES
def test_parts_of_a_library_that_knows_squares_only(queries, keys, heads, kv_heads):
    check(through(Library(on_cpu_forward, on_cpu_backward)), tensors(queries, keys, heads, kv_heads), 0.3)


def prefix_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, Any]:
    assert causal
    o, saved = reference.forward_reference(q, k, v, scale)
    return o, saved.lse, saved.k.shape


def prefix_backward(do: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    assert saved.state == saved.k.shape
    return reference.backward_reference(do, saved)


@SHAPES
def test_a_library_that_knows_prefixes_is_given_all_keys_at_once(queries, keys, heads, kv_heads):
    library = Library(prefix_forward, prefix_backward, prefixes=True)
    check(through(library), tensors(queries, keys, heads, kv_heads), 0.3)


def prefix_backward_into(do: Tensor, saved: Saved, causal: bool, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    for target, found in zip(gradients, prefix_backward(do, saved, causal), strict=True):
        target.copy_(found)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 12)])
@pytest.mark.parametrize("library", ["squares", "prefixes", "into", "plain"])
def test_heads_of_one_product_side_by_side_get_their_gradients_where_they_lie(library, queries, keys):
    attention = {
        "squares": through(Library(on_cpu_forward, on_cpu_backward)),
        "prefixes": through(Library(prefix_forward, prefix_backward, prefixes=True)),
        "into": through(Library(prefix_forward, prefix_backward, prefixes=True, into=prefix_backward_into)),
        "plain": CAUSAL_ATTENTION.function("reference"),
    }[library]
    q, k, v, do = tensors(queries, keys, 4, 4)
    interleaved = torch.zeros(2, keys, 4, 3, 8, dtype=torch.float64)
    for part, x in enumerate((q, k, v)):
        interleaved[:, keys - x.shape[1] :, :, part] = x
    q_view, k_view, v_view = interleaved.unbind(3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, _ = by_formula(*leaves, 0.3)
    o, saved = attention.forward(q_view[:, keys - queries :], k_view, v_view, 0.3)
    close(o, expected.detach())
    assert o.is_contiguous()
    d_interleaved = torch.full_like(interleaved, math.nan)
    dq, dk, dv = d_interleaved.unbind(3)
    attention.backward_into(do, saved, (dq[:, keys - queries :], dk, dv))
    for found, wanted in zip((dq[:, keys - queries :], dk, dv), torch.autograd.grad(expected, leaves, do), strict=True):
        close(found, wanted)


def test_keys_may_be_dropped_and_put_back():
    q, k, v, do = tensors(5, 12, 6, 2)
    attention = through(Library(on_cpu_forward, on_cpu_backward))
    _, saved = attention.forward(q, k, v, 0.3)
    nothing = torch.empty(0)
    again = saved._replace(q=nothing, k=nothing, v=nothing)._replace(q=q.clone(), k=k.clone(), v=v.clone())
    for found, expected in zip(attention.backward(do, again), attention.backward(do, saved), strict=True):
        assert torch.equal(found, expected)


def test_merged_parts_are_attention_to_all_keys():
    q, k, v, _ = tensors(4, 12, 4, 2)
    cuts = [slice(0, 3), slice(3, 8), slice(8, 12)]
    parts = [on_cpu_forward(q, k[:, cut], v[:, cut], 0.3, cut.stop == 12)[:2] for cut in cuts]
    o, lse = merge(parts)
    expected, expected_lse = by_formula(q, k, v, 0.3)
    close(o, expected)
    close(lse, expected_lse)


def test_a_part_that_nobody_sees_counts_nothing():
    q, k, v, _ = tensors(4, 4, 2, 2)
    o, lse, _ = on_cpu_forward(q, k, v, 0.3, True)
    merged, merged_lse = merge([(o, lse), (torch.zeros_like(o), torch.full_like(lse, -math.inf))])
    close(merged, o)
    close(merged_lse, lse)
    empty, _ = merge([(torch.zeros_like(o), torch.full_like(lse, -math.inf))] * 2)
    assert not empty.any()


# The libraries' operators: shapes only, without a GPU


@pytest.mark.parametrize("library", [libraries.CUDNN, libraries.FLASH], ids=["cudnn", "flash"])
@pytest.mark.parametrize("keys", [16, 48])
def test_a_librarys_operators_take_what_they_are_given(library, keys):
    q, k, v, do = (x.to("meta", torch.bfloat16) for x in tensors(16, keys, 4, 2))
    attention = through(library)
    o, saved = attention.forward(q, k, v, 0.3)
    assert (o.shape, saved.lse.shape) == (q.shape, (2, 4, 16))
    assert o.is_contiguous()
    assert [x.shape for x in attention.backward(do, saved)] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("cudnn_frontend", "nvidia-cudnn-frontend"),
        ("te", "transformer-engine"),
        ("flash_attention_4", "flash-attn-4"),
    ],
)
def test_a_missing_package_is_named(name, package, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    monkeypatch.setattr(optional_packages, "_import_all", "{0.name} is not installed".format)
    request = OperationRequest(torch.device("cuda"), torch.bfloat16, {"head_size": 128})
    with pytest.raises(UnsupportedImplementation, match=f"{package} is not installed"):
        CAUSAL_ATTENTION.select(name, request)
    assert CAUSAL_ATTENTION.select("auto", request).name == "reference"


def test_flash_attention_4_needs_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    request = OperationRequest(torch.device("cuda"), torch.bfloat16, {"head_size": 128})
    with pytest.raises(UnsupportedImplementation, match=r"needs compute capability 9\.0"):
        CAUSAL_ATTENTION.select("flash_attention_4", request)


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ((9, 0), "4.0.0b37", r"4\.0\.0b37 is installed, .* works with 4\.0\.0b36"),
        ((12, 0), "4.0.0b36", "Hopper"),
    ],
)
def test_flash_attention_4_is_taken_where_it_is_known(capability, version, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.metadata.version", lambda package: version)
    monkeypatch.setattr(optional_packages, "_import_all", optional_packages._import_all.__wrapped__)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(_flash_attn_fwd=None, _flash_attn_bwd=None))
    request = OperationRequest(torch.device("cuda"), torch.bfloat16, {"head_size": 128})
    with pytest.raises(UnsupportedImplementation, match=reason):
        CAUSAL_ATTENTION.select("flash_attention_4", request)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("importlib.metadata.version", lambda package: "4.0.0b36")
    assert CAUSAL_ATTENTION.select("auto", request).name == "flash_attention_4"
