"""Test the reference joint network and loss against all alignments, closed forms, and a recursion in float64."""

from __future__ import annotations

import importlib.util
import itertools
import math

import pytest
import torch
from torch import Tensor

from benchmarks.rnnt.config import Facts, ModelConfig
from benchmarks.rnnt.model import Joint
from benchmarks.rnnt.ops.joint import JOINT as JOINT
from benchmarks.rnnt.ops.rows_of_cases import case_rows
from benchmarks.rnnt.ops.transducer_loss import TRANSDUCER_LOSS as LOSS
from benchmarks.rnnt.ops.transducer_loss import joint_loss
from benchmarks.rnnt.packed_rows import PackedRows, packed_rows, row_indices
from common.mlperf.fixed import fixed_facts
from common.ops.dropout.reference import DropoutMask, dropout_reference
from tests.benchmarks.rnnt.transducer_oracle import (
    Case,
    by_alignments,
    by_recursion,
    case,
    expected,
    lattice,
    packed_loss,
    used_rows,
)
from tests.capturable import Capturable

JOINT_PASSES, LOSS_PASSES = JOINT.function("reference"), LOSS.function("reference")
MIXED = ([4, 1, 3, 2, 5], [2, 3, 0, 1, 4])
NO_DROPOUT = DropoutMask(0.0, torch.zeros((), dtype=torch.int64), 0)


def random_logits(given: Case, classes: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """Return random logits; unused rows have NaN."""
    random = torch.Generator().manual_seed(seed)
    logits_RV = 2 * torch.randn(given.rows.capacity, classes, generator=random, dtype=torch.float64)
    logits_RV[used_rows(given.rows) :] = torch.nan
    return logits_RV.to(dtype)


# Rows


def test_rows_are_packed_by_utterance_frame_and_token():
    given = case(*MIXED, classes=5)
    indices = row_indices(given.rows)
    wanted = [
        (b, s, u)
        for b, (frames, tokens) in enumerate(zip(*MIXED, strict=True))
        for s in range(frames)
        for u in range(tokens + 1)
    ]
    used = len(wanted)
    assert given.rows.offsets.tolist() == [0, 12, 16, 19, 23, 48]
    assert indices.exists_R.tolist() == [True] * used + [False] * 3
    found = torch.stack(indices[:3], 1)[:used]
    assert [tuple(line) for line in found.tolist()] == wanted


def test_too_many_rows_make_losses_infinite_and_gradients_zero():
    given = case([4, 3], [2, 2], classes=5, spare=-1)
    assert given.rows.capacity == 20
    logits_RV = torch.randn(20, 5, requires_grad=True)
    loss_B = packed_loss(LOSS_PASSES, logits_RV, given.tokens_BU, given.rows)
    loss_B.sum().backward()
    assert loss_B.tolist() == [math.inf, math.inf]
    assert not logits_RV.grad.any()


# Loss of logits


@pytest.mark.parametrize(("frames", "tokens"), [*itertools.product((1, 2, 3, 4), (0, 1, 2, 3, 4))])
def test_loss_and_gradient_equal_the_sum_over_all_alignments(frames, tokens):
    given = case([frames], [tokens], classes=4, seed=frames)
    leaf = random_logits(given, 4)
    wanted = leaf[: used_rows(given.rows)].clone().requires_grad_()
    labels = given.tokens_BU[0, :tokens].tolist()
    formula = by_alignments(lattice(wanted, given, 0), labels)
    (d_wanted,) = torch.autograd.grad(formula, wanted)
    leaf.requires_grad_()
    loss_B = packed_loss(LOSS_PASSES, leaf, given.tokens_BU, given.rows)
    (d_leaf,) = torch.autograd.grad(loss_B.sum(), leaf)
    assert torch.allclose(loss_B, formula, rtol=1e-12)
    assert torch.allclose(d_leaf[: len(wanted)], d_wanted, rtol=1e-10, atol=1e-13)
    assert not d_leaf[len(wanted) :].any()


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
)
def test_mixed_lengths_equal_the_recursion_in_float64(dtype, tolerance):
    given = case([9, 1, 6, 12, 3], [5, 7, 0, 1, 4], classes=11, seed=3, spare=None)
    leaf = random_logits(given, 11, dtype).requires_grad_()
    weight_B = torch.rand(5, dtype=torch.float64) + 0.5
    loss_B = packed_loss(LOSS_PASSES, leaf, given.tokens_BU, given.rows)
    (d_leaf,) = torch.autograd.grad(loss_B, leaf, weight_B.to(loss_B.dtype))
    used = used_rows(given.rows)
    losses, d_wanted = expected(leaf[:used], given, weight_B)
    assert loss_B.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (loss_B - losses).abs().max() < min(tolerance, 1e-4) * losses.max()
    assert (d_leaf[:used] - d_wanted).norm() < tolerance * d_wanted.norm()
    assert d_leaf.dtype == dtype
    assert not d_leaf[used:].any()


