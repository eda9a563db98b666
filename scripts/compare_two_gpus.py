"""Compare our measured steps of two GPUs with estimates from one: ``python scripts/compare_two_gpus.py``.

The measurements are the files of docs/results, without its subfolders of older ones. Each pair is estimated from the
step that the slower of its two GPUs took alone. The loss is that of the pair against the median of all single GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scipy import stats  # noqa: E402

from benchmarks import WORKLOADS  # noqa: E402
from common.cli import load  # noqa: E402
from common.doctor.limits import hardware_of  # noqa: E402
from common.measure.table import MeasuredCopy, read_results  # noqa: E402
from common.planning.estimates import RunLayout  # noqa: E402
from common.planning.measured_curves import curve_for  # noqa: E402
from common.planning.points import RESULTS, kind_of, read_measurements  # noqa: E402
from common.planning.step_model import step_times  # noqa: E402

SYSTEM = "h200"
"""System of ``configs/system`` on which the steps were measured."""
TOLERANCE = 0.015
HEAD = ("benchmark", "GPUs", "alone, ms", "together, ms", "estimated, ms", "error", "loss", "estimated loss", "")


@dataclass(frozen=True)
class Pair:
    """A measured step of two GPUs; times in milliseconds.

    Attributes:
        places: indices of the GPUs in their node.
        alone: median step of all single GPUs.
        comparable: whether both trained the same network.
    """

    benchmark: str
    places: tuple[int, ...]
    alone: float
    together: float
    estimated: float
    comparable: bool

    @property
    def error(self) -> float:
        """Relative error of the estimate."""
        return self.estimated / self.together - 1

    @property
    def losses(self) -> tuple[float, float]:
        """Measured and estimated loss, as fractions of the common step."""
        return 1 - self.alone / self.together, 1 - self.alone / self.estimated


def pairs(benchmark: str, files: Sequence[Path]) -> Iterator[Pair]:
    """Yield all pairs of a benchmark whose GPUs were also measured alone with the same batch."""
    hardware = hardware_of(SYSTEM)
    points = read_measurements(files, benchmark, hardware.gpu, load).points
    copies = [copy for copy in _copies(files) if copy.job.benchmark == benchmark and copy.figures is not None]
    for point in (each for each in points if each.gpus == 2):
        run = point.run
        alone = {copy.places[0]: copy.figures["step_ms"] for copy in copies if copy.job.gpus == 1 and copy.figures}
        single = [each for each in points if each.gpus == 1 and each.run.micro_batch == run.micro_batch]
        if not single:
            continue
        median = statistics.median(alone.values())
        axes = {axis: run.layout[axis] for axis in ("pp", "cp", "tp")}
        layout = RunLayout(2, run.global_batch, run.micro_batch, point.accumulation, **axes)
        curve = curve_for(single[0].run, single[0].axes, single, hardware)
        same = kind_of(single[0].run) == kind_of(run)
        for copy in copies:
            if copy.job.gpus == 2 and copy.figures:
                slower = max(alone[place] for place in copy.places) / median
                known = dataclasses.replace(hardware, gpu_spread=0.0)  # the slower GPU is known
                step = step_times(run, layout, curve.scaled(slower), known, 0.0).total * 1e3
                yield Pair(benchmark, copy.places, median, copy.figures["step_ms"], step, same)


def _copies(files: Iterable[Path]) -> Iterator[MeasuredCopy]:
    for path in files:
        try:
            yield from read_results(path)
        except (KeyError, TypeError):
            continue  # a report of `mlperf-suite bench`, not results of `mlperf-suite measure`


def table(found: Sequence[Pair]) -> str:
    """Return the Markdown table of the pairs, and a summary of the comparable ones."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    for each in found:
        steps = [f"{step:.4g}" for step in (each.alone, each.together, each.estimated)]
        losses = [f"{100 * loss:.1f} %" for loss in each.losses]
        note = "" if each.comparable else "not comparable: one GPU trains smaller tables in another precision"
        gpus = ", ".join(map(str, each.places))
        lines.append(_line([each.benchmark, gpus, *steps, f"{100 * each.error:+.1f} %", *losses, note]))
    kept = [each for each in found if each.comparable]
    errors = [abs(each.error) for each in kept]
    correlation = float(stats.spearmanr([each.losses for each in kept]).statistic)
    summary = (
        f"comparable pairs: {len(kept)}, median error {100 * statistics.median(errors):.1f} %, largest "
        f"{100 * max(errors):.1f} %, within {100 * TOLERANCE:g} %: {sum(error <= TOLERANCE for error in errors)}, rank "
        f"correlation of the losses {correlation:.2f}"
    )
    return "\n".join([*lines, "", summary])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table of all pairs."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    files = sorted(RESULTS.glob("*.json"))
    print(table([pair for name in WORKLOADS for pair in pairs(name, files)]))


if __name__ == "__main__":
    main()
