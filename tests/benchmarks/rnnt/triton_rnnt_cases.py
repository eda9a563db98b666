"""Test special values, invariants and other code paths in the kernels of features, joint network and transducer loss.

tests/test_interpreted_kernels.py runs this file. Fresh memory holds NaN.
"""

from __future__ import annotations

import features_oracle as oracle
import pytest
import small_corpus
import torch
from torch import Tensor

from benchmarks.rnnt.ops import joint, transducer_loss
from benchmarks.rnnt.ops.features import reference
from benchmarks.rnnt.ops.features import triton as features_triton
from benchmarks.rnnt.ops.rows_of_cases import case_rows, networks, tokens_of
from benchmarks.rnnt.ops.transducer_loss import joint_loss
from benchmarks.rnnt.ops.transducer_loss import triton as loss_triton
from benchmarks.rnnt.ops.transducer_loss.cases import CASES
from benchmarks.rnnt.ops.transducer_loss.passes import Transitions
from benchmarks.rnnt.packed_rows import PackedRows, packed_rows
from common.errors import UnsupportedImplementation
from common.ops.cases import Draw
from common.ops.dropout.reference import DropoutMask
from common.ops.operation import AUTO, OperationRequest
from common.ops.tile import Tile
from tests.benchmarks.rnnt.transducer_oracle import case, packed_loss
from tests.capturable import Capturable
from tests.operation_checks import check

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

CPU = torch.device("cpu")
JOINT = joint.JOINT.function("triton")
LOSS = transducer_loss.TRANSDUCER_LOSS.function("triton")
DROPOUT = DropoutMask(0.25, torch.tensor((5 << 32) + 3), 7)


def test_small_tiles_without_descriptors_give_the_same(monkeypatch):
    for key, tile in loss_triton.TILES.items():
        if "depth" in vars(tile):
            monkeypatch.setitem(loss_triton.TILES, key, tile.replace(rows=16, columns=16, depth=16, programs=8))
    for key, tile in (
        ("gradient", Tile(elements=64, warps=1, programs=3, stages=1)),
        ("recursion", Tile(columns=32, stages=1)),
    ):
        monkeypatch.setitem(loss_triton.TILES, key, tile)
    monkeypatch.setattr(loss_triton, "BLOCK", 8)
    monkeypatch.setattr(loss_triton, "_described", lambda x: False)
    sizes = {"utterances": ((5, 1), (1, 3), (2, 0), (6, 2)), "width": 24, "classes": 40, "p": 0.25}
    check(transducer_loss.TRANSDUCER_LOSS, "triton", CASES[1], sizes, torch.float16, CPU)


def test_the_joint_network_propagates_nan():
    rows, _ = case_rows(((2, 1),), CPU)
    f, g = networks(rows, 8, Draw(CPU, torch.float16))
    f[0, 0, 3] = torch.nan
    assert JOINT.forward(f, g, rows, DROPOUT._replace(p=0.0))[:4].isnan().sum() == 2


def test_forward_and_backward_recursion_agree():
    given = case([3, 20, 2], [33, 2, 0], classes=8)
    rows, weight = given.rows, torch.eye(8, dtype=torch.float16)
    label_R = LOSS.labels(given.tokens_BU, rows)
    _, statistics = LOSS.product(torch.randn(rows.capacity, 8).half(), weight, weight[0] * 0, label_R, 0, rows)
    alpha_R, _, total_B = LOSS.recursion(statistics, rows)
    last_B = rows.offsets[1:] - 1
    assert torch.allclose(alpha_R[last_B] + statistics.blank_R[last_B], total_B, rtol=1e-6)


