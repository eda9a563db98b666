"""Measure every operation of BERT in every implementation at the sizes of BERT-large on one GPU.

``python -m benchmarks.bert.ops.bench`` prints milliseconds of forward and backward of one call (one layer's; the loss
is called once a step), the bytes that must be moved and GB/s, for attention also TFLOP/s of the model's FLOP. Backward
is the difference between both together and forward. ``--sweep`` times the tiles of our kernels instead; ``--cases``
limits either to names that contain one of the given words.

Every case is captured in a CUDA graph of four calls, whose tensors are several times the L2 cache. Cases run in a
process of their own, and another one continues behind a case that failed, hung or crashed: it costs one line.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.bert.ops.bench_cases import TOKENS, Case, cases, pairs
from common.errors import SuiteError
from common.ops.batch_norm_bench import copy_bandwidth, time_graph

CALLS = 4
SILENCE_S = 150
_BEGIN = "begin case "
_FAILURES = (RuntimeError, ImportError, AttributeError, TypeError, ValueError, AssertionError, SuiteError)


def milliseconds(case: Case) -> tuple[float, float]:
    """Forward, and backward as the difference between both and forward."""

    def repeat(call: Callable[[], Any]) -> int:
        for _ in range(CALLS):
            call()
        return CALLS

    forward_ms = time_graph(lambda: repeat(case.forward), replays=9)
    both_ms = time_graph(lambda: repeat(lambda: case.backward(case.forward())), replays=9)
    return forward_ms, both_ms - forward_ms


def measure(name: str, dtype: torch.dtype) -> None:
    """Print one case."""
    case = cases()[name](dtype)
    forward_ms, backward_ms = milliseconds(case)
    line = f"{name:34s} forward {forward_ms:8.4f} ms  backward {backward_ms:8.4f} ms"
    if case.flops is not None:
        rates = (flop / ms * 1e-9 for flop, ms in zip(case.flops, (forward_ms, backward_ms), strict=True))
        line += "  {:5.0f}  {:5.0f} TFLOP/s".format(*rates)
    sizes = (case.forward_bytes, case.backward_bytes)
    rates = (size / ms * 1e-6 for size, ms in zip(sizes, (forward_ms, backward_ms), strict=True))
    line += "  {:4.0f}  {:4.0f} MB  {:5.0f}  {:5.0f} GB/s".format(*(size * 1e-6 for size in sizes), *rates)
    print(line, flush=True)


def sweeps() -> dict[str, tuple[dict[str, Any], str, Callable[[torch.dtype], Case], list[Any]]]:
    """For every kernel with a choice of tiles: its table, its key there, the case that runs it, and the tiles."""
    from benchmarks.bert.ops import attention_triton, bias_gelu_triton, cross_entropy_triton, dropout_add_norm_triton

    everything = cases()
    blocks = [(64, 64, 4, stages) for stages in (1, 2, 3, 4)]
    blocks += [(128, 64, 4, 2), (128, 64, 8, 2), (64, 128, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 8, 2)]
    key_blocks = [*blocks, (32, 64, 4, 2), (32, 64, 4, 3), (32, 64, 8, 2), (128, 64, 4, 3)]
    rows = list(itertools.product((1, 2, 4, 8), (2, 4, 8)))
    gelu = [(4096 * scale // columns, columns) for columns in (256, 512, 1024) for scale in (1, 2)]
    tiles: dict[tuple[str, str], tuple[Any, list[Any]]] = {
        ("attention", "forward"): (attention_triton, blocks),
        ("attention", "query_gradient"): (attention_triton, blocks),
        ("attention", "key_value_gradient"): (attention_triton, key_blocks),
        ("dropout_add_norm", "forward"): (dropout_add_norm_triton, [(*tile, 0) for tile in rows]),
        ("dropout_add_norm", "backward"): (
            dropout_add_norm_triton,
            [(*tile, programs) for tile in rows for programs in (2, 4, 8)],
        ),
        ("bias_gelu", "forward"): (bias_gelu_triton, [(*tile, warps, 0) for tile in gelu for warps in (4, 8)]),
        ("bias_gelu", "backward"): (
            bias_gelu_triton,
            [(*tile, warps, programs) for tile in gelu for warps in (4, 8) for programs in (2, 4, 8)],
        ),
        ("cross_entropy", "forward"): (cross_entropy_triton, list(itertools.product((2048, 4096, 8192), (4, 8, 16)))),
        ("cross_entropy", "backward"): (cross_entropy_triton, list(itertools.product((2048, 4096, 8192), (4, 8)))),
    }
    return {
        f"{operation} {kernel}": (module.TILES, kernel, everything[f"{operation} triton"], choices)
        for (operation, kernel), (module, choices) in tiles.items()
    }


def sweep(name: str, dtype: torch.dtype) -> None:
    """Print the times of forward or backward of one operation with every tile of one kernel."""
    table, kernel, build, choices = sweeps()[name]
    case = build(dtype)
    before = table[kernel]
    times = []
    print(f"{name}, now {tuple(before)}:", flush=True)
    for choice in choices:
        table[kernel] = type(before)(*choice)
        try:
            times.append((milliseconds(case)[kernel != "forward"], choice))
        except _failures() as reason:
            print(f"    {choice} {_first_line(reason)}", flush=True)
        else:
            print(f"    {choice} {times[-1][0]:.4f} ms", flush=True)
    table[kernel] = before
    print("  best:", *(f"{choice} {ms:.4f} ms" for ms, choice in sorted(times)[:3]), flush=True)


def _failures() -> tuple[type[BaseException], ...]:
    """What a case may raise without ending the others: theirs, and the compiler's where there is one."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return _FAILURES
    return (*_FAILURES, TritonError)


