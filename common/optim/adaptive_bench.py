"""Time one LAMB update of BERT-large's 398 tensors against a copy of as many bytes on the same device.

``python -m common.optim.adaptive_bench`` prints milliseconds, the bytes that the passes have to move (each operand
read or written once in each pass), the ratio to the time of a copy that reads and writes as many bytes, measured
alternately in the same run, and on a GPU the time by kernel. On a CPU it takes a model of 2 layers unless told
otherwise: that proves that it works and says nothing of speed. ``--sweep`` tries sizes of block and numbers of warps
for the Triton kernels.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics as stats
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from common.errors import UnsupportedImplementation
from common.optim.adaptive import LAMB, Adam, AdamW
from common.optim.rules import GroupSettings, Rule, Update
from common.optim.shard import Fragment, Shard

RULES: dict[str, Rule] = {"lamb": LAMB(0.60466, 0.85437), "adamw": AdamW(), "adam": Adam()}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
POSITIONS, SEGMENTS = 512, 2
ALIGNMENT = 128  # elements that tensors start on: 256 bytes of a 16-bit type
COPY_BYTES = 4 << 30  # most that a copy reads and writes; the time of more is scaled from it
ROUNDS = 10
UPDATES = 5  # in one round
SWEPT_BLOCKS = (1024, 2048, 4096, 8192)
SWEPT_WARPS = (4, 8, 16)


@dataclass(frozen=True)
class Size:
    """Sizes of a BERT."""

    hidden: int
    layers: int
    vocabulary: int


BERT_LARGE = Size(1024, 24, 30522)
SMALL = Size(64, 2, 1000)


def bert_shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """The parameters of BERT with both pretraining heads, query, key and value as tensors of their own."""
    shapes: dict[str, tuple[int, ...]] = {}
    hidden = size.hidden

    def linear(name: str, out: int, inside: int = hidden) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, inside), (out,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (hidden,), (hidden,)

    for name, rows in (("word", size.vocabulary), ("position", POSITIONS), ("segment", SEGMENTS)):
        shapes[f"embeddings.{name}.weight"] = (rows, hidden)
    norm("embeddings.norm")
    for layer in range(size.layers):
        for name in ("query", "key", "value", "output"):
            linear(f"layers.{layer}.attention.{name}", hidden)
        norm(f"layers.{layer}.attention.norm")
        linear(f"layers.{layer}.mlp.up", 4 * hidden)
        linear(f"layers.{layer}.mlp.down", hidden, 4 * hidden)
        norm(f"layers.{layer}.mlp.norm")
    linear("pooler", hidden)
    linear("masked_lm.transform", hidden)
    norm("masked_lm.norm")
    shapes["masked_lm.bias"] = (size.vocabulary,)
    linear("next_sentence", 2)
    return shapes


def build_shard(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device) -> Shard:
    """All tensors in one shard: group 0 holds those of two dimensions, group 1 the biases and norms."""
    fragments, start = [], 0
    for index, shape in enumerate(shapes.values()):
        numel = math.prod(shape)
        stop = start + -(-numel // ALIGNMENT) * ALIGNMENT
        fragments.append(Fragment(index, 0 if len(shape) > 1 else 1, start, numel, stop))
        start = stop
    parameters = torch.zeros(start, dtype=dtype, device=device)
    gradients = torch.zeros_like(parameters)
    for fragment in fragments:
        part = slice(fragment.start, fragment.start + fragment.numel)
        parameters[part].normal_(std=0.02)
        gradients[part].normal_(std=1e-3)
    masters = parameters if dtype == torch.float32 else parameters.float()
    return Shard(parameters, gradients, masters, tuple(fragments))


def bind(rule: Rule, shard: Shard, implementation: str) -> Update:
    """``rule`` for ``shard`` on one rank, biases and norms without decay and ratio."""
    trust = isinstance(rule, LAMB)
    settings = [GroupSettings(1.0, 0.1, trust, False), GroupSettings(1.0, 0.0, False, False)]
    return rule.bind([shard], settings, len(shard.fragments), lambda _: None, implementation)


def one_update(update: Update, device: torch.device) -> Callable[[], None]:
    """What an optimizer asks of a rule in one iteration, with numbers that hardly move the weights."""
    stats = torch.zeros(2, dtype=torch.float32, device=device)
    rates_G = torch.full((2,), 1e-6, device=device)
    step = torch.zeros((), dtype=torch.int64, device=device)
    factor = torch.ones((), device=device)
    write = torch.ones((), dtype=torch.bool, device=device)

    def run() -> None:
        stats.zero_()
        update.measure(stats)
        update.apply(rates_G, step, factor, write)

    return run


def bytes_by_pass(shard: Shard, trust: bool) -> dict[str, int]:
    """What the passes of the Triton kernels have to move; those of less than 0.1 % are left out."""
    model = shard.parameters.element_size()
    written = 4 + model if shard.has_masters else 4  # a weight
    whole = sum(f.numel for f in shard.fragments)
    twice = sum(f.numel for f in shard.fragments if trust and f.group == 0)
    return {
        "adaptive_measure_kernel": whole * model,
        "adaptive_first_pass_kernel": whole * (model + 12 + 8) + (whole - twice) * written,
        "adaptive_second_pass_kernel": twice * (12 + written),
    }


def timed_alternately(runs: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Median milliseconds of each of ``runs``; they take turns, so that a clock that drifts meets all."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for run, series in zip(runs, times, strict=True):
            series.append(_milliseconds(run, device))
    return [stats.median(series) for series in times]


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """``UPDATES`` calls of ``run`` behind one another: a CUDA graph on a GPU."""

    def series() -> None:
        for _ in range(UPDATES):
            run()

    series()
    if device.type != "cuda":
        return series
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        series()
    return graph.replay


def copying(moved: int, device: torch.device) -> tuple[Callable[[], None], float]:
    """A copy, and how many of it read and write ``moved`` bytes."""
    used = min(moved, COPY_BYTES)
    source = torch.zeros(used // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return lambda: _discard(target.copy_(source)), moved / used


def by_kernel(run: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of one update by kernel, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    sums = {event.key: event.self_device_time_total / 1e3 / UPDATES for event in profiler.key_averages()}
    return dict(sorted(((key, spent) for key, spent in sums.items() if spent > 0), key=lambda item: -item[1]))


def report(rule: Rule, shard: Shard, implementation: str) -> str:
    """Time, bytes and ratio to a copy of one update, and its longest kernels."""
    device = shard.parameters.device
    update = bind(rule, shard, implementation)
    run = captured(one_update(update, device), device)
    passes = bytes_by_pass(shard, isinstance(rule, LAMB))
    moved = sum(passes.values())
    copy, copies = copying(moved, device)
    of_series, of_copy = timed_alternately((run, copy), device)
    milliseconds, copy_ms = of_series / UPDATES, of_copy * copies
    lines = [
        f"update ({update.implementation})  {milliseconds:.3f} ms, {moved / 1e6:.1f} MB, {_rate(moved, milliseconds)}",
        f"copy of as many bytes   {copy_ms:.3f} ms, {_rate(moved, copy_ms)}",
        f"ratio                   {milliseconds / copy_ms:.2f}",
    ]
    kernels = by_kernel(run) if device.type == "cuda" else {}
    for name, spent in list(kernels.items())[:10]:
        own = passes.get(name, 0)
        of_pass = f", {own / 1e6:.1f} MB, {_rate(own, spent)}" if own else ""
        lines.append(f"  {spent:9.3f} ms{of_pass}  {name[:90]}")
    return "\n".join(lines)


def sweep(rule: Rule, shard: Shard) -> str:
    """Milliseconds of one Triton update for each size of block and number of warps."""
    from common.optim import adaptive_triton

    device = shard.parameters.device
    lines = []
    for block, warps in itertools.product(SWEPT_BLOCKS, SWEPT_WARPS):
        adaptive_triton.BLOCK, adaptive_triton.WARPS = block, warps
        run = captured(one_update(bind(rule, shard, "triton"), device), device)
        spent = timed_alternately((run,), device)[0] / UPDATES
        passes = {n: ms for n, ms in by_kernel(run).items() if n in bytes_by_pass(shard, True)}
        parts = ", ".join(f"{name} {ms:.3f}" for name, ms in passes.items())
        lines.append(f"block {block:5d}, {warps:2d} warps  {spent:8.3f} ms  {parts}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", choices=RULES, default="lamb")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and gradients")
    parser.add_argument("--implementation", default="auto", help="auto, triton or reference")
    parser.add_argument("--layers", type=int, metavar="N", help=f"{BERT_LARGE.layers}; on a CPU {SMALL.layers}")
    parser.add_argument("--hidden", type=int, metavar="N", help=f"{BERT_LARGE.hidden}; on a CPU {SMALL.hidden}")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.sweep and device.type != "cuda":
        parser.error("--sweep times Triton kernels and needs a GPU")
    size = BERT_LARGE if device.type == "cuda" else SMALL
    given = {"hidden": arguments.hidden, "layers": arguments.layers}
    size = replace(size, **{name: value for name, value in given.items() if value is not None})
    if size.hidden < 1 or size.layers < 0:
        parser.error("--hidden is at least 1 and --layers at least 0")
    torch.manual_seed(0)
    shard = build_shard(bert_shapes(size), DTYPES[arguments.dtype], device)
    rule = RULES[arguments.rule]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    whole = sum(f.numel for f in shard.fragments)
    title = f"{arguments.rule}, {len(shard.fragments)} tensors, {whole:,} parameters in {arguments.dtype}, {name}"
    print(f"{title}, torch {torch.__version__}")
    try:
        print(sweep(rule, shard) if arguments.sweep else report(rule, shard, arguments.implementation))
    except UnsupportedImplementation as error:
        parser.exit(1, f"{error}\n")


def _milliseconds(run: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _rate(moved: int, milliseconds: float) -> str:
    return f"{moved / milliseconds / 1e6:,.2f} GB/s"


def _discard(_: Tensor) -> None:
    return None


if __name__ == "__main__":
    main()
