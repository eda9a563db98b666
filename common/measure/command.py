"""Implementation of ``mlperf-suite measure``, which measures all workloads on this node and prints one table."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from common.config.composition import scales_of
from common.config.override import override
from common.errors import ConfigError
from common.measure.arguments import gpus_of, make_folder, parser_of, require_known, require_seconds
from common.measure.jobs import Job, jobs_of
from common.measure.node import Node
from common.measure.table import MeasuredCopy, table, write_results

SECONDS = 300.0
"""Time limit of one measurement; a longer one is stopped and counts as failed."""
TIMED = 5.0
"""Upper limit in seconds for the timed iterations of a step, all repetitions together (``bench.seconds``)."""
REPETITIONS = 3
"""Number of repetitions of the timed iterations; the median counts (``bench.repetitions``)."""

DESCRIPTION = "Measure the training step of the benchmarks on 1, 2, 4, ... GPUs of this node, and print one table."
RESULTS = "results.json"
"""Name of the file with all figures, which ``scripts/write_tables.py`` reads."""


def main(argv: Sequence[str], benchmarks: Collection[str]) -> int:
    """Measure, print the table, and save it with all figures; return 1 if a measurement failed, else 0.

    Args:
        argv: see ``mlperf-suite measure --help``.
        benchmarks: names of all benchmarks.

    Raises:
        ConfigError: there is nothing to measure, or this machine has too few GPUs.
    """
    parser = parser_of("measure", DESCRIPTION, "measured")
    parser.add_argument(
        "--data", type=Path, help="also measure readers and evaluations, with the prepared data in DATA/BENCHMARK"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"time limit of one measurement (default: {SECONDS:.0f})"
    )
    arguments = parser.parse_args(argv)
    require_seconds("measure", arguments.seconds)
    require_known("measure", arguments.benchmarks, benchmarks, arguments.scale)
    names, gpus = gpus_of("measure", arguments.gpus, arguments.override)
    scales = {name: scales_of(name) for name in arguments.benchmarks or benchmarks}
    data: Path | None = arguments.data
    with_data = {name for name in scales if data is not None and (data / name / "manifest.json").is_file()}
    places = len(names) or max(gpus)
    jobs = jobs_of(scales, arguments.scale, gpus, with_data, places)
    if not jobs:
        raise ConfigError(f"measure: none of the requested benchmarks has a scale {arguments.scale}")
    make_folder("measure", arguments.output)
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


def _words(overrides: Sequence[str], data: Path | None) -> Callable[[Job], list[str]]:
    """Return the function that gives the arguments which follow the job's arguments in each ``bench`` command."""
    return lambda job: [
        f"bench.seconds={TIMED}",
        f"bench.repetitions={REPETITIONS}",
        *([override("data_dir", data / job.benchmark)] if job.whole_run and data is not None else []),
        *overrides,
    ]
