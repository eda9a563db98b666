"""``mlperf-suite measure``: measure the step of every workload on 1, 2, 4 ... GPUs of this node, in one table."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from common.config.composition import scales_of
from common.config.override import override
from common.distributed.startup import find_rank_info
from common.errors import ConfigError
from common.measure.jobs import Job, jobs_of
from common.measure.node import Node
from common.measure.table import MeasuredCopy, table, write_results

SCALE = "8xH200"
SECONDS = 300.0
"""Time limit of one measurement; a longer one is stopped and counts as failed."""
TIMED = 5.0
"""Upper limit in seconds for the timed iterations of a step, all repetitions together (``bench.seconds``)."""
REPETITIONS = 3
"""Number of repetitions of the timed iterations; the median counts (``bench.repetitions``)."""

RESULTS = "results.json"
"""Name of the file with all figures, which ``scripts/write_tables.py`` reads."""


def devices() -> list[str]:
    """Return the names of the GPUs that this process sees, as in ``CUDA_VISIBLE_DEVICES``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def counts_up_to(most: int) -> list[int]:
    """Return the powers of two up to ``most``, and ``most`` itself, in ascending order."""
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def main(argv: Sequence[str], benchmarks: Collection[str]) -> int:
    """Measure, print the table, and save it with all figures; return 1 if a measurement failed, else 0.

    Args:
        argv: see ``mlperf-suite measure --help``.
        benchmarks: names of all benchmarks.

    Raises:
        ConfigError: there is nothing to measure, or this machine has too few GPUs.
    """
    parser = argparse.ArgumentParser(prog="mlperf-suite measure", description=__doc__)
    parser.add_argument(
        "benchmarks", nargs="*", metavar="BENCHMARK", help="workloads to measure (default: all that have the recipe)"
    )
    parser.add_argument("--scale", default=SCALE, help=f"recipe to measure (default: {SCALE})")
    parser.add_argument("--gpus", type=_counts, help="numbers of GPUs, such as 1,2,4 (default: powers of two, and all)")
    parser.add_argument("--data", type=Path, help="folder with prepared data, DATA/BENCHMARK: also measure runs")
    parser.add_argument(
        "--output", type=Path, default=Path("measured"), help="folder for results and table (default: measured)"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"time limit of one measurement (default: {SECONDS:.0f})"
    )
    parser.add_argument("--apart", action="store_true", help="start a benchmark only when the previous one has ended")
    parser.add_argument(
        "--override", action="append", default=[], help="override for every bench, such as bench.steps=50"
    )
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.benchmarks) - set(benchmarks)):
        raise ConfigError(f"measure: no benchmark {unknown[0]!r}; there are {', '.join(sorted(benchmarks))}")
    on_cpu = "device=cpu" in arguments.override
    find_rank_info(os.environ)  # raises if the environment is wrong, since every bench would fail
    names = [] if on_cpu else devices()
    gpus = arguments.gpus or (counts_up_to(len(names)) if names else [])
    if not gpus and on_cpu:
        raise ConfigError("measure: --gpus is missing; it gives the number of CPU ranks that replace GPUs")
    if not gpus:
        raise ConfigError(
            "measure: no GPU was found; CPU ranks replace GPUs with --gpus=1 --override=device=cpu and a --scale "
            "that they can carry"
        )
    if not on_cpu and max(gpus) > len(names):
        raise ConfigError(f"measure: {len(names)} GPUs are here; --gpus={','.join(map(str, gpus))} needs others")
    scales = {name: scales_of(name) for name in arguments.benchmarks or benchmarks}
    data: Path | None = arguments.data
    with_data = {name for name in scales if data is not None and (data / name / "manifest.json").is_file()}
    places = len(names) or max(gpus)
    jobs = jobs_of(scales, arguments.scale, gpus, with_data, places)
    if not jobs:
        raise ConfigError(f"measure: no benchmark that is asked for has a recipe {arguments.scale}")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"measure: --output={arguments.output} cannot be made: {error.strerror}") from error
    words = _words(arguments.override, data)
    node = Node(places, names, arguments.output, arguments.seconds, words, arguments.apart)
    outcomes: list[MeasuredCopy] = []
    for outcome in node.measure(jobs):
        outcomes.append(outcome)
        # Both files are complete after each measurement, so an interrupted command leaves its results too.
        write_results(arguments.output / RESULTS, shlex.join(["mlperf-suite", "measure", *argv]), outcomes)
        (arguments.output / "table.md").write_text(table(outcomes) + "\n")
    print(table(outcomes))
    return int(any(outcome.figures is None for outcome in outcomes))


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"numbers from 1 on, not {text}")
    return counts


def _words(overrides: Sequence[str], data: Path | None) -> Callable[[Job], list[str]]:
    """Return the function that gives the arguments which follow the job's arguments in each ``bench`` command."""
    return lambda job: [
        f"bench.seconds={TIMED}",
        f"bench.repetitions={REPETITIONS}",
        *([override("data_dir", data / job.benchmark)] if job.whole_run and data is not None else []),
        *overrides,
    ]
