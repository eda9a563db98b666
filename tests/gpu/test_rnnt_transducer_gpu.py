"""The transducer's joint network and loss on a GPU at real sizes: against PyTorch in fp32, utterance by utterance and
by torchaudio, captured, repeatable, and without overflow of offsets in 2.5 billion logits."""

from __future__ import annotations

import importlib.util
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.rnnt.ops import joint, transducer_loss
from benchmarks.rnnt.ops.rows_of_cases import case_rows, networks, tokens_of
from benchmarks.rnnt.ops.transducer_loss import joint_loss
from benchmarks.rnnt.ops.transducer_loss.cases import CASES
from benchmarks.rnnt.packed_rows import PackedRows, packed_rows
from common.ops.cases import Draw
from common.ops.dropout.reference import DropoutMask, keep_rows, scale_of_kept
from tests.benchmarks.rnnt.transducer_oracle import packed_loss
from tests.operation_checks import check

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA = torch.device("cuda")
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-4, 8e-3
"""Largest relative errors in fp16. Variables of 1,600 nats in fp32 cause 2e-3 of the error of gradients."""
WIDTH, CLASSES = 512, 1024
JOINT = joint.JOINT.function("triton")
LOSS, REFERENCE = (transducer_loss.TRANSDUCER_LOSS.function(name) for name in ("triton", "reference"))
SCALE = 128.0  # with 192 utterances the largest gradient is 18,000; fp16 ends at 65,504
"""Of the loss, as in training with fp16."""


class Given(NamedTuple):
    """Inputs of the loss; padding of f and g holds NaN."""

    leaves: list[Tensor]
    tokens_BU: Tensor
    rows: PackedRows
    dropout: DropoutMask


def poison(power: int = 8) -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << each,), float("nan"), device="cuda") for each in range(power)]
    del held


def inputs(rows: PackedRows, tokens_BU: Tensor, p: float = 0.3) -> Given:
    """Return random fp16 tensors with the magnitudes of trained ones."""
    draw = Draw(CUDA, torch.float16)
    weight = draw.normal(CLASSES, WIDTH, scale=2 * WIDTH**-0.5)
    leaves = [*networks(rows, WIDTH, draw), weight, draw.normal(CLASSES)]
    dropout = DropoutMask(p, torch.tensor((9 << 33) + 11, device=CUDA), 6)
    return Given([leaf.requires_grad_() for leaf in leaves], tokens_BU, rows, dropout)


def some_rows(frames: list[int], tokens: list[int], spare: int, classes: int = CLASSES) -> tuple[PackedRows, Tensor]:
    """Rows of a few utterances, and random tokens."""
    frames_B, tokens_B = torch.tensor(frames, device=CUDA), torch.tensor(tokens, device=CUDA)
    capacity = int((frames_B * (tokens_B + 1)).sum()) + spare
    tokens_BU = torch.randint(classes - 1, (len(frames), max(tokens)), device=CUDA, dtype=torch.int32)
    return packed_rows(frames_B, tokens_B, max(frames), max(tokens), capacity), tokens_BU


def step(given: Given, parts: int = 1) -> list[Tensor]:
    """Losses, and gradients of the scaled mean."""
    loss_B = joint_loss(JOINT, LOSS, *given.leaves, given.tokens_BU, given.rows, given.dropout, parts)
    return [loss_B.detach(), *torch.autograd.grad(loss_B.mean() * SCALE, given.leaves)]