def test_long_utterances_with_large_logits_stay_finite_in_fp32():
    given = case([60, 40], [30, 20], classes=9, spare=0)
    leaf = (200 * random_logits(given, 9, torch.float32)).requires_grad_()
    loss_B = packed_loss(LOSS_PASSES, leaf, given.tokens_BU, given.rows)
    (d_leaf,) = torch.autograd.grad(loss_B.sum(), leaf)
    losses, d_wanted = expected(leaf, given, torch.ones(2))
    assert torch.allclose(loss_B.double(), losses, rtol=1e-5)
    assert (d_leaf - d_wanted).norm() < 0.02 * d_wanted.norm()


@pytest.mark.skipif(importlib.util.find_spec("torchaudio") is None, reason="torchaudio is not installed")
def test_loss_equals_torchaudios():
    from torchaudio.functional import rnnt_loss

    frames, tokens, classes = [6, 6, 4], [3, 2, 3], 8
    given = case(frames, tokens, classes, spare=0)
    leaf = random_logits(given, classes, torch.float32).requires_grad_()
    padded = torch.zeros(3, 6, 4, classes)
    for utterance in range(3):
        own = lattice(leaf.detach(), given, utterance)
        padded[utterance, : own.shape[0], : own.shape[1]] = own
    padded.requires_grad_()
    wanted = rnnt_loss(
        padded, given.tokens_BU[:, :3].clamp(max=classes - 2).contiguous(), torch.tensor(frames, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32), blank=classes - 1, reduction="none",
    )  # fmt: skip
    found = packed_loss(LOSS_PASSES, leaf, given.tokens_BU, given.rows)
    assert torch.allclose(found, wanted, rtol=1e-5)
    (d_wanted,) = torch.autograd.grad(wanted.sum(), padded)
    (d_found,) = torch.autograd.grad(found.sum(), leaf)
    for utterance in range(3):
        own = lattice(d_found, given, utterance)
        assert torch.allclose(own, d_wanted[utterance, : own.shape[0], : own.shape[1]], atol=1e-5)


# The joint network


