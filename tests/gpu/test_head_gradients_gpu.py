"""The gradient of a head's weight on a GPU: chunks add up in fp32 there, too, and none of their products is rounded."""

from __future__ import annotations

import pytest
import torch

from tests.common.language.head_gradients import HEADS, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LARGE = Case(tokens=4096, chunk=512, words=256, hidden=512, device=torch.device("cuda"))
AS_FP32, BEYOND_BF16 = 2e-4, 5e-4
"""As in tests/common/language/test_head_gradients.py; a tensor core's sums are a little coarser than fp32's."""

LIBRARIES = 64_000_000
"""Bytes of workspaces that products take while they run."""


@pytest.mark.parametrize("head", list(HEADS))
def test_chunks_are_added_without_rounding_their_products(head: str) -> None:
    errors = [LARGE.gradient_and_error(head, LARGE.zeros(), dtype)[1] for dtype in (torch.float32, torch.bfloat16)]
    print(f"{head}: {errors[0]:.1e} in fp32, {errors[1]:.1e} in bf16")
    assert errors[0] < AS_FP32
    assert errors[1] > BEYOND_BF16


@pytest.mark.parametrize("head", list(HEADS))
def test_gradients_follow_float64(head: str) -> None:
    assert LARGE.gradient_and_error(head, LARGE.drawn().mul_(0.1), torch.float32)[1] < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_whose_words_ranks_share_takes_no_memory_for_a_chunks_product(dtype: torch.dtype) -> None:
    """A weight's gradient takes its sum in fp32 and, where that is rounded, what is handed on; a chunk takes its logits
    in fp32 and 16 bits. A chunk's product would be 268 MB more, and gradients in fp32 may take some 690."""
    case = Case(tokens=512, chunk=128, words=65536, hidden=2048, device=LARGE.device)
    weight, hidden, labels = case.given(case.zeros(), dtype)
    HEADS["shared"](weight, hidden, labels, case.chunk).backward()  # leaves the main gradient
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    HEADS["shared"](weight, hidden, labels, case.chunk).backward()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    elements, logits = weight.numel(), case.chunk * case.words
    handed_on = 4 if dtype == torch.float32 else 6
    print(f"{dtype}: {taken / 1e6:.0f} MB")
    assert taken < handed_on * elements + 10 * logits + 2 * hidden.nbytes + LIBRARIES
