"""Triton's log-sum-exp and gradient of a part of the words, in the interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from common.ops.cross_entropy import OF_A_PART
from common.ops.cross_entropy.reference import NO_LABEL

ROWS = 6


@pytest.mark.parametrize(("columns", "words"), [(128, 128), (128, 30), (128, 0), (4224, 4200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_equal_plain(columns: int, words: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, columns, generator=generator).mul_(3).to(dtype)
    labels = torch.tensor([0, NO_LABEL, 17, columns, 29, NO_LABEL], dtype=torch.int64)
    labels[labels >= words] = columns  # a label elsewhere
    scored = labels != NO_LABEL
    plain, ours = (OF_A_PART.function(name) for name in ("reference", "triton"))
    wanted, found = (each.log_sum_exp(logits, labels, words)[scored] for each in (plain, ours))
    torch.testing.assert_close(found, wanted)
    others = torch.randn(ROWS, generator=generator).add_(2 + columns**0.5)
    lse = torch.where(scored, others, float("nan"))
    d_losses = torch.randn(ROWS, generator=generator)
    left, right = logits.clone(), logits.clone()
    expected = plain.gradient(d_losses, left, labels, lse, words)
    made = ours.gradient(d_losses, right, labels, lse, words)
    assert made.data_ptr() == right.data_ptr()
    torch.testing.assert_close(made, expected)
    assert not made[:, words:].any()
    assert not made[~scored].any()
    if words:
        assert made[scored].any()
