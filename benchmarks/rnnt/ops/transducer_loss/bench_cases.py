"""The transducer's loss for micro-batches of LibriSpeech's lengths, pass by pass, and against torchaudio's."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.ops import joint, transducer_loss
from benchmarks.rnnt.ops.bench_rows import BenchRows, bench_rows
from benchmarks.rnnt.ops.transducer_loss import LossPasses, joint_loss, packed_loss
from common.mlperf.fixed import fixed_facts
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each, requested
from common.ops.bench.sweep import Sweep
from common.ops.dropout.reference import DropoutMask
from common.ops.operation import AUTO, OperationRequest

UTTERANCES = 192
"""Of a micro-batch, at which tiles are tried."""

SCALE = 512.0
"""Of the loss."""

MOST_LOGITS = (1 << 31) - 1
"""Beyond which torchaudio's loss writes to other memory than its own."""


def _normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=cases.DEVICE, dtype=dtype)


def case(passes: LossPasses, batch: int, dtype: torch.dtype) -> list[Pass]:
    """Bytes and FLOP are those of the rows that exist; h and logits are read or written once in a pass."""
    given = bench_rows(batch, torch.device(cases.DEVICE))
    rows, used, width, classes = given.rows, given.used, given.facts.joint_width, given.facts.classes
    h = _normal(dtype, rows.capacity, width).relu_()
    weight, bias = _normal(dtype, classes, width) * width**-0.5, _normal(dtype, classes)
    d_loss = torch.full((batch,), SCALE / batch, device=cases.DEVICE)
    label = passes.labels(given.tokens_BU, rows)
    logits, statistics = passes.product(h, weight, bias, label, 0, rows)
    recursion = passes.recursion(statistics, rows)
    arcs = passes.transitions(statistics, recursion, d_loss, rows)
    chosen = passes.choose(arcs, label, d_loss, dtype)
    made = used if chosen is None else int(chosen.rank_R[-1])
    size, number = dtype.itemsize, 4.0 * used
    of_h, of_logits, of_weight = float(used * width * size), float(used * classes * size), float(weight.numel() * size)
    flops, share = 2.0 * used * width * classes, made / used

    def gradient() -> Tensor:
        return passes.gradient(logits, logits, statistics.lse_R, arcs, label, 0, rows, chosen, False)

    return [
        Pass("labels", lambda: passes.labels(given.tokens_BU, rows), number),
        Pass(
            "product",
            lambda: passes.product(h, weight, bias, label, 0, rows),
            of_h + of_weight + of_logits + 3 * number,
            flops,
        ),
        Pass("recursion", lambda: passes.recursion(statistics, rows), 6 * number),
        Pass("transitions", lambda: passes.transitions(statistics, recursion, d_loss, rows), 6 * number),
        Pass("choose", lambda: passes.choose(arcs, label, d_loss, dtype), 0.0 if chosen is None else 4 * number),
        Pass("gradient", gradient, share * (2 * of_logits + 4 * number)),
        Pass(
            "weight gradient",
            lambda: passes.weight_gradient(logits, h, 0, rows, chosen),
            share * (of_logits + of_h) + 2 * of_weight,
            share * flops,
        ),
        Pass(
            "input gradient",
            lambda: passes.input_gradient_(logits, weight, h, 0, rows, chosen),
            share * (of_logits + 2 * of_h) + of_weight,
            share * flops,
        ),
    ]


def whole(passes: LossPasses, batch: int, dtype: torch.dtype) -> list[Pass]:
    """From both networks to the loss and back, as a step has it; bytes are those of all its passes."""
    given = bench_rows(batch, torch.device(cases.DEVICE))
    rows, facts = given.rows, given.facts
    width, classes, device = facts.joint_width, facts.classes, torch.device(cases.DEVICE)
    joints = joint.JOINT.select(AUTO, OperationRequest(device, dtype, {"width": width})).function
    leaves = [
        _normal(dtype, rows.most_frames, batch, width),
        _normal(dtype, rows.most_tokens + 1, batch, width),
        _normal(dtype, classes, width) * width**-0.5,
        _normal(dtype, classes),
    ]
    f, g, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    dropout = DropoutMask(facts.joint_dropout, torch.zeros((), dtype=torch.int64, device=device), 0)
    of_h, of_logits = (float(given.used * columns * dtype.itemsize) for columns in (width, classes))
    flops = 2.0 * given.used * width * classes
    return both_ways(
        lambda: joint_loss(joints, passes, f, g, weight, bias, given.tokens_BU, rows, dropout),
        leaves,
        [torch.full((batch,), SCALE / batch, device=device)],
        moved=(2 * of_h + of_logits, 4 * of_h + 4 * of_logits),
        flops=(flops, 2 * flops),
    )


def alone(passes: LossPasses, batch: int, dtype: torch.dtype) -> list[Pass]:
    """The loss of packed logits in ``dtype``: read twice, and their gradient written."""
    given = bench_rows(batch, torch.device(cases.DEVICE))
    logits = _normal(dtype, given.rows.capacity, given.facts.classes).requires_grad_()
    moved = float(given.used * given.facts.classes * dtype.itemsize)
    return both_ways(
        lambda: packed_loss(passes, logits, given.tokens_BU, given.rows),
        [logits],
        [torch.ones(batch, device=cases.DEVICE)],
        moved=(moved, 2 * moved),
    )


