"""Compare estimates with published results: ``python scripts/compare_published.py FOLDER --rounds v3.0,v3.1``.

FOLDER has logs as MLCommons publishes them, ``ROUND/SUBMITTER/results/SYSTEM/BENCHMARK/result_*.txt`` beside
``ROUND/SUBMITTER/systems/SYSTEM.json``. Results of further systems are in :data:`FURTHER`.

A series is one benchmark, submitter and round. One factor is calibrated on its smallest system: on the part of our
computation that is proportional to the batch of a GPU. The rest of the computation (launches, kernels too small for the
GPU) stays as we measured it. Everything else comes from the model of `mlperf-suite estimate`: links from
``configs/system``, samples until the target from the reference convergence points, and layouts from the recipes of the
suite. Times of H100 are ours of H200 multiplied by the ratio of both sustained rates of matrix products.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.cli import load  # noqa: E402
from common.config.composition import compose, scales_of  # noqa: E402
from common.config.schema import RunConfig  # noqa: E402
from common.doctor.limits import hardware_of  # noqa: E402
from common.errors import ConfigError, DataError, SuiteError  # noqa: E402
from common.mlperf.admission import evaluation_schedule  # noqa: E402
from common.mlperf.checker_process import one_checker_process  # noqa: E402
from common.mlperf.parsed_log import ParsedLog, is_number, read_log  # noqa: E402
from common.mlperf.progress import GPT3_SEQUENCE  # noqa: E402
from common.mlperf.rcp import convergence_of, olympic_mean  # noqa: E402
from common.mlperf.rules import RULESETS, round_name, rules_for  # noqa: E402
from common.planning.compute import ComputeCurve  # noqa: E402
from common.planning.convergence import convergence_at, samples_per_unit  # noqa: E402
from common.planning.estimates import RunEstimate, RunLayout  # noqa: E402
from common.planning.measured_curves import curve_for  # noqa: E402
from common.planning.points import RESULTS, MeasuredPoint, read_measurements  # noqa: E402
from common.planning.run_model import estimate_run, evaluation_cost  # noqa: E402
from common.planning.step_model import step_times  # noqa: E402
from common.untrusted.strict_json import read_json_object  # noqa: E402

FURTHER = ROOT / "docs" / "results" / "published-large-systems.csv"
"""Further results, computed from published logs in the same way; columns are the fields of :class:`Row`."""
MEASURED = "h200"
"""System on which our own steps were measured."""
TOLERANCE = 0.1
"""Error from which the table names the part that fails."""

ACCELERATORS = {"H100": "h100", "H200": "h200"}
"""Accelerators whose results are compared -> system of ``configs/system`` with their rates and links."""


@dataclass(frozen=True)
class Row:
    """One published result.

    Attributes:
        benchmark: our name.
        gpus: all GPUs of the system, those that only evaluate included.
        minutes: olympic mean of the time to train, without the RCP factor.
        samples: olympic mean of the samples until the target was reached; None if the logs do not state them.
        step: seconds of a step by the throughput in the logs, median over time and runs; None without throughput.
        logs: folder of the logs below that of the round.
    """

    benchmark: str
    ruleset: str
    submitter: str
    accelerator: str
    gpus: int
    global_batch: int
    minutes: float
    samples: float | None
    step: float | None
    logs: str

    @property
    def series(self) -> tuple[str, str, str]:
        """Benchmark, submitter and round: the rows with one calibrated scalar."""
        return self.benchmark, self.submitter, self.ruleset

    @property
    def result(self) -> tuple[object, ...]:
        """Values that are the same if a result was published in several rounds."""
        return self.benchmark, self.submitter, self.accelerator, self.gpus, self.global_batch, self.minutes


known_hardware = functools.cache(hardware_of)


def read_folder(folder: Path, names: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of the rounds ``names`` with a known accelerator.

    Raises:
        DataError: a log or a description of a system cannot be read.
    """
    rounds = {name: ruleset for ruleset in RULESETS["training"] if (name := round_name(ruleset)) in names}
    for path in sorted(folder.glob("v*/*/systems/*.json")):
        ruleset = rounds.get(path.parents[2].name)
        system = read_json_object(path)
        named = re.search(r"H[12]00", str(system.get("accelerator_model_name")))
        if ruleset is None or named is None:
            continue
        gpus = int(system["number_of_nodes"]) * int(system["accelerators_per_node"])
        for results in sorted(path.parents[1].glob(f"results/{path.stem}/*/")):
            logs = [read_log(log) for log in sorted(results.glob("result_*.txt"))]
            if logs:
                where = str(results.relative_to(path.parents[2]))
                yield _row(logs, ruleset, path.parents[1].name, named[0], gpus, where)