def leaves(given: Case, width: int, classes: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return f, g, weight and bias; padding of f and g has NaN."""
    random = torch.Generator().manual_seed(9)
    utterances = len(given.frames)
    shapes = (
        (given.rows.most_frames, utterances, width), (given.rows.most_tokens + 1, utterances, width),
        (classes, width), (classes,),
    )  # fmt: skip
    drawn = [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]
    for utterance, (frames, tokens) in enumerate(zip(given.frames, given.lengths, strict=True)):
        drawn[0][frames:, utterance] = torch.nan
        drawn[1][tokens + 1 :, utterance] = torch.nan
    return [leaf.requires_grad_() for leaf in drawn]


def by_padding(given: Case, drawn: list[Tensor], dropout: DropoutMask) -> Tensor:
    """Return the losses with the joint network utterance by utterance, with autograd."""
    f_SBJ, g_NBJ, weight_VJ, bias_V = drawn
    losses = []
    keep = torch.ones(given.rows.capacity, f_SBJ.shape[2], dtype=torch.float64)
    keep = dropout_reference(keep, dropout.p, dropout.seed, dropout.site)
    for utterance, (frames, tokens) in enumerate(zip(given.frames, given.lengths, strict=True)):
        h = torch.relu(f_SBJ[:frames, utterance, None] + g_NBJ[None, : tokens + 1, utterance])
        begin = int(given.rows.offsets[utterance])
        h = h * keep[begin : begin + frames * (tokens + 1)].view(h.shape)
        logits = h @ weight_VJ.t() + bias_V
        losses.append(by_recursion(logits, given.tokens_BU[utterance, :tokens].tolist()))
    return torch.stack(losses)


def forward_with_nan(f_SBH: Tensor, g_NBH: Tensor, rows: PackedRows, dropout: DropoutMask) -> Tensor:
    """Return the joint network's output with NaN in unused rows, where kernels leave any values."""
    h_RH = JOINT_PASSES.forward(f_SBH, g_NBH, rows, dropout)
    h_RH[used_rows(rows) :] = torch.nan
    return h_RH


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_packed_joint_loss_equals_the_padded_one(p, parts):
    given = case(*MIXED, classes=6)
    dropout = DropoutMask(p, torch.tensor(1 << 40), 5)
    drawn = leaves(given, 10, 6)
    passes = JOINT_PASSES._replace(forward=forward_with_nan)
    found = joint_loss(passes, LOSS_PASSES, *drawn, given.tokens_BU, given.rows, dropout, parts)
    weight_B = torch.rand(5, dtype=torch.float64)
    gradients = torch.autograd.grad(found, drawn, weight_B)
    wanted = by_padding(given, drawn, dropout)
    formulas = torch.autograd.grad(wanted, drawn, weight_B)
    assert torch.allclose(found, wanted, rtol=1e-12)
    for gradient, formula in zip(gradients, formulas, strict=True):
        assert torch.allclose(gradient, formula.nan_to_num(0.0), rtol=1e-9, atol=1e-12)


def test_the_joint_loss_in_half_precision_is_close():
    given = case([9, 5, 7], [4, 6, 2], classes=12)
    exact = leaves(given, 16, 12)
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        drawn = [leaf.detach().to(dtype).requires_grad_() for leaf in exact]
        drawn_fp64 = [leaf.detach().double().requires_grad_() for leaf in drawn]
        found = joint_loss(JOINT_PASSES, LOSS_PASSES, *drawn, given.tokens_BU, given.rows, NO_DROPOUT)
        wanted = by_padding(given, drawn_fp64, NO_DROPOUT)
        assert torch.allclose(found.double(), wanted, rtol=tolerance)
        pairs = zip(torch.autograd.grad(found.sum(), drawn), torch.autograd.grad(wanted.sum(), drawn_fp64), strict=True)
        for gradient, formula in pairs:
            assert gradient.dtype == dtype
            assert (gradient.double() - formula.nan_to_num(0.0)).norm() < tolerance * formula.nan_to_num(0.0).norm()


def test_a_second_backward_pass_is_refused():
    given = case([3], [2], classes=5)
    loss_B = joint_loss(JOINT_PASSES, LOSS_PASSES, *leaves(given, 4, 5), given.tokens_BU, given.rows, NO_DROPOUT)
    loss_B.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass"):
        loss_B.sum().backward()


def test_tensors_of_inconsistent_shapes_are_refused():
    given = case([3, 2], [2, 1], classes=5)
    drawn = leaves(given, 4, 5)
    with pytest.raises(ValueError, match=r"tokens must be \(2, 3\), not \(2, 2\)"):
        joint_loss(JOINT_PASSES, LOSS_PASSES, *drawn, given.tokens_BU[:, :2], given.rows, NO_DROPOUT)
    with pytest.raises(ValueError, match=r"f and g must be \(4, 2, 4\)"):
        joint_loss(JOINT_PASSES, LOSS_PASSES, drawn[0][:3], *drawn[1:], given.tokens_BU, given.rows, NO_DROPOUT)
    huge = PackedRows(*given.rows[:3], 1 << 31, *given.rows[4:])
    with pytest.raises(ValueError, match="take fewer utterances"):
        joint_loss(JOINT_PASSES, LOSS_PASSES, *drawn, given.tokens_BU, huge, NO_DROPOUT)


# The module


def module(batch_split: int = 1) -> Joint:
    facts = fixed_facts(
        Facts, "rnnt", encoder_width=12, prediction_width=8, joint_width=10, classes=6, joint_dropout=0.5
    )
    config = ModelConfig(features=240, loss_scale=1.0, batch_split=batch_split)
    return Joint(facts, config, torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32, site=3)


def test_logits_for_decoding_are_consistent_with_the_loss():
    own = module().eval()
    given = case([3], [2], classes=6, spare=0)
    random = torch.Generator().manual_seed(4)
    f_SBJ = own.encoded(torch.randn(4, 1, 12, generator=random))
    g_NBJ = own.predicted(torch.randn(4, 1, 8, generator=random))
    logits_RV = torch.cat([own.logits(f_SBJ[s], g_NBJ[u]) for s in range(3) for u in range(3)])
    wanted = by_alignments(lattice(logits_RV, given, 0), given.tokens_BU[0, :2].tolist())
    found = own.loss(f_SBJ, g_NBJ, given.tokens_BU, given.rows, torch.zeros(1, dtype=torch.int64))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_a_training_step_is_capturable_and_its_dropout_follows_the_seed():
    own, given = module(batch_split=2), case(*MIXED, classes=6)
    f_SBJ, g_NBJ = torch.randn(6, 5, 10), torch.randn(6, 5, 10)
    frames, tokens = given.rows.frames_B, given.rows.tokens_B
    seeds = [torch.tensor([seed]) for seed in (1, 1, 2)]
    losses = []
    with Capturable():
        for seed in seeds:
            rows = packed_rows(frames, tokens, 6, 5, given.rows.capacity)
            loss_B = own.loss(f_SBJ.requires_grad_(), g_NBJ.requires_grad_(), given.tokens_BU, rows, seed)
            loss_B.mean().backward()
            losses.append(loss_B)
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


def test_cases_have_librispeechs_number_of_rows_and_spare_capacity():
    given = case_rows(192, torch.device("cpu"))
    assert given.used == int(given.rows.offsets[-1])
    assert given.used == pytest.approx(2.45e6, rel=0.06)
    assert given.used < given.rows.capacity < 1.35 * given.used
