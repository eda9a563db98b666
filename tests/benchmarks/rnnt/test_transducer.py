"""The plain joint and loss: against all alignments, closed forms, and a recursion in float64."""

from __future__ import annotations

import importlib.util
import itertools
import math

import pytest
import torch
from torch import Tensor

from benchmarks.rnnt.joint import Joint
from benchmarks.rnnt.ops.joint import JOINT as JOINT
from benchmarks.rnnt.ops.rows_of_cases import case_rows
from benchmarks.rnnt.ops.transducer_loss import TRANSDUCER_LOSS as LOSS
from benchmarks.rnnt.ops.transducer_loss import joint_loss
from benchmarks.rnnt.packed_rows import PackedRows, packed_rows, places
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
    """Rows that do not exist hold NaN."""
    random = torch.Generator().manual_seed(seed)
    logits_RV = 2 * torch.randn(given.rows.capacity, classes, generator=random, dtype=torch.float64)
    logits_RV[used_rows(given.rows) :] = torch.nan
    return logits_RV.to(dtype)


# Rows


def test_rows_of_utterances_lie_back_to_back_frame_by_frame() -> None:
    given = case(*MIXED, classes=5)
    place = places(given.rows)
    wanted = [
        (b, s, u)
        for b, (frames, tokens) in enumerate(zip(*MIXED, strict=True))
        for s in range(frames)
        for u in range(tokens + 1)
    ]
    used = len(wanted)
    assert given.rows.offsets.tolist() == [0, 12, 16, 19, 23, 48]
    assert place.exists_R.tolist() == [True] * used + [False] * 3
    found = torch.stack(place[:3], 1)[:used]
    assert [tuple(line) for line in found.tolist()] == wanted


def test_rows_beyond_the_capacity_make_every_loss_infinite_and_all_gradients_zero() -> None:
    given = case([4, 3], [2, 2], classes=5, spare=-1)
    assert given.rows.capacity == 20
    logits_RV = torch.randn(20, 5, requires_grad=True)
    loss_B = packed_loss(LOSS_PASSES, logits_RV, given.tokens_BU, given.rows)
    loss_B.sum().backward()
    assert loss_B.tolist() == [math.inf, math.inf]
    assert logits_RV.grad is not None
    assert not logits_RV.grad.any()


# Loss of logits


@pytest.mark.parametrize(("frames", "tokens"), [*itertools.product((1, 2, 3, 4), (0, 1, 2, 3, 4))])
def test_loss_is_that_of_all_alignments_and_its_gradient_too(frames: int, tokens: int) -> None:
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
    ("frames", "tokens", "classes", "published"),
    [(2, 1, 3, 2.60269), (4, 3, 5, 8.27033), (205, 56, 1024, 1676.47)],
)
def test_loss_of_equal_logits_has_a_closed_form(frames: int, tokens: int, classes: int, published: float) -> None:
    given = case([frames], [tokens], classes, spare=0)
    logits_RV = torch.full((given.rows.capacity, 1), 0.25).expand(-1, classes)
    loss_B = packed_loss(LOSS_PASSES, logits_RV, given.tokens_BU, given.rows)
    closed = (frames + tokens) * math.log(classes) - math.log(math.comb(frames + tokens - 1, tokens))
    assert closed == pytest.approx(published, abs=0.005)
    assert loss_B.item() == pytest.approx(closed, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
)
def test_mixed_lengths_equal_the_recursion_in_float64(dtype: torch.dtype, tolerance: float) -> None:
    given = case([9, 1, 6, 12, 3], [5, 7, 0, 1, 4], classes=11, seed=3)
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


def test_gradient_adds_up_to_zero_over_the_classes() -> None:
    given = case(*MIXED, classes=6, spare=0)
    leaf = random_logits(given, 6).requires_grad_()
    (d_leaf,) = torch.autograd.grad(packed_loss(LOSS_PASSES, leaf, given.tokens_BU, given.rows).sum(), leaf)
    assert d_leaf.abs().max() > 0.1
    assert d_leaf.sum(1).abs().max() < 1e-14