def _row(logs: Sequence[ParsedLog], ruleset: str, submitter: str, accelerator: str, gpus: int, where: str) -> Row:
    name, batch = logs[0].benchmark, logs[0].global_batch
    if name is None or batch is None:
        raise DataError(f"{logs[0].path}: states no benchmark or no global batch")
    rules = rules_for(name, ruleset)
    times = [log.run_minutes if log.status == "success" and log.run_minutes else math.inf for log in logs]
    counts = [convergence_of(log, rules) for log in logs]
    minutes = olympic_mean(times, rules.dropped)
    progress = olympic_mean([math.inf if count is None else count for count in counts], rules.dropped)
    samples = progress * samples_per_unit(rules, batch)
    known = samples if math.isfinite(samples) else None
    step = _step_seconds(logs, gpus, batch, None if known is None else known / minutes / 60, rules.scored_offline)
    return Row(
        rules.benchmark,
        ruleset,
        submitter,
        accelerator,
        gpus,
        batch,
        minutes,
        known,
        step,
        f"{round_name(ruleset)}/{where}",
    )


def _step_seconds(logs: Sequence[ParsedLog], gpus: int, batch: int, rate: float | None, offline: bool) -> float | None:
    """Return the median step time in the logs.

    Logs give the throughput of all GPUs or of one, in samples or tokens, without saying which. The unit that fits best
    to the samples per second of the whole runs is taken. If this throughput includes the evaluations, their time in the
    logs is subtracted.

    Args:
        rate: samples per second of the whole runs; None: unknown.
        offline: whether evaluations are outside of the measured time.
    """
    medians: dict[str, list[float]] = {}
    for log in logs:
        values: dict[str, list[float]] = {}
        for event in (*log.all("tracked_stats"), *log.all("throughput")):
            stats = event.value if isinstance(event.value, Mapping) else {"throughput": event.value}
            for key in ("throughput", "train_step_timing in s"):
                if is_number(stats.get(key)) and stats[key] > 0:
                    values.setdefault(key, []).append(float(stats[key]))
        for key, each in values.items():
            medians.setdefault(key, []).append(statistics.median(each))
    if "train_step_timing in s" in medians:
        return statistics.median(medians["train_step_timing in s"])
    if "throughput" not in medians or rate is None:
        return None
    logged = statistics.median(medians["throughput"])
    units = (1.0, float(gpus), 1 / GPT3_SEQUENCE, gpus / GPT3_SEQUENCE, 1 / gpus)
    found = min((logged * unit for unit in units), key=lambda each: abs(math.log(each / rate)))
    evaluating = 0.0 if offline or found > 1.005 * rate else statistics.median(map(_evaluating, logs))
    return batch / found * (1 - evaluating)


def _evaluating(log: ParsedLog) -> float:
    """Return the time between ``eval_start`` and ``eval_stop``, as a fraction of the run; without later evaluations."""
    starts, stops = log.all("eval_start"), log.all("eval_stop")
    end = log.all("run_stop")[-1].time_ms
    times = ((start.time_ms, stop.time_ms) for start, stop in zip(starts, stops, strict=False))
    minutes = sum(stop - start for start, stop in times if stop <= end) / 60_000
    return minutes / log.run_minutes if log.run_minutes else 0.0


