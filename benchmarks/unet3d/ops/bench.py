"""Measure every operation of 3D U-Net at the sizes of each layer on one GPU, and add them up to a step.

``python -m benchmarks.unet3d.ops.bench`` prints for every pass of an operation milliseconds of one call, how many of
them a step has, the bytes that must be moved and their rate as a share of the copy bandwidth, and TFLOP/s where
arithmetic counts. For every batch it ends with what the calls of a step add up to, by kind: a bound for a captured
step, to which reading, optimizer and communication come. ``--batches`` are those of training, ``--windows`` those of
evaluation, which have a forward pass only; ``--cases`` limits all to names that contain one of the given words, and
``--sweep`` times the tiles of our kernels instead.

Every pass is captured in a CUDA graph of several calls, and cuDNN tries its algorithms before. Cases run in a process
of their own, and another one continues behind a case that failed, hung or crashed: it costs one line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.unet3d.ops.bench_cases import Entry, Pass, entries, failures
from benchmarks.unet3d.ops.bench_sweep import sweep, sweeps
from benchmarks.unet3d.ops.bench_table import Measured, line, totals
from common.ops.batch_norm_bench import copy_bandwidth, time_graph

LARGE_BYTES = 50e6
"""Passes that move less are repeated more often, so that a graph lasts long enough to be timed."""

REPLAYS, CANDIDATE_REPLAYS = 9, 3
"""Of a graph. Candidates add up to nothing, and some take many times as long as what a step runs."""

SILENCE_S = 300
_BEGIN, _RESULT = "begin ", "result "


def milliseconds(pass_: Pass, candidate: bool) -> float:
    """Of one call, that of ``after`` included."""
    calls = 20 if pass_.bytes < LARGE_BYTES else 1 if candidate else 4

    def repeat() -> int:
        for _ in range(calls):
            pass_.run()
        return calls

    return time_graph(repeat, replays=CANDIDATE_REPLAYS if candidate else REPLAYS)


def measure(entry: Entry, batch: int, dtype: torch.dtype, forward_only: bool) -> Iterator[Measured]:
    """Time the passes of one entry."""
    passes = entry.build(batch, dtype)
    times: dict[str, float] = {}
    for pass_ in passes[:1] if forward_only else passes:
        elapsed = milliseconds(pass_, candidate=not entry.calls)
        times[pass_.name] = elapsed - (times[pass_.after] if pass_.after else 0.0)
        yield Measured(entry.name, batch, pass_.name, times[pass_.name], entry.calls, pass_.bytes, pass_.flops)


def work(tasks: list[str], run: Callable[[str], None]) -> None:
    """Run tasks one after the other up to the first that fails, which may leave the device in any state."""
    for task in tasks:
        print(f"{_BEGIN}{task}", flush=True)
        try:
            run(task)
        except failures() as reason:
            message = (str(reason).strip() or "no message").splitlines()[0]
            print(f"{task:42s} {type(reason).__name__}: {message}", flush=True)
            return
        torch.cuda.empty_cache()


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Output of a process, which is killed when it is silent for too long."""
    assert process.stdout is not None
    while True:
        watch = threading.Timer(SILENCE_S, process.kill)
        watch.start()
        text = process.stdout.readline()
        watch.cancel()
        if not text:
            return
        yield text.rstrip("\n")


def supervise(tasks: list[str], arguments: list[str], bandwidth: float) -> list[Measured]:
    """Run tasks in a process of their own; start another behind a task that ended it."""
    found = []
    while tasks:
        command = [sys.executable, "-m", "benchmarks.unet3d.ops.bench", *arguments, "--worker", *tasks]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        begun: list[str] = []
        for text in _lines(process):
            if text.startswith(_BEGIN):
                begun.append(text.removeprefix(_BEGIN))
            elif text.startswith(_RESULT):
                found.append(Measured(*json.loads(text.removeprefix(_RESULT))))
                print(line(found[-1], bandwidth), flush=True)
            else:
                print(text, flush=True)
        code = process.wait()
        if code != 0:
            print(f"{begun[-1] if begun else 'nothing begun':42s} ended its process with {code}", flush=True)
        if not begun:
            break
        tasks = [task for task in tasks if task not in begun]
    return found


def _task(entry: Entry, batch: int, forward_only: bool) -> str:
    return f"{entry.name} | {batch}{' forward' if forward_only else ''}"


def _run_case(task: str, dtype: torch.dtype) -> None:
    name, _, rest = task.partition(" | ")
    entry = next(entry for entry in entries() if entry.name == name)
    batch, *forward_only = rest.split()
    for result in measure(entry, int(batch), dtype, bool(forward_only)):
        print(f"{_RESULT}{json.dumps(result)}", flush=True)


def _tasks(arguments: argparse.Namespace) -> list[str]:
    if arguments.sweep:
        found = list(sweeps())
    else:
        batches = [(batch, False) for batch in _numbers(arguments.batches)]
        batches += [(batch, True) for batch in _numbers(arguments.windows) if (batch, False) not in batches]
        found = [_task(entry, *batch) for batch in batches for entry in entries() if entry.calls or not batch[1]]
    words = [word for word in arguments.cases.split(",") if word]
    return [task for task in found if not words or any(word in task for word in words)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--batches", default="7,1", help="samples of a micro-batch, separated by commas")
    parser.add_argument("--windows", default="1,4,7", help="windows of an evaluation batch, separated by commas")
    parser.add_argument("--cases", default="", help="words, separated by commas")
    parser.add_argument("--sweep", action="store_true", help="time tiles instead of layers")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.unet3d.ops.bench measures a GPU, and PyTorch sees none")
    dtype = getattr(torch, arguments.dtype)
    torch.backends.cudnn.benchmark = True
    if arguments.worker is not None:
        run: Any = sweep if arguments.sweep else _run_case
        work(arguments.worker, lambda task: run(task, dtype))
        return
    try:
        tasks = _tasks(arguments)
    except ValueError:
        parser.error("--batches and --windows take whole numbers, separated by commas")
    if not tasks:
        parser.error(f"--cases {arguments.cases} names nothing")
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
        f"{arguments.dtype}, copy {bandwidth * 1e-9:.0f} GB/s",
        flush=True,
    )
    passed = ["--dtype", arguments.dtype, *(["--sweep"] if arguments.sweep else [])]
    found = supervise(tasks, passed, bandwidth)
    for text in totals(found, [entry.name for entry in entries() if entry.calls]):
        print(text)


if __name__ == "__main__":
    main()
