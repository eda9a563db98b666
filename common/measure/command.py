"""``mlperf-suite measure``: every workload's step on 1, 2, 4 ... GPUs of this node, and one table of it all."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from common.config.composition import scales_of
from common.errors import ConfigError, SuiteError
from common.measure.jobs import Job, jobs_of, waves
from common.measure.table import Outcome, table

SCALE = "8xH200"
SECONDS = 180.0
"""That one measurement may take; it is stopped then, and counts as failed."""
TIMED = 10.0
"""Seconds that the timed iterations of a measurement take at most (``bench.seconds``)."""
_ENDING_SECONDS = 10.0


def devices() -> list[str]:
    """Names of the GPUs that this process sees, in the words of ``CUDA_VISIBLE_DEVICES``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def counts_up_to(most: int) -> list[int]:
    """Powers of two, and ``most`` itself."""
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def main(argv: Sequence[str], benchmarks: Collection[str]) -> int:
    """Measure, print the table, and keep it with every figure; returns 1 if a measurement failed.

    Args:
        argv: see ``mlperf-suite measure --help``.
        benchmarks: all that there are.

    Raises:
        ConfigError: there is nothing to measure, or not with what this machine has.
    """
    parser = argparse.ArgumentParser(prog="mlperf-suite measure", description=__doc__)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help="default: all that have the recipe")
    parser.add_argument("--scale", default=SCALE, help=f"the recipe that is measured (default: {SCALE})")
    parser.add_argument("--gpus", type=_counts, help="numbers of GPUs, such as 1,2,4 (default: powers of two, and all)")
    parser.add_argument("--data", type=Path, help="folder with prepared data, DATA/BENCHMARK: runs are measured too")
    parser.add_argument("--output", type=Path, default=Path("measured"), help="folder for figures and table")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of one measurement (default: {SECONDS:.0f})")
    parser.add_argument("--apart", action="store_true", help="one after the other, with idle GPUs beside it")
    parser.add_argument("--override", action="append", default=[], help="of every bench, such as bench.steps=50")
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.benchmarks) - set(benchmarks)):
        raise ConfigError(f"measure: no benchmark {unknown[0]!r}; there are {', '.join(sorted(benchmarks))}")
    on_cpu = "device=cpu" in arguments.override
    names = [] if on_cpu else devices()
    gpus = arguments.gpus or (counts_up_to(len(names)) if names else [])
    if not gpus or (not on_cpu and max(gpus) > len(names)):
        raise ConfigError(
            f"measure: {len(names)} GPUs are here; --gpus={','.join(map(str, gpus)) or '...'} needs others"
        )
    scales = {name: scales_of(name) for name in arguments.benchmarks or benchmarks}
    data: Path | None = arguments.data
    with_data = {name for name in scales if data is not None and (data / name / "manifest.json").is_file()}
    jobs = jobs_of(scales, arguments.scale, gpus, with_data)
    if not jobs:
        raise ConfigError(f"measure: no benchmark that is asked for has a recipe {arguments.scale}")
    together = [[job] for job in jobs] if arguments.apart else waves(jobs, max(gpus) if on_cpu else len(names))
    arguments.output.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for wave in together:
        outcomes += _measure(wave, names, arguments.output, arguments.seconds, _words(arguments.override, data))
    text = table(outcomes)
    (arguments.output / "table.md").write_text(text + "\n")
    print(text)
    return int(any(outcome.figures is None for outcome in outcomes))


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"numbers from 1 on, not {text}")
    return counts


def _words(overrides: Sequence[str], data: Path | None) -> Callable[[Job], list[str]]:
    """Of every bench, behind those of its job."""
    return lambda job: [
        f"bench.seconds={TIMED}",
        *([f"data_dir={data / job.benchmark}"] if job.whole_run and data is not None else []),
        *overrides,
    ]


def _measure(
    wave: Sequence[Job], names: Sequence[str], output: Path, seconds: float, words: Callable[[Job], list[str]]
) -> list[Outcome]:
    """Run the jobs of a wave beside each other, each on GPUs of its own."""
    started, first = [], 0
    for job in wave:
        own = names[first : first + job.gpus]
        first += job.gpus
        report, log = output / f"{job.name}.json", output / f"{job.name}.log"
        report.unlink(missing_ok=True)
        told = [*job.words(), f"bench.report={report.resolve()}", *words(job)]
        with open(log, "w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "common.cli", "bench", *told],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=_environment(own),
                start_new_session=True,
            )
        started.append((job, process, report, log))
        print(f"{job.name}: bench {' '.join(told)}", flush=True)
    ends = time.monotonic() + seconds
    return [_outcome(job, process, report, log, ends) for job, process, report, log in started]


def _environment(gpus: Sequence[str]) -> Mapping[str, str]:
    return {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}


def _outcome(job: Job, process: subprocess.Popen[bytes], report: Path, log: Path, ends: float) -> Outcome:
    try:
        code = process.wait(max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(process)
        return Outcome(job, None, f"took too long (--seconds); {log} has its output")
    if code == 0 and report.is_file():
        return Outcome(job, json.loads(report.read_text()))
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(job, None, f"exit code {code}: {said[-1] if said else 'no output'} ({log})")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a bench and its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_ENDING_SECONDS)
            return
        except ProcessLookupError:
            process.wait()
            return
        except subprocess.TimeoutExpired:
            continue
    raise SuiteError(f"process {process.pid} of a bench does not end")
