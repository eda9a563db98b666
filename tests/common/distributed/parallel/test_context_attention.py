"""Chunks of a row, and attention out of parts, against plain attention in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.distributed.context_parallel import ContextSplit, attention
from common.distributed.layout import Layout
from common.errors import ConfigError

pytestmark = pytest.mark.usefixtures("groups_are_their_ranks")


def test_a_rank_has_an_early_and_a_late_chunk():
    split = ContextSplit.from_layout(Layout({"cp": 2}, 1), 16)
    assert split.positions().tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert ContextSplit.from_layout(Layout({"cp": 2}, 0), 16).positions().tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert split.positions().dtype == torch.int64
    rows = torch.arange(32).view(2, 16)
    assert torch.equal(split.own_tokens(rows), rows[:, 4:12])
    assert torch.equal(split.own_tokens(rows.t(), 0), rows[:, 4:12].t())


def test_every_rank_has_as_many_pairs_of_query_and_key():
    splits = [ContextSplit.from_layout(Layout({"cp": 4}, rank), 32) for rank in range(4)]
    assert {int((split.positions() + 1).sum()) for split in splits} == {32 * 33 // 2 // 4}


def test_one_rank_has_the_whole_row_whatever_its_length():
    split = ContextSplit.from_layout(Layout(), 7)
    assert split.positions().tolist() == list(range(7))
    count = torch.tensor([3, 4])
    assert split.scored(count).tolist() == [3, 4]


@pytest.mark.parametrize(("ranks", "length"), [(2, 18), (4, 12), (3, 10)])
def test_a_row_that_gives_no_equal_chunks_is_an_error_of_the_layout(ranks, length):
    with pytest.raises(ConfigError, match=f"layout.cp={ranks} .* a row of {length} tokens"):
        ContextSplit.from_layout(Layout({"cp": ranks}), length)


def logits(q_BnHD: Tensor, k_BmKD: Tensor, seen: Tensor) -> Tensor:
    k_BmHD = k_BmKD.repeat_interleave(q_BnHD.shape[2] // k_BmKD.shape[2], 2)
    scores = torch.einsum("bnhd,bmhd->bhnm", q_BnHD, k_BmHD) / math.sqrt(q_BnHD.shape[3])
    return scores.masked_fill(~seen, -math.inf)


def seen_by(n: int, m: int, causal: bool) -> Tensor:
    every = torch.ones(n, m, dtype=torch.bool)
    return every.tril(m - n) if causal else every


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """A library that knows square masks only."""
    assert not causal or q.shape[1] == k.shape[1]
    scores = logits(q, k, seen_by(q.shape[1], k.shape[1], causal))
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v), scores.logsumexp(-1)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """By the formulas, from the logarithm and the result that it is given (Dao et al. 2022, appendix B.2)."""
    group = q.shape[2] // k.shape[2]
    p = (logits(q, k, seen_by(q.shape[1], k.shape[1], causal)) - lse.unsqueeze(-1)).exp()
    dp = torch.einsum("bnhd,bmhd->bhnm", do, v.repeat_interleave(group, 2))
    ds = p * (dp - (do * o).sum(-1).transpose(1, 2).unsqueeze(-1)) / math.sqrt(q.shape[3])
    dq = torch.einsum("bhnm,bmhd->bnhd", ds, k.repeat_interleave(group, 2))
    dk = torch.einsum("bhnm,bnhd->bmhd", ds, q).unflatten(2, (-1, group)).sum(3)
    dv = torch.einsum("bhnm,bnhd->bmhd", p, do).unflatten(2, (-1, group)).sum(3)
    return dq, dk, dv


def tensors(n: int, m: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = (2, n, 4, 6), (2, m, 2, 6), (2, m, 2, 6), (2, n, 4, 6)
    *leaves, do = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return [leaf.requires_grad_() for leaf in leaves], do


def gradients(o: Tensor, leaves: list[Tensor], do: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((o * do).sum(), leaves)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = seen_by(q.shape[1], k.shape[1], True)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def test_one_rank_attends_to_its_whole_row():
    leaves, _ = tensors(6, 6)
    torch.testing.assert_close(attention(*leaves, ContextSplit(6), plain), plain(*leaves))