def one_by_one(given: Given) -> list[Tensor]:
    """The same in fp32 by PyTorch, one utterance after another; joint and last layer by autograd."""
    rows, dropout = given.rows, given.dropout
    wide = [leaf.detach().float().requires_grad_() for leaf in given.leaves]
    f_SBH, g_NBH, weight_VH, bias_V = wide
    sums = [torch.zeros_like(leaf) for leaf in wide]
    losses = []
    starts, frames_B, tokens_B = (values.tolist() for values in (rows.offsets, rows.frames_B, rows.tokens_B))
    for utterance, (frames, tokens) in enumerate(zip(frames_B, tokens_B, strict=True)):
        h = torch.relu(f_SBH[:frames, utterance, None] + g_NBH[None, : tokens + 1, utterance]).flatten(0, 1)
        if dropout.p:
            row_R = torch.arange(starts[utterance], starts[utterance + 1], device=CUDA)
            keep = keep_rows(dropout.seed, dropout.site, row_R, h.shape[1], dropout.p)
            h = h * keep * scale_of_kept(dropout.p)
        own = packed_rows(rows.frames_B[utterance, None], rows.tokens_B[utterance, None], frames, tokens)
        logits = F.linear(h, weight_VH, bias_V)
        loss_1 = packed_loss(REFERENCE, logits, given.tokens_BU[utterance, None, :tokens], own)
        for total, gradient in zip(
            sums, torch.autograd.grad(loss_1.sum() * SCALE / rows.utterances, wide), strict=True
        ):
            total += gradient.nan_to_num_(0.0)
        losses.append(loss_1.detach())
    return [torch.cat(losses), *sums]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    names = ("loss", "f", "g", "weight", "bias")
    for name, value, formula in zip(names, found, wanted, strict=True):
        tolerance = LOSS_TOLERANCE if name == "loss" else GRADIENT_TOLERANCE
        assert error(value, formula) < tolerance, f"{name}: relative error {error(value, formula):.2e}"
        assert value.dtype == (torch.float32 if name == "loss" else torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("utterances", "width", "classes"),
    [
        (((37, 11), (20, 0), (1, 7), (9, 3)), 512, 1024),
        (((33, 5), (8, 12), (8, 1)), 320, 120),
        (((50, 300),), 64, 40),
    ],
    ids=["small", "odd tiles", "several warps of tokens"],
)
def test_losses_and_gradients_equal_the_references(
    utterances: tuple[tuple[int, int], ...], width: int, classes: int, dtype: torch.dtype
) -> None:
    sizes = {"utterances": utterances, "width": width, "classes": classes}
    check(transducer_loss.TRANSDUCER_LOSS, "triton", CASES[1], sizes, dtype, CUDA)


@pytest.fixture(scope="module")
def whole() -> Given:
    """192 utterances of real lengths in fp16."""
    made = case_rows(192, CUDA)
    assert made.used * CLASSES > 1 << 31
    return inputs(made.rows, tokens_of(made.rows, CLASSES, Draw(CUDA, torch.float16)))


@pytest.fixture(scope="module")
def wanted_of_whole(whole: Given) -> list[Tensor]:
    return one_by_one(whole)


@pytest.mark.parametrize("parts", [1, 3])
def test_192_utterances_equal_pytorch_one_by_one(whole: Given, wanted_of_whole: list[Tensor], parts: int) -> None:
    torch.cuda.empty_cache()
    poison(12)
    assert_close(step(whole, parts), wanted_of_whole)


def test_parts_take_less_memory(whole: Given) -> None:
    def peak(parts: int) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(whole, parts)
        return torch.cuda.max_memory_allocated() - before

    logits = whole.rows.capacity * CLASSES * 2
    assert peak(1) - peak(4) > 0.7 * logits


@pytest.mark.skipif(importlib.util.find_spec("torchaudio") is None, reason="torchaudio is not installed")
def test_loss_of_logits_equals_torchaudios() -> None:
    from torchaudio.functional import rnnt_loss

    rows, tokens_BU = some_rows([200, 150, 180, 20], [60, 50, 10, 59], 50)
    leaf = torch.randn(rows.capacity, CLASSES, device=CUDA, dtype=torch.float16).requires_grad_()
    starts, frames_B, tokens_B = (values.tolist() for values in (rows.offsets, rows.frames_B, rows.tokens_B))
    padded = torch.zeros(4, 200, 61, CLASSES, device=CUDA)
    for utterance, (frames, tokens) in enumerate(zip(frames_B, tokens_B, strict=True)):
        own = leaf.detach()[starts[utterance] : starts[utterance + 1]]
        padded[utterance, :frames, : tokens + 1] = own.view(frames, tokens + 1, CLASSES)
    padded.requires_grad_()
    wanted = rnnt_loss(padded, tokens_BU, rows.frames_B, rows.tokens_B, blank=CLASSES - 1, reduction="none")
    (d_wanted,) = torch.autograd.grad(wanted.sum(), padded)
    found = packed_loss(LOSS, leaf, tokens_BU, rows)
    (d_found,) = torch.autograd.grad(found.sum(), leaf)
    assert torch.allclose(found, wanted, rtol=2e-5)
    for utterance, (frames, tokens) in enumerate(zip(frames_B, tokens_B, strict=True)):
        own = d_found[starts[utterance] : starts[utterance + 1]].view(frames, tokens + 1, CLASSES)
        assert error(own, d_wanted[utterance, :frames, : tokens + 1]) < 1e-2  # fp32 variables of 1,600 nats in both