def test_all_ways_to_the_end_are_all_ways_from_the_beginning() -> None:
    given = case(*MIXED, classes=6)
    label_R = LOSS_PASSES.labels(given.tokens_BU, given.rows)
    weight = torch.eye(6, dtype=torch.float64)
    _, statistics = LOSS_PASSES.product(random_logits(given, 6), weight, weight[0] * 0, label_R, 0, given.rows)
    recursion = LOSS_PASSES.recursion(statistics, given.rows)
    first_B, last_B = given.rows.offsets[:-1], given.rows.offsets[1:] - 1
    assert torch.allclose(recursion.alpha_R[last_B] + statistics.blank_R[last_B], recursion.total_B, rtol=1e-13)
    assert torch.equal(recursion.beta_R[first_B], recursion.total_B)
    assert not recursion.alpha_R[first_B].any()


def test_an_utterance_alone_and_padded_has_the_loss_and_gradient_that_it_has_among_others() -> None:
    given = case(*MIXED, classes=7)
    leaf = random_logits(given, 7).requires_grad_()
    together = packed_loss(LOSS_PASSES, leaf, given.tokens_BU, given.rows)
    (d_together,) = torch.autograd.grad(together.sum(), leaf)
    for utterance, (frames, tokens) in enumerate(zip(*MIXED, strict=True)):
        rows = packed_rows(torch.tensor([frames]), torch.tensor([tokens]), 11, given.tokens_BU.shape[1])
        assert rows.capacity == 11 * (given.tokens_BU.shape[1] + 1)
        begin, end = given.rows.offsets[utterance : utterance + 2].tolist()
        own = torch.full((rows.capacity, 7), torch.nan, dtype=torch.float64)
        own[: end - begin] = leaf[begin:end].detach()
        own.requires_grad_()
        alone = packed_loss(LOSS_PASSES, own, given.tokens_BU[utterance, None], rows)
        (d_alone,) = torch.autograd.grad(alone.sum(), own)
        assert torch.allclose(alone[0], together[utterance], rtol=1e-13)
        assert torch.allclose(d_alone[: end - begin], d_together[begin:end], rtol=1e-12, atol=1e-15)


def test_long_and_confident_rows_stay_finite_in_fp32() -> None:
    given = case([60, 40], [30, 20], classes=9, spare=0)
    leaf = (200 * random_logits(given, 9, torch.float32)).requires_grad_()
    loss_B = packed_loss(LOSS_PASSES, leaf, given.tokens_BU, given.rows)
    (d_leaf,) = torch.autograd.grad(loss_B.sum(), leaf)
    losses, d_wanted = expected(leaf, given, torch.ones(2))
    assert torch.allclose(loss_B.double(), losses, rtol=1e-5)
    assert (d_leaf - d_wanted).norm() < 0.02 * d_wanted.norm()


@pytest.mark.skipif(importlib.util.find_spec("torchaudio") is None, reason="torchaudio is not installed")
def test_loss_equals_torchaudios() -> None:
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
    """f, g, weight and bias; padding of f and g holds NaN."""
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
    """Losses with the joint network utterance by utterance, by autograd."""
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


def forward_with_poison(f_SBH: Tensor, g_NBH: Tensor, rows: PackedRows, dropout: DropoutMask) -> Tensor:
    """As kernels leave it: with anything in rows that do not exist."""
    h_RH = JOINT_PASSES.forward(f_SBH, g_NBH, rows, dropout)
    h_RH[used_rows(rows) :] = torch.nan
    return h_RH


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_packed_joint_loss_equals_the_padded_one(p: float, parts: int) -> None:
    given = case(*MIXED, classes=6)
    dropout = DropoutMask(p, torch.tensor(1 << 40), 5)
    drawn = leaves(given, 10, 6)
    passes = JOINT_PASSES._replace(forward=forward_with_poison)
    found = joint_loss(passes, LOSS_PASSES, *drawn, given.tokens_BU, given.rows, dropout, parts)
    weight_B = torch.rand(5, dtype=torch.float64)
    gradients = torch.autograd.grad(found, drawn, weight_B)
    wanted = by_padding(given, drawn, dropout)
    formulas = torch.autograd.grad(wanted, drawn, weight_B)
    assert torch.allclose(found, wanted, rtol=1e-12)
    for gradient, formula in zip(gradients, formulas, strict=True):
        assert torch.allclose(gradient, formula.nan_to_num(0.0), rtol=1e-9, atol=1e-12)


