"""Summarize a finished run: a block of text for the terminal, and a picture of loss and quality."""

from __future__ import annotations

import itertools
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.config.schema import BenchmarkConfig, TargetConfig

NOT_A_RESULT = "not an MLPerf result of any division: the data are "
NOT_A_SCORE = "one run is not a score; unverified, not verified by MLCommons Association"
RESUMED = "a resumed run is not scored"
TRAIN_COLOUR, QUALITY_COLOUR, TARGET_COLOUR = "#4c72b0", "#2f7d4f", "#b03a2e"


@dataclass(frozen=True)
class Outcome:
    """The values of a training run that ended regularly, whether it reached the target or not.

    Attributes:
        status: ``"success"``, ``"aborted"``, or ``"unscored"`` while checkpoints wait for ``mlperf-suite score``.
        seconds: time from run_start to run_stop.
        samples: training samples in that time, over all ranks.
        steps: optimizer steps, including those before the checkpoint of a resumed run.
        overflows: steps since the start or resumption that updated nothing because a gradient was not finite.
        losses: (training samples, loss) of each step.
        history: (training samples, metric to value) of each evaluation.
        evaluations: number of evaluations since the start or resumption.
        evaluation_seconds: total duration of these evaluations.
        hidden_seconds: part of ``evaluation_seconds`` that overlapped with training.
        energy_joules: energy of the GPU of this rank, including initialisation; None if unknown.
    """

    status: str
    ruleset: str
    seed: int
    resumed: bool
    seconds: float
    samples: int
    steps: int
    overflows: int
    losses: Sequence[tuple[int, float]]
    history: Sequence[tuple[int, Mapping[str, float]]]
    evaluations: int
    evaluation_seconds: float
    hidden_seconds: float
    energy_joules: float | None
    log: Path
    output_dir: Path

    @property
    def throughput(self) -> float:
        """Training samples per second, over ``seconds``."""
        return self.samples / self.seconds


@dataclass(frozen=True)
class Summary:
    """The content of a summary.

    Attributes:
        verdict: kind of the verdict on the log, such as "valid run".
        hardware: name of the hardware and number of devices.
        evaluation_ranks: number of ranks that only evaluated.
        offline: whether evaluations were scored from checkpoints, so that the time of scoring does not count.
        paths: paths to print, by name. :func:`write_summary` adds ``picture``.
    """

    outcome: Outcome
    benchmark: BenchmarkConfig
    verdict: str
    hardware: str
    evaluation_ranks: int = 0
    offline: bool = False
    paths: Mapping[str, str | Path] = field(default_factory=dict)

    @property
    def minutes(self) -> float:
        """Time from run_start to run_stop."""
        return self.outcome.seconds / 60

    @property
    def reached(self) -> Mapping[str, float] | None:
        """Metrics of the first passing evaluation, or else the best value of each; None without evaluations."""
        history = [values for _, values in self.outcome.history]
        passing = [values for values in history if self.benchmark.reached(values)]
        if passing or not history:
            return passing[0] if passing else None
        best = {metric: max if target.direction == "higher" else min for metric, target in self._targets}
        return {metric: choose(values[metric] for values in history) for metric, choose in best.items()}

    @property
    def _targets(self) -> list[tuple[str, TargetConfig]]:
        return list(self.benchmark.targets.items())


def write_summary(summary: Summary, output_dir: Path) -> str:
    """Draw ``output_dir/summary.png``, print the summary to standard error, and return its text."""
    picture = Path(output_dir) / "summary.png"
    draw(summary, picture)
    text = format_summary(summary, {**summary.paths, "picture": picture})
    print(text, file=sys.stderr, flush=True)
    return text


def format_summary(summary: Summary, paths: Mapping[str, str | Path]) -> str:
    """Return the summary as text. ``paths`` are the paths to print, by name."""
    outcome, benchmark = summary.outcome, summary.benchmark
    reached = summary.reached
    quality = [
        f"{metric} {'no evaluation' if reached is None else f'{reached[metric]:.5g}'} (target {target})"
        for metric, target in benchmark.targets.items()
    ]
    rows = {
        "benchmark": benchmark.description,
        "status": _status(summary),
        "quality": ", ".join(quality),
        "time": f"{summary.minutes:.2f} minutes from run_start to run_stop",
        "throughput": f"{_figure(outcome.throughput)} samples/s",
        "evaluation": _evaluation(summary),
        "hardware": summary.hardware,
        "seed": str(outcome.seed),
        "data set": _other_data(benchmark) or "as the rules name it",
        "verdict": summary.verdict,
        "note": _note(summary),
    }
    if outcome.energy_joules is not None:
        rows["energy"] = f"{outcome.energy_joules / 1000:,.1f} kJ on the GPU of rank 0, initialisation included"
    rows |= {name: str(path) for name, path in paths.items()}
    width = max(len(name) for name in rows)
    rule = "-" * 72
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    return "\n".join([rule, *lines, rule])