def _first_line(reason: BaseException) -> str:
    return f"{type(reason).__name__}: {(str(reason).strip() or 'no message').splitlines()[0]}"


def work(names: list[str], dtype: torch.dtype, run: Callable[[str, torch.dtype], None]) -> None:
    """Run cases one after the other up to the first that fails, which may leave the device in any state."""
    for name in names:
        print(f"{_BEGIN}{name}", flush=True)
        try:
            run(name, dtype)
        except _failures() as reason:
            print(f"{name:34s} {_first_line(reason)}", flush=True)
            return
        torch.cuda.empty_cache()


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Output of a process, which is killed when it is silent for too long."""
    assert process.stdout is not None
    while True:
        watch = threading.Timer(SILENCE_S, process.kill)
        watch.start()
        line = process.stdout.readline()
        watch.cancel()
        if not line:
            return
        yield line.rstrip("\n")


def supervise(names: list[str], arguments: list[str]) -> None:
    """Run cases in a process of their own; start another behind a case that ended it."""
    while names:
        command = [sys.executable, "-m", "benchmarks.bert.ops.bench", *arguments, "--worker", *names]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        begun: list[str] = []
        for line in _lines(process):
            if line.startswith(_BEGIN):
                begun.append(line.removeprefix(_BEGIN))
            else:
                print(line, flush=True)
        code = process.wait()
        if code != 0:
            print(f"{begun[-1] if begun else 'no case begun':34s} ended its process with {code}", flush=True)
        if not begun:
            return
        names = [name for name in names if name not in begun]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--cases", default="", help="words, separated by commas")
    parser.add_argument("--sweep", action="store_true", help="time tiles instead of implementations")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.bert.ops.bench measures a GPU, and PyTorch sees none")
    dtype = getattr(torch, arguments.dtype)
    if arguments.worker is not None:
        work(arguments.worker, dtype, sweep if arguments.sweep else measure)
        return
    words = [word for word in arguments.cases.split(",") if word]
    names = [name for name in (sweeps() if arguments.sweep else cases()) if not words or any(w in name for w in words)]
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {arguments.dtype}, copy "
        f"{copy_bandwidth() * 1e-9:.0f} GB/s, {TOKENS} tokens, {pairs() / TOKENS:.0f} in the sequence of a token",
        flush=True,
    )
    torch.cuda.empty_cache()
    supervise(names, ["--dtype", arguments.dtype, *(["--sweep"] if arguments.sweep else [])])


if __name__ == "__main__":
    main()