def test_gradient_of_the_joint_loss_is_the_slope_in_any_direction() -> None:
    given = case([3, 2], [2, 1], classes=5)
    drawn = [leaf.detach().nan_to_num(0.0).requires_grad_() for leaf in leaves(given, 4, 5)]
    dropout = DropoutMask(0.25, torch.tensor(7), 1)

    def total(values: list[Tensor]) -> Tensor:
        return joint_loss(JOINT_PASSES, LOSS_PASSES, *values, given.tokens_BU, given.rows, dropout).sum()

    gradients = torch.autograd.grad(total(drawn), drawn)
    for leaf, gradient in enumerate(gradients):
        step = [torch.zeros_like(value) for value in drawn]
        step[leaf] = 1e-5 * torch.randn_like(step[leaf])
        ahead, behind = (
            total([value + sign * way for value, way in zip(drawn, step, strict=True)]).detach() for sign in (1, -1)
        )
        assert torch.allclose(ahead - behind, 2 * (gradient * step[leaf]).sum(), rtol=1e-5)


def test_half_precision_comes_close() -> None:
    given = case([9, 5, 7], [4, 6, 2], classes=12)
    exact = leaves(given, 16, 12)
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        drawn = [leaf.detach().to(dtype).requires_grad_() for leaf in exact]
        wide = [leaf.detach().double().requires_grad_() for leaf in drawn]
        found = joint_loss(JOINT_PASSES, LOSS_PASSES, *drawn, given.tokens_BU, given.rows, NO_DROPOUT)
        wanted = by_padding(given, wide, NO_DROPOUT)
        assert torch.allclose(found.double(), wanted, rtol=tolerance)
        pairs = zip(torch.autograd.grad(found.sum(), drawn), torch.autograd.grad(wanted.sum(), wide), strict=True)
        for gradient, formula in pairs:
            assert gradient.dtype == dtype
            assert (gradient.double() - formula.nan_to_num(0.0)).norm() < tolerance * formula.nan_to_num(0.0).norm()


def test_a_second_backward_pass_is_refused() -> None:
    given = case([3], [2], classes=5)
    loss_B = joint_loss(JOINT_PASSES, LOSS_PASSES, *leaves(given, 4, 5), given.tokens_BU, given.rows, NO_DROPOUT)
    loss_B.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass"):
        loss_B.sum().backward()


def test_tensors_of_other_shapes_are_refused() -> None:
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


def module(**options: object) -> Joint:
    return Joint(
        12, 8, 10, 6, 0.5, torch.Generator().manual_seed(0), device=torch.device("cpu"), dtype=torch.float32, site=3,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_parameters_are_uniform_within_the_bound_of_their_inputs() -> None:
    own = module()
    assert {name: tuple(value.shape) for name, value in own.named_parameters()} == {
        "joint_enc.weight": (10, 12), "joint_enc.bias": (10,),
        "joint_pred.weight": (10, 8), "joint_pred.bias": (10,),
        "joint_net.weight": (6, 10), "joint_net.bias": (6,),
    }  # fmt: skip
    for layer, inputs in ((own.joint_enc, 12), (own.joint_pred, 8), (own.joint_net, 10)):
        for values in (layer.weight, layer.bias):
            assert 0.4 * inputs**-0.5 < values.abs().max() <= inputs**-0.5
    assert own.choices == {"joint": "reference", "transducer_loss": "reference"}


def test_logits_of_pairs_are_those_that_the_loss_is_made_of() -> None:
    own = module().eval()
    given = case([3], [2], classes=6, spare=0)
    random = torch.Generator().manual_seed(4)
    f_SBJ = own.encoded(torch.randn(4, 1, 12, generator=random))
    g_NBJ = own.predicted(torch.randn(4, 1, 8, generator=random))
    logits_RV = torch.cat([own.logits(f_SBJ[s], g_NBJ[u]) for s in range(3) for u in range(3)])
    wanted = by_alignments(lattice(logits_RV, given, 0), given.tokens_BU[0, :2].tolist())
    found = own.loss(f_SBJ, g_NBJ, given.tokens_BU, given.rows, torch.zeros(1, dtype=torch.int64))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_a_training_step_is_capturable_and_its_dropout_follows_the_seed() -> None:
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


def test_a_micro_batch_of_the_cases_has_librispeechs_rows_and_capacity_for_more() -> None:
    given = case_rows(192, torch.device("cpu"))
    assert given.used == int(given.rows.offsets[-1])
    assert given.used == pytest.approx(2.45e6, rel=0.06)
    assert given.used < given.rows.capacity < 1.35 * given.used