def slices(given: BenchRows) -> Iterator[tuple[Tensor, ...]]:
    """Padded fp32 logits, targets, and lengths of both, for torchaudio: as many utterances at a time as it can take."""
    rows, classes = given.rows, given.facts.classes
    frames_B, tokens_B = rows.frames_B.tolist(), rows.tokens_B.tolist()
    begin = 0
    while begin < rows.utterances:
        end, shape = begin, (0, 0)
        while end < rows.utterances:
            larger = max(shape[0], frames_B[end]), max(shape[1], tokens_B[end] + 1)
            if (end + 1 - begin) * larger[0] * larger[1] * classes > MOST_LOGITS:
                break
            end, shape = end + 1, larger
        own = slice(begin, end)
        logits = torch.randn((end - begin, *shape, classes), device=rows.device)
        targets = given.tokens_BU[own, : shape[1] - 1].contiguous()
        yield logits.requires_grad_(), targets, rows.frames_B[own].clone(), rows.tokens_B[own].clone()
        begin = end


def torchaudios(batch: int, dtype: torch.dtype) -> list[Pass]:
    """The same utterances, padded, in fp32 whatever ``dtype`` is. Its forward pass has the gradients already."""
    from torchaudio.functional import rnnt_loss

    given = bench_rows(batch, torch.device(cases.DEVICE))
    parts = list(slices(given))

    def both() -> None:
        for logits, targets, frames, tokens in parts:
            loss = rnnt_loss(logits, targets, frames, tokens, blank=given.facts.blank, reduction="sum")
            torch.autograd.grad(loss, logits)

    moved = 3.0 * 4 * given.used * given.facts.classes
    return [Pass("both ways", both, moved)]


def entries() -> list[Entry]:
    """Passes of every implementation, all of it together, and the loss of logits alone."""
    facts = fixed_facts(Facts, "rnnt")
    sizes = {"width": facts.joint_width, "classes": facts.classes}
    operation = transducer_loss.TRANSDUCER_LOSS
    found = each("transducer_loss", operation, "sparse", sizes, case)
    for implementation in operation.names:
        build = functools.partial(requested, operation, implementation, sizes, whole)
        found.append(Entry(f"joint_and_loss {implementation}", 0, build))
    build = functools.partial(requested, operation, "fused", sizes, alone)
    found.append(Entry("loss_of_logits fused", 0, build))
    if importlib.util.find_spec("torchaudio") is not None:
        found.append(Entry("loss_of_logits torchaudio", 0, torchaudios))
    return found


def _pass(name: str, direction: str, dtype: torch.dtype) -> list[Pass]:
    passes = case(transducer_loss.TRANSDUCER_LOSS.function(name), UTTERANCES, dtype)
    return [next(own for own in passes if own.name == direction)]


def sweeps() -> dict[str, Sweep]:
    """Tiles of each kernel."""
    from benchmarks.rnnt.ops.transducer_loss import triton

    # rows, columns, depth, warps, stages, programs, flatten, described; two programs of smaller tiles share a
    # multiprocessor, so that one stores while the other multiplies
    products: list[tuple[int, ...]] = [
        (128, 256, 64, 8, 3, 1, 0, 1),
        (128, 256, 64, 8, 3, 1, 1, 1),
        (128, 256, 64, 8, 4, 1, 0, 1),
        (256, 128, 64, 8, 3, 1, 0, 1),
        (256, 128, 64, 8, 3, 1, 1, 1),
        (128, 128, 64, 4, 3, 2, 0, 1),
        (128, 128, 64, 4, 3, 2, 1, 1),
        (128, 128, 64, 8, 3, 2, 0, 1),
        (64, 256, 64, 4, 2, 2, 0, 1),
        (128, 256, 64, 8, 3, 1, 0, 0),
        (128, 128, 64, 4, 3, 2, 0, 0),
    ]
    sums: list[tuple[int, ...]] = [
        (128, 256, 64, 8, 3, 1, 0, 1),
        (128, 256, 64, 8, 4, 1, 0, 1),
        (256, 128, 64, 8, 3, 1, 0, 1),
        (128, 128, 64, 4, 3, 2, 0, 1),
        (128, 256, 64, 8, 3, 1, 0, 0),
    ]
    # numbers of rows that are loaded first take two stages
    some_sums: list[tuple[int, ...]] = [
        (128, 256, 64, 8, 5, 1, 0, 0),
        (128, 256, 32, 8, 8, 1, 0, 0),
        (256, 128, 64, 8, 5, 1, 0, 0),
        (128, 128, 64, 4, 5, 2, 0, 0),
        (128, 128, 64, 8, 5, 2, 0, 0),
    ]
    rows: list[tuple[int, ...]] = [
        (4096, 8, 2, 2),
        (4096, 8, 4, 1),
        (4096, 8, 4, 3),
        (8192, 8, 4, 2),
        (2048, 4, 8, 2),
        (4096, 4, 8, 2),
    ]
    choices: dict[str, tuple[str, list[tuple[int, ...]]]] = {
        "product": ("product", products),
        "input gradient": ("input_gradient", products),
        "weight gradient": ("weight_gradient", sums),
        "gradient of some input": ("some_input_gradient", products),
        "gradient of some weight": ("some_weight_gradient", some_sums),
        "gradient": ("gradient", rows),
        "recursion": ("recursion", [(32, 8), (64, 8), (128, 4), (128, 12)]),
    }
    found = {
        f"transducer_loss {name}": Sweep(
            triton.TILES,
            key,
            tiles,
            functools.partial(
                _pass, "sparse" if key.startswith("some") else "fused", key.removeprefix("some_").replace("_", " ")
            ),
            False,
        )
        for name, (key, tiles) in choices.items()
    }
    elements = list(itertools.product((2048, 4096, 8192), (4, 8)))
    build = functools.partial(alone, transducer_loss.TRANSDUCER_LOSS.function("fused"), UTTERANCES)
    found["transducer_loss statistics"] = Sweep(triton.TILES, "statistics", elements, build, False)
    return found
