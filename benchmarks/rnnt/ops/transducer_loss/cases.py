"""Test and benchmark cases of the transducer loss: each pass, and the loss together with the joint network."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.rnnt.ops.joint import JOINT
from benchmarks.rnnt.ops.rows_of_cases import FACTS, UTTERANCES, case_rows, networks, tokens_of
from benchmarks.rnnt.ops.transducer_loss.passes import LossPasses, joint_loss
from common.ops.cases import Case, Draw, Pass, both_ways
from common.ops.dropout.reference import DropoutMask
from common.ops.operation import AUTO, OperationRequest

SCALE = 512.0
"""Loss scale."""


def passes(
    function: LossPasses,
    draw: Draw,
    utterances: int | Sequence[tuple[int, int]],
    width: int,
    classes: int,
    confidence: float = 1.0,
) -> list[Pass]:
    """Return every pass. Bytes and FLOP count the rows that exist; a pass reads or writes h and logits once.

    The choice of rows is not compared, because the reference uses all rows.

    Args:
        width: features of the hidden layer.
        classes: tokens with the blank.
        confidence: standard deviation of the logits.
    """
    rows, used = case_rows(utterances, draw.device)
    tokens = tokens_of(rows, classes, draw)
    h = draw.normal(rows.capacity, width).relu_()
    h[used:] = torch.nan
    weight = draw.normal(classes, width, scale=confidence * (2 / width) ** 0.5)
    bias, d_loss = draw.normal(classes), draw.uniform(rows.utterances, low=0.5, dtype=torch.float32) * SCALE / 8
    label = function.labels(tokens, rows)
    logits, statistics = function.product(h, weight, bias, label, 0, rows)
    recursion = function.recursion(statistics, rows)
    arcs = function.transitions(statistics, recursion, d_loss, rows)
    chosen = function.choose(arcs, label, d_loss, draw.dtype)
    d_logits, dh = torch.zeros_like(logits), h.masked_fill(~chosen.live_R[:, None], 0)
    function.gradient(logits, d_logits, statistics.lse_R, arcs, label, 0, chosen)
    made = int(chosen.rank_R[-1])
    size, number = draw.dtype.itemsize, 4.0 * used
    of_h, of_logits, of_weight = float(used * width * size), float(used * classes * size), float(weight.numel() * size)
    flops, share = 2.0 * used * width * classes, made / used

    def product() -> object:
        found, of_rows = function.product(h, weight, bias, label, 0, rows)
        return found[:used], [each[:used] for each in of_rows]

    def recurse() -> object:
        found = function.recursion(statistics, rows)
        return found.alpha_R[:used], found.beta_R[:used], found.total_B

    def choose() -> None:
        function.choose(arcs, label, d_loss, draw.dtype)

    def gradient() -> object:
        sums = function.gradient(logits, d_logits, statistics.lse_R, arcs, label, 0, chosen)
        return d_logits[:used], sums

    def input_gradient() -> object:
        function.input_gradient_(d_logits, weight, dh, 0, chosen)
        return dh[:used]

    return [
        Pass("labels", lambda: function.labels(tokens, rows), number),
        Pass("product", product, of_h + of_weight + of_logits + 3 * number, flops),
        Pass("recursion", recurse, 6 * number),
        Pass(
            "transitions",
            lambda: [each[:used] for each in function.transitions(statistics, recursion, d_loss, rows)],
            6 * number,
        ),
        Pass("choose", choose, 4 * number),
        Pass("gradient", gradient, share * (2 * of_logits + 4 * number)),
        Pass(
            "weight gradient",
            lambda: function.weight_gradient(d_logits, h, 0, chosen),
            share * (of_logits + of_h) + 2 * of_weight,
            share * flops,
        ),
        Pass("input gradient", input_gradient, share * (of_logits + 2 * of_h) + of_weight, share * flops),
    ]


def whole(
    function: LossPasses,
    draw: Draw,
    utterances: int | Sequence[tuple[int, int]],
    width: int,
    classes: int,
    p: float,
    parts: int = 1,
    confidence: float = 1.0,
) -> list[Pass]:
    """Return the passes from both networks to the loss and back, as in training. Bytes count all inner passes."""
    rows, used = case_rows(utterances, draw.device)
    tokens = tokens_of(rows, classes, draw)
    f, g = networks(rows, width, draw)
    weight, bias = draw.normal(classes, width, scale=confidence * width**-0.5), draw.normal(classes)
    request = OperationRequest(draw.device, f.dtype, {"width": width})
    joint, dropout = JOINT.select(AUTO, request).function, DropoutMask(p, draw.seed(), 7)
    of_h, of_logits = (float(used * columns * draw.dtype.itemsize) for columns in (width, classes))
    flops = 2.0 * used * width * classes
    return both_ways(
        lambda: joint_loss(joint, function, f, g, weight, bias, tokens, rows, dropout, parts),
        [f, g, weight, bias],
        [draw.uniform(rows.utterances, low=0.5, dtype=torch.float32) * SCALE / 8],
        moved=(2 * of_h + of_logits, 4 * of_h + 4 * of_logits),
        flops=(flops, 2 * flops),
    )


SIZES = {"utterances": UTTERANCES, "width": FACTS.joint_width, "classes": FACTS.classes}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CASES = (
    Case(
        "LibriSpeech",
        passes,
        SIZES,
        tests=[{"utterances": ((16, 7), (1, 0), (2, 1)), "width": 264, "classes": 264, "confidence": 3.0}],
        gpu={"utterances": 4},
        dtypes=DTYPES,
        tolerance=2.0,
        tf32=True,
    ),
    Case(
        "LibriSpeech with the joint network",
        whole,
        {**SIZES, "p": FACTS.joint_dropout},
        tests=[{"utterances": ((3, 1), (0, 1), (1, 2)), "width": 8, "classes": 24, "p": 0.25, "parts": 3}],
        gpu={"utterances": 4, "parts": 3},
        dtypes=DTYPES,
        tolerance=2.0,
        tf32=True,
    ),
)
