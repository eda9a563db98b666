"""The command line of every benchmark of operations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.ops.bench.cases import Entry, measure
from common.ops.bench.stopwatch import copy_bandwidth, require_gpu
from common.ops.bench.supervisor import RESULT, supervise, work
from common.ops.bench.sweep import Sweep, sweep
from common.ops.bench.table import Measured, line, totals


@dataclass(frozen=True)
class Suite:
    """What one command measures.

    Attributes:
        module: the command's own name, for ``python -m``.
        description: what ``--help`` prints.
        entries: everything that can be measured.
        sweeps: tiles to try, by a name each.
        batches: samples of a training micro-batch, separated by commas, unless told otherwise.
        evaluation_batches: samples of an evaluation batch, which has a forward pass only.
        dtype: of the activations unless told otherwise.
    """

    module: str
    description: str | None
    entries: Callable[[], list[Entry]]
    sweeps: Callable[[], dict[str, Sweep]]
    batches: str
    evaluation_batches: str = ""
    dtype: str = "bfloat16"


def main(suite: Suite) -> None:
    """Measure on one GPU and print."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {suite.module}",
        description=suite.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default=suite.dtype, choices=["bfloat16", "float16"])
    parser.add_argument("--batches", default=suite.batches, help="samples of a micro-batch, separated by commas")
    parser.add_argument("--evaluation-batches", default=suite.evaluation_batches, help="the same of an evaluation")
    parser.add_argument("--cases", default="", help="words, separated by commas")
    parser.add_argument("--sweep", action="store_true", help="time tiles instead of layers")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    require_gpu(suite.module)
    dtype = getattr(torch, arguments.dtype)
    torch.backends.cudnn.benchmark = True
    if arguments.worker is not None:
        _work(suite, arguments.worker, dtype, arguments.sweep)
        return
    try:
        tasks = _tasks(suite, arguments)
    except ValueError:
        parser.error("--batches and --evaluation-batches take whole numbers, separated by commas")
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
    found = []
    for result in supervise(suite.module, passed, tasks):
        found.append(Measured(*json.loads(result)))
        print(line(found[-1], bandwidth), flush=True)
    for text in totals(found, [entry.name for entry in suite.entries() if entry.calls]):
        print(text)


def _work(suite: Suite, tasks: list[str], dtype: torch.dtype, tiles: bool) -> None:
    def run(task: str) -> None:
        if tiles:
            sweep(task, suite.sweeps()[task], dtype)
            return
        name, _, rest = task.partition(" | ")
        entry = next(entry for entry in suite.entries() if entry.name == name)
        batch, *forward_only = rest.split()
        for result in measure(entry, int(batch), dtype, bool(forward_only)):
            print(f"{RESULT}{json.dumps(result)}", flush=True)

    work(tasks, run)


def _tasks(suite: Suite, arguments: argparse.Namespace) -> list[str]:
    if arguments.sweep:
        found = list(suite.sweeps())
    else:
        batches = [(batch, False) for batch in _numbers(arguments.batches)]
        batches += [(batch, True) for batch in _numbers(arguments.evaluation_batches) if (batch, False) not in batches]
        found = [_task(entry, *batch) for batch in batches for entry in suite.entries() if entry.calls or not batch[1]]
    words = [word for word in arguments.cases.split(",") if word]
    return [task for task in found if not words or any(word in task for word in words)]


def _task(entry: Entry, batch: int, forward_only: bool) -> str:
    return f"{entry.name} | {batch}{' forward' if forward_only else ''}"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