def read_further(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file whose columns are the fields of :class:`Row`; an empty cell is None."""
    with path.open(newline="") as file:
        for cells in csv.DictReader(file):
            numbers = {
                key: float(cells.pop(key)) if cells[key] else cells.pop(key) or None for key in ("samples", "step")
            }
            gpus, batch, minutes = int(cells.pop("gpus")), int(cells.pop("global_batch")), float(cells.pop("minutes"))
            yield Row(**cells, gpus=gpus, global_batch=batch, minutes=minutes, **numbers)  # type: ignore[arg-type]


def run_of(benchmark: str, accelerator: str, gpus: int, global_batch: int) -> RunConfig:
    """Return the settings of the suite's recipe for a system; without one, of the recipe with the nearest size."""
    sizes = {int(name.split("x")[0]): name for name in scales_of(benchmark) if name.endswith(f"x{accelerator}")}
    if not sizes:
        raise ConfigError(f"the suite has no recipe of {benchmark} for {accelerator}")
    size = min(sizes, key=lambda each: abs(math.log(each / gpus)))
    words = [f"benchmark={benchmark}", f"scale={sizes[size]}", "device=cpu"]
    run: RunConfig = load(compose(words))[0]
    if (run.global_batch, size) == (global_batch, gpus):
        return run
    node = min(gpus, 8)
    replicas = gpus // math.prod(run.layout[axis] for axis in ("pp", "cp", "tp"))
    micro = global_batch // replicas if run.grad_accumulation_steps == 1 else run.micro_batch
    words += [f"scale.nodes={gpus // node}", f"scale.gpus_per_node={node}", f"micro_batch={micro}"]
    predivide = [f"optimizer.grad_predivide={gpus}"] if run.optimizer.grad_predivide > 1 else []
    return load(compose([*words, *predivide, f"hparams.global_batch_size={global_batch}"]))[0]


@functools.cache
def run_with_curve(benchmark: str, accelerator: str, gpus: int, global_batch: int) -> tuple[RunConfig, ComputeCurve]:
    """Return the settings of a run, and our measured time of a micro-batch by its size for this layout."""
    run = run_of(benchmark, accelerator, gpus, global_batch)
    name, axes = run.benchmark.name, (run.layout["pp"], run.layout["cp"], run.layout["tp"])
    measured = known_hardware(MEASURED)
    return run, curve_for(run, axes, _points(name), measured)


@functools.cache
def _points(benchmark: str) -> Sequence[MeasuredPoint]:
    return read_measurements(sorted(RESULTS.rglob("*.json")), benchmark, known_hardware(MEASURED).gpu, load).points


def estimate(row: Row, factor: float) -> RunEstimate:
    """Return the estimate for the system of a row, with the computation multiplied by ``factor``.

    Raises:
        ConfigError: the suite cannot plan this run.
    """
    hardware, measured = known_hardware(ACCELERATORS[row.accelerator]), known_hardware(MEASURED)
    run, curve = run_with_curve(row.benchmark, row.accelerator, row.gpus, row.global_batch)
    axes = {axis: run.layout[axis] for axis in ("pp", "cp", "tp")}
    accumulation, ranks = run.grad_accumulation_steps, run.evaluation.ranks
    layout = RunLayout(row.gpus, run.global_batch, run.micro_batch, accumulation, evaluation_ranks=ranks, **axes)
    deviation = curve.deviation(run.micro_batch)
    curve = faster(curve, factor * measured.tflops["bf16"] / hardware.tflops["bf16"])
    # The first rules of 3D U-Net count epochs whose length depends on the batch.
    ruleset = "3.1.0" if (row.benchmark, row.ruleset) == ("unet3d", "3.0.0") else row.ruleset
    return estimate_run(
        run,
        layout,
        convergence_at(row.benchmark, row.global_batch, ruleset),
        step_times(run, layout, curve, hardware),
        deviation,
        evaluation_schedule(run),
        evaluation_cost(run, curve, run.micro_batch, None, run.evaluation.scoring == "offline"),
        hardware,
        alone=1.0,
    )


def faster(curve: ComputeCurve, factor: float) -> ComputeCurve:
    """Return the curve with ``factor`` on the part that is proportional to the batch."""
    last = curve.batches[-1]
    batches = curve.batches if len(curve.batches) > 1 or last == 1 else (1, last)
    times = [curve.at(batch) for batch in batches]
    slope = times[0] if last == 1 else (times[1] - times[0]) / (batches[1] - batches[0])
    fixed = max(0.0, times[0] - slope * batches[0])
    return replace(curve, batches=batches, seconds=tuple(fixed + factor * (each - fixed) for each in times))


def calibrated(row: Row) -> float:
    """Return the factor on the computation with which step (or, if unknown, time to train) of a row are met."""
    low, high = 0.05, 20.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        found = estimate(row, middle)
        below = found.step.total < row.step if row.step is not None else found.seconds < 60 * row.minutes
        low, high = (middle, high) if below else (low, middle)
    return math.sqrt(low * high)


@dataclass(frozen=True)
class Compared:
    """A row beside its estimate.

    Attributes:
        factor: factor of its series.
        smallest: whether the factor was calibrated on this row.
        estimate: None if the suite cannot plan this run.
        refusal: why it cannot; else empty.
    """

    row: Row
    factor: float = math.nan
    smallest: bool = False
    estimate: RunEstimate | None = None
    refusal: str = ""

    @property
    def step(self) -> float | None:
        """Relative error of the step time; None if unknown or calibrated."""
        if self.estimate is None or self.row.step is None or self.smallest:
            return None
        return self.estimate.step.total / self.row.step - 1

    @property
    def time(self) -> float | None:
        """Relative error of the time to train; None if unknown or calibrated."""
        if self.estimate is None or (self.smallest and self.row.step is None):
            return None
        return self.estimate.seconds / 60 / self.row.minutes - 1

    @property
    def covered(self) -> bool | None:
        """Whether the interval has the published time to train; None if its series was calibrated on the row."""
        if self.estimate is None or self.smallest:
            return None
        low, high = self.estimate.interval()
        return low <= 60 * self.row.minutes <= high

    @property
    def parts(self) -> dict[str, float]:
        """Errors of the parts of the time to train, as fractions of it; empty if they are not known."""
        found, row = self.estimate, self.row
        if found is None or row.step is None or row.samples is None:
            return {}
        seconds, steps = 60 * row.minutes, row.samples / row.global_batch
        rest, estimated = seconds - steps * row.step, found.seconds - found.steps * found.step.total
        return {
            "samples": (found.steps - steps) * row.step / seconds,
            "step": (found.step.total - row.step) * found.steps / seconds,
            "evaluation and other": (estimated - rest) / seconds,
        }


def compare(rows: Iterable[Row]) -> list[Compared]:
    """Return the rows beside their estimates, by series, the smallest system of each first."""
    found = []
    for _, series in itertools.groupby(sorted(rows, key=_order), key=lambda row: row.series):
        factor = math.nan
        for row in series:
            try:
                smallest = math.isnan(factor)
                factor = calibrated(row) if smallest else factor
                found.append(Compared(row, factor, smallest, estimate(row, factor)))
            except SuiteError as error:
                found.append(Compared(row, refusal=str(error)))
    return found


def _order(row: Row) -> tuple[object, ...]:
    return *row.series, row.gpus, row.accelerator, row.logs


HEAD = (
    "benchmark", "round", "system", "batch", "factor", "step, ms", "estimated", "error", "minutes", "estimated",
    "error", "failing part",
)  # fmt: skip


def table(found: Sequence[Compared]) -> str:
    """Return the Markdown table of all rows, and a summary of the errors of rows that were not calibrated.

    A result that was published in several rounds counts once in the summary, in its first round.
    """
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    for each in found:
        row = each.row
        cells = [row.benchmark, round_name(row.ruleset), f"{row.gpus} {row.accelerator}", str(row.global_batch)]
        measured = ["" if row.step is None else f"{1e3 * row.step:.4g}", f"{row.minutes:.4g}"]
        if each.estimate is None:
            cells += ["", measured[0], "", "", measured[1], "", "", f"not modelled: {each.refusal}"]
        else:
            known = [f"{1e3 * each.estimate.step.total:.4g}", f"{each.estimate.seconds / 60:.4g}"]
            first = "calibrated" if each.smallest and row.step is not None else _percent(each.step)
            second = "calibrated" if each.smallest and row.step is None else _percent(each.time)
            cells += [f"{each.factor:.3f}", measured[0], known[0], first, measured[1], known[1], second, failing(each)]
        lines.append(_line(cells))
    lines.append("")
    once = list({each.row.result: each for each in reversed(found)}.values())
    summaries = {
        "step time": [each.step for each in once],
        "time to train of these systems": [each.time for each in once if not each.smallest],
        "time to train of calibrated systems": [each.time for each in once if each.smallest],
    }
    for name, errors in summaries.items():
        sizes = [abs(error) for error in errors if error is not None]
        if sizes:
            lines.append(
                f"{name}: {len(sizes)} rows, median error {100 * statistics.median(sizes):.1f} %, largest "
                f"{100 * max(sizes):.1f} %, above 25 %: {sum(size > 0.25 for size in sizes)}"
            )
    covered = [each.covered for each in once if each.covered is not None]
    if covered:
        lines.append(f"90 % interval: has {sum(covered)} of {len(covered)} published times of rows without calibration")
    refused = [each for each in found if each.estimate is None]
    lines.append(f"not modelled: {len(refused)} of {len(found)} rows")
    return "\n".join(lines)


def failing(each: Compared) -> str:
    """Return the part of the time to train with the largest error; empty if no error is above the tolerance."""
    if max((abs(error) for error in (each.step, each.time) if error is not None), default=0.0) <= TOLERANCE:
        return ""
    parts = each.parts
    return max(parts, key=lambda name: abs(parts[name])) if parts else "unknown: no step time"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table of all rows of the chosen rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder with ROUND/SUBMITTER/results/…")
    parser.add_argument("--rounds", default="v3.0,v3.1,v4.0,v4.1,v5.0,v5.1", help="rounds, separated by commas")
    arguments = parser.parse_args()
    rounds = arguments.rounds.split(",")
    with one_checker_process():
        rows = {row.logs: row for row in read_further(FURTHER) if round_name(row.ruleset) in rounds}
        found = {row.logs: row for row in read_folder(arguments.folder, rounds)}
        if not found:
            parser.error(f"{arguments.folder}: no logs of {arguments.rounds} below ROUND/SUBMITTER/results")
        print(table(compare({**rows, **found}.values())))


if __name__ == "__main__":
    main()