def test_equal_logits_have_the_closed_form() -> None:
    rows, tokens_BU = some_rows([205, 205], [56, 56], 0)
    logits = torch.full((rows.capacity, CLASSES), 0.25, device=CUDA, dtype=torch.float16)
    closed = 261 * math.log(CLASSES) - math.log(math.comb(260, 56))
    assert closed == pytest.approx(1676.47, abs=0.005)
    assert packed_loss(LOSS, logits, tokens_BU, rows).tolist() == pytest.approx([closed] * 2, rel=2e-6)


def test_long_utterances_of_confident_rows_have_the_gradient_of_float64() -> None:
    rows, tokens_BU = some_rows([300, 120], [120, 90], 0, classes=64)
    leaf = (12 * torch.randn(rows.capacity, 64, device=CUDA)).half().requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    found, wanted = (packed_loss(passes, x, tokens_BU, rows) for passes, x in ((LOSS, leaf), (REFERENCE, exact)))
    assert torch.allclose(found.double(), wanted, rtol=1e-5)
    (d_found,), (d_wanted,) = torch.autograd.grad(found.sum(), leaf), torch.autograd.grad(wanted.sum(), exact)
    assert error(d_found, d_wanted) < 3e-2


def test_a_batch_beyond_the_capacity_writes_to_no_other_memory() -> None:
    rows, tokens_BU = some_rows([40, 30], [10, 9], -1)
    given = inputs(rows, tokens_BU)
    found = step(given)
    assert found[0].isinf().all()
    assert not any(gradient.any() for gradient in found[1:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_reaches_the_gradients(bad: float) -> None:
    given = inputs(*some_rows([40, 30], [10, 9], 20), p=0.0)
    with torch.no_grad():
        given.leaves[0][3, 1, 5] = bad
    found = step(given)
    assert not found[3].isfinite().all()


def test_a_step_is_captured_follows_lengths_and_seed_and_repeats_its_bits() -> None:
    first, tokens_BU = some_rows([60, 50, 30, 9], [20, 18, 11, 3], 400)
    given = inputs(first, tokens_BU)
    with torch.no_grad():
        for leaf in given.leaves[:2]:
            leaf.nan_to_num_(0.5)
    lengths = first.frames_B.clone(), first.tokens_B.clone()

    def run() -> list[Tensor]:
        rows = packed_rows(*lengths, 60, 20, first.capacity)
        return step(given._replace(rows=rows))

    with torch.cuda.stream(torch.cuda.Stream()):
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = run()
        others = ([60, 50, 30, 9], [20, 18, 11, 3]), ([31, 60, 2, 44], [20, 1, 0, 17])
        seen = []
        for seed, (frames, tokens) in itertools.product((1, 2), others):
            given.dropout.seed.fill_(seed)
            lengths[0].copy_(torch.tensor(frames))
            lengths[1].copy_(torch.tensor(tokens))
            for tensor in captured:
                tensor.fill_(float("nan"))
            graph.replay()
            eager = run()
            assert all(torch.equal(*pair) for pair in zip(captured, eager, strict=True))
            seen.append(eager[0].clone())
        torch.cuda.synchronize()
    assert all(not torch.equal(*pair) for pair in itertools.combinations(seen, 2))
