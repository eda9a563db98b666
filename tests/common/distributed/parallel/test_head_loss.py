"""Head and cross-entropy on one rank: chunks, tokens without a label, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.distributed.tensor_parallel.ranks import TensorParallel
from common.distributed.tensor_parallel.vocabulary import next_token_loss

T, E, V = 21, 8, 50
ALONE = TensorParallel()


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden vectors, head, labels and the gradient of the losses."""
    generator = torch.Generator().manual_seed(4)
    hidden_TE, head_VE = (torch.randn(n, E, dtype=torch.float64, generator=generator) for n in (T, V))
    labels_T = torch.randint(0, V, (T,), generator=generator, dtype=torch.int32)
    labels_T[::4] = -1
    return hidden_TE, head_VE, labels_T, torch.randn(T, dtype=torch.float64, generator=generator)


def plain(hidden_TE: Tensor, head_VE: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(hidden_TE @ head_VE.t(), labels_T.long(), ignore_index=-1, reduction="none")


@pytest.mark.parametrize("chunk", [1, 4, 21, 1000])
@pytest.mark.parametrize("learns", ["hidden", "head", "both"])
def test_losses_and_gradients_do_not_depend_on_chunks(chunk, learns):
    hidden_TE, head_VE, labels_T, dlosses_T = tensors()
    hidden_TE.requires_grad_(learns != "head")
    head_VE.requires_grad_(learns != "hidden")
    leaves = [leaf for leaf in (hidden_TE, head_VE) if leaf.requires_grad]
    found, wanted = next_token_loss(hidden_TE, head_VE, labels_T, ALONE, chunk), plain(hidden_TE, head_VE, labels_T)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(losses @ dlosses_T, leaves) for losses in (found, wanted)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("learns", [False, True])
def test_a_token_without_a_label_may_be_anything(learns):
    hidden_TE, head_VE, labels_T, _ = tensors()
    with torch.no_grad():
        hidden_TE[0], hidden_TE[4] = float("nan"), 1e300
    hidden_TE.requires_grad_()
    losses_T = next_token_loss(hidden_TE, head_VE.requires_grad_(learns), labels_T, ALONE, 4)
    losses_T.sum().backward()
    assert losses_T[labels_T == -1].count_nonzero() == 0
    assert hidden_TE.grad[labels_T == -1].count_nonzero() == 0
    assert hidden_TE.grad.isfinite().all()


@pytest.mark.parametrize("learns", [False, True])
def test_rows_behind_the_last_word_have_no_part(learns):
    hidden_TE, head_VE, labels_T, dlosses_T = tensors()
    padded_VE = torch.cat([head_VE, torch.full((14, E), 3.0, dtype=torch.float64)])
    found_leaves = [leaf.clone().requires_grad_() for leaf in (hidden_TE, padded_VE)[: 1 + learns]]
    wanted_leaves = [leaf.clone().requires_grad_() for leaf in (hidden_TE, head_VE)[: 1 + learns]]
    found = next_token_loss(*[*found_leaves, padded_VE][:2], labels_T, ALONE, 4, vocabulary=V)
    wanted = plain(*[*wanted_leaves, head_VE][:2], labels_T)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    mine, theirs = (
        torch.autograd.grad(losses @ dlosses_T, leaves)
        for losses, leaves in ((found, found_leaves), (wanted, wanted_leaves))
    )
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=1e-12)
    if learns:
        torch.testing.assert_close(mine[1][:V], theirs[1], rtol=0, atol=1e-12)
        assert not mine[1][V:].any()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("learns", [False, True])
def test_the_largest_tensor_of_the_loss_has_the_logits_of_one_chunk(learns):
    hidden_TE, head_VE, labels_T, _ = tensors()
    head_VE.requires_grad_(learns)
    with Largest() as largest:
        next_token_loss(hidden_TE.requires_grad_(), head_VE, labels_T, ALONE, 10).sum().backward()
    assert largest.elements == 10 * V


def test_labels_and_chunks_are_checked():
    hidden_TE, head_VE, labels_T, _ = tensors()
    with pytest.raises(ValueError, match=r"labels \(20,\) for 21 tokens"):
        next_token_loss(hidden_TE, head_VE, labels_T[1:], ALONE, 4)
    with pytest.raises(ValueError, match="chunk=0"):
        next_token_loss(hidden_TE, head_VE, labels_T, ALONE, 0)