def test_too_many_rows_make_losses_infinite_and_gradients_zero():
    given = case([4, 3], [2, 2], classes=8, spare=-1)
    leaf = torch.randn(20, 8, dtype=torch.float16, requires_grad=True)
    loss_B = packed_loss(LOSS, leaf, given.tokens_BU, given.rows)
    (d_leaf,) = torch.autograd.grad(loss_B.sum(), leaf)
    assert loss_B.isinf().all()
    assert not d_leaf.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_whose_gradient_rounds_to_zero_are_left_out(dtype):
    floor = 2.0**-25 * (1.0 if dtype == torch.float16 else 0.5)
    through = torch.tensor([1.0, 0.9, 1.1, 0.0, torch.nan, 3.0, 2.0, torch.nan]) * floor
    label = torch.tensor([3, -1, 2, 0, -1, 4, -2, -2], dtype=torch.int32)
    arcs = Transitions(0.25 * through, 0.75 * through)
    chosen = LOSS.choose(arcs, label, torch.tensor([0.1, -0.5]), dtype)
    assert chosen.live_R.tolist() == [False, False, True, False, True, True, False, False]
    assert chosen.rank_R.tolist() == [0, 0, 1, 1, 2, 3, 3, 3]
    assert chosen.row_R[:3].tolist() == [2, 4, 5]


def test_losses_do_not_depend_on_parts_and_a_step_is_capturable():
    rows, draw = case_rows(((5, 1), (1, 3), (2, 0)), CPU)[0], Draw(CPU, torch.float16)
    tokens_BU, drawn = tokens_of(rows, 16, draw), [*networks(rows, 16, draw), draw.normal(16, 16), draw.normal(16)]

    def step(rows: PackedRows, parts: int) -> Tensor:
        leaves = [value.detach().clone().requires_grad_() for value in drawn]
        loss_B = joint_loss(JOINT, LOSS, *leaves, tokens_BU, rows, DROPOUT, parts)
        torch.autograd.grad(loss_B, leaves, torch.ones(3))
        return loss_B

    one = step(rows, 1)
    with Capturable():
        three = step(packed_rows(rows.frames_B, rows.tokens_B, rows.most_frames, rows.most_tokens, rows.capacity), 3)
    assert torch.equal(one, three)


def test_the_reference_is_selected_for_sizes_that_the_kernels_do_not_support():
    def request(dtype: torch.dtype, width: int, classes: int) -> OperationRequest:
        return OperationRequest(CPU, dtype, {"width": width, "classes": classes})

    for chosen, dtype, width, classes in (
        ("triton", torch.float16, 512, 1024),
        ("triton", torch.bfloat16, 512, 1024),
        ("reference", torch.float32, 512, 1024),
        ("reference", torch.float16, 512, 1023),
        ("reference", torch.float16, 512, 16384),
    ):
        assert transducer_loss.TRANSDUCER_LOSS.select(AUTO, request(dtype, width, classes)).name == chosen
    with pytest.raises(UnsupportedImplementation, match="width is at most 2048, not 4096"):
        joint.JOINT.select("triton", request(torch.float16, 4096, 1024))


FACTS = small_corpus.facts()
FRAMES = 32


def test_silence_is_cut_at_the_references_samples():
    audio = oracle.utterances((9000, 7000, 2047, 2048, 5000), (1.0,) * 5, silent=0.3)
    audio.audio_A[int(audio.offset_B[4]) :] = 0
    signal_BN = reference.resample(audio, FACTS.largest_resampled(FRAMES) + 1, FACTS, torch.float32)
    found = features_triton.trimmed(signal_BN, audio, FACTS)
    first_B, kept_B = reference.sounding(signal_BN, audio.resampled_B, FACTS)
    assert found.first_B.tolist() == first_B.tolist()
    assert found.kept_B.tolist() == kept_B.tolist()
    assert kept_B.tolist()[2:] == [2047, 2048, 5000]
    assert found.length_B.tolist() == (-(-(kept_B // 160 + 1) // 3)).tolist()


def test_audio_that_is_not_contiguous_is_refused():
    audio = oracle.utterances((1500, 170), (1.0, 1.0))
    audio = type(audio)(audio.audio_A[::2], *(getattr(audio, name) for name in list(audio.__dataclass_fields__)[1:]))
    with pytest.raises(ValueError, match="audio_A must be contiguous"):
        features_triton.features(audio, FACTS, FRAMES, 256, False, torch.float32)
