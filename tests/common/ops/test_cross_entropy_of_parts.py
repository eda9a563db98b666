"""Cross-entropy whose words are dealt to ranks: log-sum-exps of parts, and gradients of all from them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from common.ops.cross_entropy import NO_LABEL, OF_A_PART

M, WORDS, COLUMNS = 9, 20, 8
"""Of three parts the last has 4 columns of padding; a fourth has nothing else."""

LOG_SUM_EXP, GRADIENT = OF_A_PART.reference


def test_parts_give_the_loss_and_the_gradient_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(M, WORDS, generator=generator, dtype=torch.float64).mul_(3).requires_grad_()
    labels = torch.tensor([0, 7, 8, 15, 16, 19, NO_LABEL, 3, NO_LABEL])
    d_losses = torch.randn(M, generator=generator, dtype=torch.float64)
    losses = F.cross_entropy(whole, labels, ignore_index=NO_LABEL, reduction="none")
    (wanted,) = torch.autograd.grad(losses, whole, d_losses)
    padding = torch.full((M, 4 * COLUMNS - WORDS), 50.0, dtype=torch.float64)
    parts = [part.clone() for part in torch.cat([whole.detach(), padding], 1).split(COLUMNS, 1)]
    words = [8, 8, 4, 0]
    lses = [LOG_SUM_EXP(part, labels, count) for part, count in zip(parts, words, strict=True)]
    assert bool((lses[3] == float("-inf")).all())
    lse = torch.stack(lses).logsumexp(0)
    scored = labels != NO_LABEL
    of_label = whole.detach().gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close((lse - of_label)[scored], losses[scored])
    found = []
    for number, (part, count) in enumerate(zip(parts, words, strict=True)):
        local = labels - number * COLUMNS
        places = torch.where((local >= 0) & (local < COLUMNS), local, COLUMNS).masked_fill(~scored, NO_LABEL)
        made = GRADIENT(d_losses, part, places, lse, count)
        assert made is part, "in the place of the logits"
        found.append(made)
    joined = torch.cat(found, 1)
    torch.testing.assert_close(joined[:, :WORDS], wanted)
    assert not joined[:, WORDS:].any()


@pytest.mark.parametrize("anything", [float("nan"), float("inf")])
def test_rows_without_a_label_have_no_gradient_whatever_they_are(anything: float) -> None:
    logits = torch.full((2, COLUMNS), anything)
    labels = torch.tensor([NO_LABEL, NO_LABEL])
    assert not GRADIENT(torch.ones(2), logits, labels, torch.full((2,), anything), 5).any()
