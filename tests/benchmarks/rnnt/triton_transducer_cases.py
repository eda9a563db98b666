"""The kernels of the joint and of the transducer's loss against formulas in float64; run by
tests/test_interpreted_kernels.py. Memory that a kernel must fill is poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.rnnt.ops import joint, transducer_loss
from benchmarks.rnnt.ops.joint import triton as joint_triton
from benchmarks.rnnt.ops.transducer_loss import joint_loss, packed_loss
from benchmarks.rnnt.ops.transducer_loss import triton as loss_triton
from benchmarks.rnnt.ops.transducer_loss.passes import Transitions
from benchmarks.rnnt.packed_rows import packed_rows
from common.errors import UnsupportedImplementation
from common.ops.dropout.reference import DropoutMask
from common.ops.operation import AUTO, OperationRequest
from tests.benchmarks.rnnt.transducer_oracle import Case, case, expected, used_rows
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MIXED = ([5, 1, 2, 6], [1, 3, 0, 2])
JOINT, PLAIN_JOINT = (joint.JOINT.function(name) for name in ("triton", "reference"))
PLAIN_LOSS = transducer_loss.TRANSDUCER_LOSS.function("reference")
OWN = {name: transducer_loss.TRANSDUCER_LOSS.function(name) for name in ("fused", "sparse", "library")}
DESCRIBED = "fused, by descriptors"
DROPOUT = DropoutMask(0.25, torch.tensor((5 << 32) + 3), 7)


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, of which there are several."""
    for table, tiles in (
        (joint_triton, {"forward": (2, 1), "backward": (4, 1, 1), "columns": (1, 1)}),
        (
            loss_triton,
            {
                "statistics": (64, 1), "gradient": (64, 1, 3, 1), "recursion": (32, 1),
                "product": (16, 16, 16, 1, 1, 2, 0, 0), "input_gradient": (16, 16, 16, 1, 1, 2, 0, 0),
                "weight_gradient": (16, 16, 16, 1, 1, 8, 0, 0),
                "some_input_gradient": (16, 16, 16, 1, 1, 2, 0, 0),
                "some_weight_gradient": (16, 16, 16, 1, 1, 8, 0, 0),
            },
        ),
    ):  # fmt: skip
        for key, fields in tiles.items():
            monkeypatch.setitem(table.TILES, key, type(table.TILES[key])(*fields))
    monkeypatch.setattr(loss_triton, "BLOCK", 8)
    monkeypatch.setattr(loss_triton, "CLEARED", 32)


def close(found: Tensor, formula: Tensor, dtype: torch.dtype) -> bool:
    return bool((found.double() - formula.double()).norm() < TOLERANCE[dtype] * formula.double().norm())


