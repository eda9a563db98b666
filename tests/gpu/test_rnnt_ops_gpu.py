"""Test RNN-T's features, joint network and loss on a GPU at real sizes, captured and repeatable."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.data import FeaturePreparer, synthetic_batch
from benchmarks.rnnt.ops import features, joint, transducer_loss
from benchmarks.rnnt.ops.features.cases import utterances_of
from benchmarks.rnnt.ops.features.reference import AudioBatch
from benchmarks.rnnt.ops.rows_of_cases import case_rows, networks, tokens_of
from benchmarks.rnnt.ops.transducer_loss import joint_loss
from benchmarks.rnnt.ops.transducer_loss.cases import CASES
from benchmarks.rnnt.packed_rows import PackedRows, packed_rows
from common.data.batches import HostBatch
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Draw
from common.ops.dropout.reference import DropoutMask, keep_rows, scale_of_kept
from tests.benchmarks.rnnt.transducer_oracle import packed_loss
from tests.gpu.support import captured, relative_error, replay_over_nan, waiting_is_an_error
from tests.operation_checks import check

pytestmark = pytest.mark.gpu

# Features


FACTS = fixed_facts(Facts, "rnnt")
FRAMES, COLUMNS = 160, 256


def utterances(batch: int, longer: int = 0) -> AudioBatch:
    """Return ``batch`` utterances of up to 3 s."""
    lengths = [(1_500 + 5_501 * number % 40_000 + longer, 0.85 + 0.04 * (number % 8)) for number in range(batch)]
    return utterances_of(lengths, Draw(torch.device("cuda"), torch.float32))


def test_features_of_an_utterance_depend_on_no_other():
    audio, function = utterances(9), features.FEATURES.function("triton")
    whole, length_B = function(audio, FACTS, FRAMES, COLUMNS, False, torch.float32)
    slots = [7, 2, 0]
    columns = [getattr(audio, field.name)[slots] for field in dataclasses.fields(audio)[1:]]
    some, some_B = function(AudioBatch(audio.audio_A, *columns), FACTS, 2 * FRAMES, COLUMNS, False, torch.float32)
    assert torch.equal(some[:FRAMES], whole[:, slots])
    assert torch.equal(some_B, length_B[slots])
    assert not some[FRAMES:].any()


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_captured_features_follow_the_audio(name):
    function, given = features.FEATURES.function(name), utterances(6)
    other = utterances(6, longer=777)
    given = dataclasses.replace(given, audio_A=torch.nn.functional.pad(given.audio_A, (0, 400_000))[:400_000])
    other = dataclasses.replace(other, audio_A=torch.nn.functional.pad(other.audio_A, (0, 400_000))[:400_000])
    arguments = FACTS, FRAMES, COLUMNS, True, torch.float16
    graph, results = captured(lambda: function(given, *arguments))
    for field in dataclasses.fields(given):
        getattr(given, field.name).copy_(getattr(other, field.name))
    graph.replay()
    assert all(torch.equal(one, eager) for one, eager in zip(results, function(other, *arguments), strict=True))


def test_a_prepared_batch_waits_for_nothing():
    preparer = FeaturePreparer(FACTS, COLUMNS, "auto", torch.device("cuda"), torch.float16)
    assert preparer.choice == "triton"
    preparer.warm_up(4, [(60, 9)])
    host = HostBatch(
        {name: tensor.pin_memory() for name, tensor in synthetic_batch(FACTS, 4, (60, 9)).items()}, 4, 0, (60, 9)
    )
    torch.cuda.synchronize()
    with waiting_is_an_error():
        batch = preparer(host)
    assert batch.tensors["features"].shape == (60, 4, COLUMNS)
    assert batch.tensors["features"].dtype == torch.float16
    assert batch.tensors["feature_lengths"].tolist() == [60] * 4


# Joint network and loss


CUDA = torch.device("cuda")
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-4, 8e-3
"""Largest relative errors in fp16. Variables of 1,600 nats in fp32 cause 2e-3 of the error of gradients."""
WIDTH, CLASSES = 512, 1024
JOINT = joint.JOINT.function("triton")
LOSS, REFERENCE = (transducer_loss.TRANSDUCER_LOSS.function(name) for name in ("triton", "reference"))
SCALE = 128.0  # with 192 utterances the largest gradient is 18,000; fp16 ends at 65,504
"""Loss scale, as in training with fp16."""


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
    """Return the rows of a few utterances, and random tokens."""
    frames_B, tokens_B = torch.tensor(frames, device=CUDA), torch.tensor(tokens, device=CUDA)
    capacity = int((frames_B * (tokens_B + 1)).sum()) + spare
    tokens_BU = torch.randint(classes - 1, (len(frames), max(tokens)), device=CUDA, dtype=torch.int32)
    return packed_rows(frames_B, tokens_B, max(frames), max(tokens), capacity), tokens_BU


def step(given: Given, parts: int = 1) -> list[Tensor]:
    """Return the losses, and the gradients of the scaled mean."""
    loss_B = joint_loss(JOINT, LOSS, *given.leaves, given.tokens_BU, given.rows, given.dropout, parts)
    return [loss_B.detach(), *torch.autograd.grad(loss_B.mean() * SCALE, given.leaves)]


def one_by_one(given: Given) -> list[Tensor]:
    """Return the results of :func:`step` from PyTorch in fp32, computed for one utterance at a time."""
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


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    names = ("loss", "f", "g", "weight", "bias")
    for name, value, formula in zip(names, found, wanted, strict=True):
        tolerance = LOSS_TOLERANCE if name == "loss" else GRADIENT_TOLERANCE
        assert relative_error(value, formula) < tolerance, name
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
    """Return inputs of 192 utterances of real lengths in fp16."""
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


def test_long_utterances_of_confident_rows_have_the_gradient_of_float64() -> None:
    rows, tokens_BU = some_rows([300, 120], [120, 90], 0, classes=64)
    leaf = (12 * torch.randn(rows.capacity, 64, device=CUDA)).half().requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    found, wanted = (packed_loss(passes, x, tokens_BU, rows) for passes, x in ((LOSS, leaf), (REFERENCE, exact)))
    assert torch.allclose(found.double(), wanted, rtol=1e-5)
    (d_found,), (d_wanted,) = torch.autograd.grad(found.sum(), leaf), torch.autograd.grad(wanted.sum(), exact)
    assert relative_error(d_found, d_wanted) < 3e-2


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

    graph, results = captured(run)
    others = ([60, 50, 30, 9], [20, 18, 11, 3]), ([31, 60, 2, 44], [20, 1, 0, 17])
    seen = []
    for seed, (frames, tokens) in itertools.product((1, 2), others):
        given.dropout.seed.fill_(seed)
        lengths[0].copy_(torch.tensor(frames))
        lengths[1].copy_(torch.tensor(tokens))
        replay_over_nan(graph, results)
        eager = run()
        assert all(torch.equal(*pair) for pair in zip(results, eager, strict=True))
        seen.append(eager[0].clone())
    assert all(not torch.equal(*pair) for pair in itertools.combinations(seen, 2))