def draw(summary: Summary, picture: Path) -> None:
    """Draw loss, quality and target over training samples into a PNG file, which replaces ``picture`` atomically."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter

    metrics = list(summary.benchmark.targets)
    height = 4.5 + 2.0 * len(metrics)
    figure, (top, *others) = plt.subplots(1 + len(metrics), 1, figsize=(8, height), sharex=True, layout="constrained")
    figure.suptitle(f"{summary.benchmark.description}\n{summary.hardware}", fontsize=12, fontweight="bold")
    top.set_title("\n".join(_title_lines(summary)), fontsize=8.5, color="#444444", loc="left", pad=10)
    _draw_losses(top, summary.outcome.losses)
    for axes, metric in zip(others, metrics, strict=True):
        _draw_quality(axes, summary, metric)
    others[-1].set_xlabel("training samples")
    others[-1].xaxis.set_major_formatter(EngFormatter(sep=" "))
    for axes in (top, *others):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    beside = picture.with_name(f".{picture.name}.tmp")
    figure.savefig(beside, dpi=140, format="png")
    plt.close(figure)
    beside.replace(picture)


def _draw_losses(axes: Any, losses: Sequence[tuple[int, float]]) -> None:
    axes.set_ylabel("training loss")
    finite = [(samples, loss) for samples, loss in losses if math.isfinite(loss)]
    if not finite:
        axes.text(0.5, 0.5, "no loss was recorded", ha="center", va="center", transform=axes.transAxes, color="#777777")
        return
    samples, values = zip(*finite, strict=True)
    if len(finite) < 50:
        axes.plot(samples, values, color=TRAIN_COLOUR, linewidth=1.6)
        return
    axes.plot(samples, values, color=TRAIN_COLOUR, linewidth=0.8, alpha=0.35, label="each step")
    axes.plot(samples, _smooth(values), color=TRAIN_COLOUR, linewidth=1.8, label="moving mean")
    axes.legend(frameon=False, fontsize=8)
    ordered = sorted(values)
    if ordered[0] > 0 and ordered[-1] > 30 * ordered[len(ordered) // 2]:
        axes.set_yscale("log")


def _draw_quality(axes: Any, summary: Summary, metric: str) -> None:
    target, history = summary.benchmark.targets[metric], summary.outcome.history
    axes.set_ylabel(metric)
    axes.axhline(target.value, color=TARGET_COLOUR, linestyle="--", linewidth=1.2, label=f"target {target.value:g}")
    if history:
        samples, values = zip(*((at, found[metric]) for at, found in history), strict=True)
        label = f"evaluations, last {values[-1]:.4g}"
        axes.plot(samples, values, color=QUALITY_COLOUR, marker="o", markersize=4, linewidth=1.4, label=label)
    else:
        axes.text(0.5, 0.4, "no evaluation", ha="center", va="center", transform=axes.transAxes, color="#777777")
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=8)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return a centred moving mean over 2 % of the values, at least 5 on each side; narrower near the ends."""
    reach = max(5, len(values) // 100)
    sums = [0.0, *itertools.accumulate(values)]
    means = []
    for index in range(len(values)):
        width = min(reach, index, len(values) - 1 - index)
        first, last = index - width, index + width + 1
        means.append((sums[last] - sums[first]) / (last - first))
    return means


def _title_lines(summary: Summary) -> list[str]:
    """Return status, verdict and note, wrapped to the width of the picture."""
    return [
        part
        for text in (_status(summary), f"verdict on the log: {summary.verdict}", _note(summary))
        for part in textwrap.wrap(text, 110)
    ]


def _status(summary: Summary) -> str:
    if summary.outcome.status == "success":
        return f"success: target reached after {summary.minutes:.2f} minutes"
    return f"{summary.outcome.status}: target not reached in {summary.minutes:.2f} minutes"


def _other_data(benchmark: BenchmarkConfig) -> str:
    """Return the kind of data that replaces the benchmark's: "synthetic" or "custom"; empty if nothing does."""
    return "synthetic" if benchmark.synthetic else "custom" if benchmark.custom else ""


def _note(summary: Summary) -> str:
    if other := _other_data(summary.benchmark):
        return NOT_A_RESULT + other
    return RESUMED if summary.outcome.resumed else NOT_A_SCORE


def _evaluation(summary: Summary) -> str:
    """Return a text on the duration of all evaluations, and the part that overlapped with training."""
    count, seconds = summary.outcome.evaluations, summary.outcome.evaluation_seconds
    if not count:
        return "none"
    hidden = summary.outcome.hidden_seconds / seconds if seconds > 0 else 0.0
    ranks = ""
    if summary.evaluation_ranks:
        ranks = f" on {_counted(summary.evaluation_ranks, 'rank')} of {'its' if count == 1 else 'their'} own"
    if summary.offline:
        return f"{_counted(count, 'checkpoint')} scored in {seconds:.2f} s{ranks}, which does not count"
    return f"{_counted(count, 'evaluation')} in {seconds:.2f} s{ranks}, {hidden:.0%} of it hidden behind training"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