def networks(given: Case, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """f and g, with NaN in padding."""
    random = torch.Generator().manual_seed(width)
    f = torch.randn(given.rows.most_frames, len(given.frames), width, generator=random)
    g = torch.randn(given.rows.most_tokens + 1, len(given.frames), width, generator=random)
    for utterance, (frames, tokens) in enumerate(zip(given.frames, given.lengths, strict=True)):
        f[frames:, utterance] = torch.nan
        g[tokens + 1 :, utterance] = torch.nan
    return f.to(dtype), g.to(dtype)


# The joint


@pytest.mark.parametrize(
    ("dtype", "width", "dropout"),
    [
        (torch.float16, 16, DROPOUT),
        (torch.bfloat16, 9, DROPOUT._replace(p=0.5)),
        (torch.float32, 12, DROPOUT._replace(p=0.0)),
    ],
    ids=str,
)
def test_joint_and_its_gradients_are_the_references(dtype: torch.dtype, width: int, dropout: DropoutMask) -> None:
    given = case(*MIXED, classes=5)
    f, g = networks(given, width, dtype)
    used = used_rows(given.rows)
    found, wanted = (passes.forward(f, g, given.rows, dropout)[:used] for passes in (JOINT, PLAIN_JOINT))
    assert found.dtype == dtype
    assert torch.equal(found, wanted)
    dh = torch.randn(given.rows.capacity, width).to(dtype)
    dh[used:] = torch.nan
    h = torch.cat((wanted, torch.full((given.rows.capacity - used, width), torch.nan, dtype=dtype)))
    frames, columns = len(f), len(g)
    formulas = PLAIN_JOINT.backward(dh.double(), h.double(), None, frames, columns, given.rows, dropout)
    masked = torch.where(h == 0, 0.0, dh)
    live = torch.rand(given.rows.capacity) < 0.6
    some = [passes.backward(dh, h, live, frames, columns, given.rows, dropout) for passes in (JOINT, PLAIN_JOINT)]
    assert all(close(*pair, dtype) for pair in zip(*some, strict=True))
    assert not close(some[0][0], formulas[0], dtype)
    for gradients in (
        JOINT.backward(dh, h, None, frames, columns, given.rows, dropout),
        JOINT.backward(masked, None, None, frames, columns, given.rows, dropout),
    ):
        assert all(close(*pair, dtype) for pair in zip(gradients, formulas, strict=True))
        assert all(gradient.dtype == dtype for gradient in gradients)


def test_joint_keeps_what_is_not_a_number() -> None:
    given = case([2], [1], classes=5, spare=0)
    f, g = networks(given, 8, torch.float16)
    f[0, 0, 3] = torch.nan
    assert JOINT.forward(f, g, given.rows, DROPOUT._replace(p=0.0)).isnan().sum() == 2


# The loss of logits


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("classes", [16, 11])
def test_loss_of_logits_and_its_gradient_are_the_recursions(classes: int, dtype: torch.dtype) -> None:
    given = case(*MIXED, classes=classes, seed=classes)
    random = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(given.rows.capacity, classes, generator=random)
    used = used_rows(given.rows)
    logits[used:] = torch.nan
    leaf = logits.to(dtype).requires_grad_()
    weight_B = torch.rand(4) + 0.5
    loss_B = packed_loss(OWN["fused"], leaf, given.tokens_BU, given.rows)
    (d_leaf,) = torch.autograd.grad(loss_B, leaf, weight_B)
    losses, d_wanted = expected(leaf[:used], given, weight_B)
    assert loss_B.dtype == torch.float32
    assert close(loss_B, losses, torch.float32)
    assert d_leaf.dtype == dtype
    assert close(d_leaf[:used], d_wanted, dtype)
    assert not d_leaf[used:].any()


def test_all_ways_to_the_end_are_all_ways_from_the_beginning() -> None:
    given = case([3, 20, 2], [33, 2, 0], classes=8)
    passes, rows = OWN["fused"], given.rows
    label_R = passes.labels(given.tokens_BU, rows)
    assert torch.equal(label_R, PLAIN_LOSS.labels(given.tokens_BU, rows))
    statistics = passes.statistics(torch.randn(rows.capacity, 8), label_R)
    alpha_R, _, total_B = passes.recursion(statistics, rows)
    last_B = rows.offsets[1:] - 1
    assert torch.allclose(alpha_R[last_B] + statistics.blank_R[last_B], total_B, rtol=1e-6)


def test_rows_beyond_the_capacity_make_every_loss_infinite_and_write_nothing() -> None:
    given = case([4, 3], [2, 2], classes=8, spare=-1)
    leaf = torch.randn(20, 8, requires_grad=True)
    loss_B = packed_loss(OWN["fused"], leaf, given.tokens_BU, given.rows)
    (d_leaf,) = torch.autograd.grad(loss_B.sum(), leaf)
    assert loss_B.isinf().all()
    assert not d_leaf.any()


# The joint's last layer with the loss


def losses_and_gradients(
    passes: tuple[object, object], drawn: list[Tensor], given: Case, dropout: DropoutMask, parts: int
) -> list[Tensor]:
    leaves = [value.detach().clone().requires_grad_() for value in drawn]
    loss_B = joint_loss(*passes, *leaves, given.tokens_BU, given.rows, dropout, parts)  # type: ignore[arg-type]
    weight_B = torch.linspace(0.5, 2.0, len(loss_B), dtype=loss_B.dtype)
    return [loss_B.detach(), *torch.autograd.grad(loss_B, leaves, weight_B)]


def last_layer(classes: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(classes)
    return [torch.randn(shape, generator=random).to(dtype) for shape in ((classes, width), (classes,))]


EVEN, ODD, PARTS = (torch.float16, 32, 32, 1), (torch.bfloat16, 40, 24, 1), (torch.float16, 8, 24, 3)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("fused", EVEN), ("fused", ODD), ("sparse", EVEN), ("sparse", ODD), ("library", ODD),
        (DESCRIBED, ODD), (DESCRIBED, PARTS),
    ],
)  # fmt: skip
def test_loss_of_both_networks_and_its_gradients_are_the_references_in_float64(
    sizes: tuple[torch.dtype, int, int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, width, classes, parts = sizes
    if name == DESCRIBED:
        name = "fused"
        for key in ("product", "input_gradient", "weight_gradient"):
            monkeypatch.setitem(loss_triton.TILES, key, loss_triton.TILES[key]._replace(described=1))
    given = case(*MIXED, classes=classes)
    drawn = [*networks(given, width, dtype), *last_layer(classes, width, dtype)]
    found = losses_and_gradients((JOINT, OWN[name]), drawn, given, DROPOUT, parts)
    wide = [value.double() for value in drawn]
    wanted = losses_and_gradients((PLAIN_JOINT, PLAIN_LOSS), wide, given, DROPOUT, 1)
    for place, (value, formula) in enumerate(zip(found, wanted, strict=True)):
        assert close(value, formula, dtype if place == 0 else torch.bfloat16), place
        assert value.dtype == (dtype if place else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_left_out_whose_gradient_is_rounded_to_zero(dtype: torch.dtype) -> None:
    floor = 2.0**-25 * (1.0 if dtype == torch.float16 else 0.5)
    through = torch.tensor([1.0, 0.9, 1.1, 0.0, torch.nan, 3.0, 2.0, torch.nan]) * floor
    label = torch.tensor([3, -1, 2, 0, -1, 4, -2, -2], dtype=torch.int32)
    arcs = Transitions(0.25 * through, 0.75 * through)
    chosen = OWN["sparse"].choose(arcs, label, torch.tensor([0.1, -0.5]), dtype)
    assert chosen is not None
    assert chosen.live_R.tolist() == [False, False, True, False, True, True, False, False]
    assert chosen.rank_R.tolist() == [0, 0, 1, 1, 2, 3, 3, 3]
    assert chosen.row_R[:3].tolist() == [2, 4, 5]


def test_confident_rows_are_few_and_their_gradients_the_references() -> None:
    given = case([12, 9], [3, 2], classes=16)
    weight, bias = last_layer(16, 16, torch.float16)
    drawn = [*networks(given, 16, torch.float16), 6 * weight, bias]
    found = losses_and_gradients((JOINT, OWN["sparse"]), drawn, given, DROPOUT, 2)
    wide = [value.double() for value in drawn]
    wanted = losses_and_gradients((PLAIN_JOINT, PLAIN_LOSS), wide, given, DROPOUT, 1)
    assert all(close(*pair, torch.bfloat16) for pair in zip(found, wanted, strict=True))
    label_R = OWN["sparse"].labels(given.tokens_BU, given.rows)
    h_RH = JOINT.forward(*drawn[:2], given.rows, DROPOUT)
    _, statistics = OWN["sparse"].product(h_RH, *drawn[2:], label_R, 0, given.rows)
    recursion, d_loss_B = OWN["sparse"].recursion(statistics, given.rows), torch.ones(2)
    arcs = OWN["sparse"].transitions(statistics, recursion, d_loss_B, given.rows)
    chosen = OWN["sparse"].choose(arcs, label_R, d_loss_B, torch.float16)
    assert chosen is not None
    assert 10 < int(chosen.rank_R[-1]) < 0.7 * used_rows(given.rows)


@pytest.mark.parametrize("name", ["sparse", "library"])
def test_parts_leave_the_losses_as_they_are_and_a_step_is_capturable(name: str) -> None:
    given = case(*MIXED, classes=16)
    drawn = [*networks(given, 16, torch.float16), *last_layer(16, 16, torch.float16)]
    one = losses_and_gradients((JOINT, OWN[name]), drawn, given, DROPOUT, 1)
    with Capturable():
        frames, tokens = given.rows.frames_B, given.rows.tokens_B
        rows = packed_rows(frames, tokens, given.rows.most_frames, given.rows.most_tokens, given.rows.capacity)
        three = losses_and_gradients((JOINT, OWN[name]), drawn, given._replace(rows=rows), DROPOUT, 3)
    assert torch.equal(one[0], three[0])
    assert all(close(*pair, torch.float16) for pair in zip(three[1:], one[1:], strict=True))


def test_what_the_kernels_cannot_do_is_left_to_pytorch() -> None:
    def request(dtype: torch.dtype, width: int, classes: int) -> OperationRequest:
        return OperationRequest(torch.device("cpu"), dtype, {"width": width, "classes": classes})

    for chosen, dtype, width, classes in (
        ("sparse", torch.float16, 512, 1024),
        ("sparse", torch.bfloat16, 512, 1024),
        ("reference", torch.float32, 512, 1024),
        ("reference", torch.float16, 512, 1023),
        ("reference", torch.float16, 512, 16384),
    ):
        assert transducer_loss.TRANSDUCER_LOSS.select(AUTO, request(dtype, width, classes)).name == chosen
    with pytest.raises(UnsupportedImplementation, match="width is at most 2048, not 4096"):
        joint.JOINT.select("triton", request(torch.float16, 4096, 1024))
