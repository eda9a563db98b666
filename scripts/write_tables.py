"""Write tables and plot of the measurements in docs/results: ``python scripts/write_tables.py``.

The JSON files are ``results.json`` of ``mlperf-suite measure`` and reports of ``mlperf-suite bench bench.only=peer``. A
table in a document is between ``<!-- results: NAME -->`` and ``<!-- end of results -->``. A measurement without date,
machine, versions and an unchanged commit is refused; one whose last step updated nothing is not shown.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from omegaconf import OmegaConf  # noqa: E402

from benchmarks import WORKLOADS  # noqa: E402
from common.config.composition import CONFIGS, scales_of  # noqa: E402
from common.config.schema import TargetConfig  # noqa: E402
from common.measure.table import MeasuredCopy, number, published_rates, read_results, table  # noqa: E402
from common.mlperf.rules import newest_ruleset, rules_for  # noqa: E402

RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
PLOT = ROOT / "docs" / "speed.svg"
BLOCK = re.compile(r"(<!-- results: (?P<name>\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
PROVENANCE = ("date", "commit", "command", "machine", "packages")

UNITS = {
    "bert": "sequences",
    "cosmoflow": "cubes",
    "deepcam": "images",
    "dlrm": "samples, smaller tables",
    "dlrm_dcnv2": "samples, smaller tables",
    "flux1": "samples, 24 of 57 blocks",
    "gpt3": "rows of 2,048 tokens, 3 of 96 layers",
    "llama2_70b_lora": "rows of 8,192 tokens",
    "llama31_8b": "rows of 8,192 tokens, an update each",
    "maskrcnn": "images",
    "minigo": "positions",
    "oc20": "structures",
    "openfold": "chains",
    "resnet": "images",
    "retinanet": "images",
    "rgat": "seeds, sampled before",
    "rnnt": "utterances",
    "ssd300": "images",
    "stable_diffusion": "images",
    "unet3d": "crops",
}
"""What a sample of a workload is, in the step of the recipe for one GPU."""
NOT_COMPARABLE = {"dlrm_dcnv2": "real tables", "flux1": "all blocks"}
"""Workloads whose recipe for one GPU trains another network than that for two, and what the latter has."""
PART_OF_A_STEP = {"rgat"}
"""Workloads whose measured step leaves out work of a training step: R-GAT's batches are sampled before."""

BAR, ROW, LEFT, WIDTH = 12, 58, 190, 860
COLOURS = {"this suite": "#2f6fb5", "NVIDIA, published": "#76a832", "other PyTorch": "#c9823a"}


class Peer(NamedTuple):
    """Samples per second of other software and of this suite, measured in one process."""

    name: str
    rate: float
    own_rate: float


@dataclass(frozen=True)
class Results:
    """All valid measurements.

    Attributes:
        copies: results of ``measure``.
        peers: other software, by benchmark.
        dates: days of the measurements, as YYYY-MM-DD.
    """

    copies: Sequence[MeasuredCopy]
    peers: Mapping[str, Sequence[Peer]]
    dates: Sequence[str]

    def alone(self, benchmark: str) -> list[Mapping[str, Any]]:
        """Return the figures of a benchmark on one GPU, for each GPU that measured it."""
        return [
            each.figures
            for each in self.copies
            if each.figures is not None and (each.job.benchmark, each.job.gpus) == (benchmark, 1)
        ]

    def step(self, benchmark: str) -> Mapping[str, Any] | None:
        """Return the figures of the GPU with the median step; None if the benchmark was not measured."""
        found = sorted(self.alone(benchmark), key=lambda figures: figures["step_ms"])
        return found[(len(found) - 1) // 2] if found else None

    def pair(self, benchmark: str) -> Mapping[str, Any] | None:
        """Return the figures of a benchmark on two GPUs; None if it was not measured."""
        found = self._pair(benchmark)
        return None if found is None else found.figures

    def efficiency(self, benchmark: str) -> float | None:
        """Return the slower single step divided by the step of both GPUs; None if they cannot be compared."""
        both = self._pair(benchmark)
        if both is None or both.figures is None or benchmark in NOT_COMPARABLE:
            return None
        singles = [
            each.figures["step_ms"]
            for each in self.copies
            if each.figures is not None
            and (each.job.benchmark, each.job.gpus) == (benchmark, 1)
            and each.places[0] in both.places
        ]
        return max(singles) / both.figures["step_ms"] if singles else None

    def _pair(self, benchmark: str) -> MeasuredCopy | None:
        found = [each for each in self.copies if (each.job.benchmark, each.job.gpus) == (benchmark, 2)]
        return found[-1] if found else None


def date_of(path: Path, figures: Mapping[str, Any]) -> str:
    """Return the date of a measurement as YYYY-MM-DD.

    Raises:
        SystemExit: it does not say where it comes from.
    """
    origin = figures.get("provenance") or {}
    if missing := [key for key in PROVENANCE if key not in origin or (key != "packages" and not origin[key])]:
        raise SystemExit(f"{path}: a measurement has no {missing[0]}; measure again with bench.report or measure")
    if origin["changed"] is not False:
        raise SystemExit(f"{path}: measured with source that differs from its commit; commit it and measure again")
    return str(origin["date"])[:10]


def read(folder: Path = RESULTS) -> Results:
    """Return all measurements in a folder.

    Raises:
        SystemExit: a measurement does not say where it comes from.
    """
    copies: list[MeasuredCopy] = []
    peers: dict[str, list[Peer]] = {}
    dates: set[str] = set()
    for path in sorted(folder.glob("*.json")):
        values = json.loads(path.read_text())
        if "results" in values:
            for copy in read_results(path):
                if copy.figures is not None:
                    dates.add(date_of(path, copy.figures))
                    copies += [copy] * copy.figures["updated"]
            continue
        dates.add(date_of(path, values))
        peers[values["benchmark"]] = [
            Peer(each["name"], each["samples"] / each["step_ms"] * 1e3, values["samples_per_second"])
            for each in values["peers"]
            if each["step_ms"] is not None
        ]
    return Results(copies, peers, sorted(dates))


def row(*cells: str) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def workloads(results: Results) -> str:
    """Return the table of all workloads: target, recipes, step on one GPU, two GPUs, and NVIDIA's rate."""
    published = published_rates("8xH200")
    lines = [
        row(
            "workload",
            "target",
            "last round",
            "GPUs",
            f"step on one H200, {' and '.join(results.dates)}",
            "two H200",
            "NVIDIA, per GPU",
        ),
        row(*["---"] * 7),
    ]
    for name in WORKLOADS:
        settings = OmegaConf.load(CONFIGS / "benchmark" / f"{name}.yaml")
        targets = ", ".join(f"{metric} {TargetConfig(**target)}" for metric, target in settings.targets.items())
        gpus = [int(size[1]) for scale in scales_of(name) if (size := re.match(r"(\d+)x", scale))]
        lines.append(
            row(
                f"[`{name}`](benchmarks/{name}/README.md) {settings.description}",
                targets,
                rules_for(name, newest_ruleset(name)).last_round,
                f"{min(gpus):,} to {max(gpus):,}",
                _step_cell(name, results.step(name)),
                _pair_cell(name, results),
                published.get(name, ""),
            )
        )
    return "\n".join(lines)


def _step_cell(name: str, figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "in its README"
    precision = "FP8" if figures["implementations"].get("linear") == "fp8" else figures["precision"]
    return f"{figures['samples']:,} {UNITS[name]}, {precision}: **{number(figures['samples_per_second'])}**/s"


def _pair_cell(name: str, results: Results) -> str:
    both = results.pair(name)
    if name in NOT_COMPARABLE and both is not None:
        return f"{NOT_COMPARABLE[name]}: {number(both['samples_per_second'] / 2)}/s each"
    efficiency = results.efficiency(name)
    return "" if efficiency is None else f"{efficiency:.1%}"


def steps(results: Results) -> str:
    """Return the table of the steps on one and two GPUs, and that of the time which two GPUs lose."""
    lines = [
        row("workload", "alone, ms", "two, ms", "samples/s a GPU: alone", "of two", "efficiency", "exposed, ms",
            "SM clock, MHz: alone", "of two", "J a sample: alone", "of two", "memory, GB"),
        row(*["---"] * 12),
    ]  # fmt: skip
    for name in sorted(WORKLOADS):
        alone, one = results.alone(name), results.step(name)
        if one is None:
            continue
        times, two, efficiency = (
            sorted(figures["step_ms"] for figures in alone),
            results.pair(name),
            results.efficiency(name),
        )
        lines.append(
            row(
                name,
                f"{times[0]:.4g} to {times[-1]:.4g}" if len(times) > 1 else f"{times[0]:.4g}",
                "" if two is None else f"{two['step_ms']:.4g}",
                number(one["samples_per_second"]),
                "" if two is None else number(two["samples_per_second"] / 2),
                "" if efficiency is None else f"{efficiency:.3f}",
                "" if two is None else _of_ranks(two, "exposed_ms", ".2f"),
                _of_ranks(one, "sm_clock_mhz", ".0f"),
                "" if two is None else _of_ranks(two, "sm_clock_mhz", ".0f"),
                _joules(one),
                "" if two is None else _joules(two),
                f"{one['reserved_bytes'] / 1e9:.1f}",
            )
        )
    lost = table(results.copies).partition("\n\n")[2]
    return "\n".join([*lines, "", lost])


def _of_ranks(figures: Mapping[str, Any], key: str, form: str) -> str:
    return ", ".join(format(rank[key], form) for rank in figures["by_rank"] if rank[key] is not None)


def _joules(figures: Mapping[str, Any]) -> str:
    return "" if figures["joules"] is None else f"{figures['joules'] / figures['samples']:.3g}"


def peers(results: Results) -> str:
    """Return the table of other software."""
    lines = [row("workload", "other software", "its samples/s", "ours, same process", "ratio"), row(*["---"] * 5)]
    lines += [
        row(name, peer.name, number(peer.rate), number(peer.own_rate), f"{peer.own_rate / peer.rate:.2f}")
        for name, measured in sorted(results.peers.items())
        for peer in measured
    ]
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[Results], str]] = {"workloads": workloads, "steps": steps, "peers": peers}


def filled(text: str, results: Results) -> str:
    """Return a document with its tables written anew.

    Raises:
        KeyError: a block names no table.
    """
    return BLOCK.sub(lambda block: f"{block[1]}{TABLES[block['name']](results)}\n{block[3]}", text)


def plot(results: Results) -> str:
    """Return a bar chart as SVG: samples per second and GPU as a fraction of this suite's, for compared workloads.

    NVIDIA's rates of eight GPUs are compared with ours of two, which exchange gradients too; other software with our
    step in the same process.
    """
    groups: list[tuple[str, dict[str, float]]] = []
    for name in WORKLOADS:
        others, pair, label = {}, results.pair(name), name
        published = published_rates("8xH200").get(name)
        if pair is not None and published is not None and name not in PART_OF_A_STEP:
            others["NVIDIA, published"] = (
                float(published.split(" ")[0].replace(",", "")) / pair["samples_per_second"] * 2
            )
            label += "" if "H200" in published else " (H100)"
        if results.peers.get(name):
            others["other PyTorch"] = max(peer.rate / peer.own_rate for peer in results.peers[name])
        if others:
            groups.append((label, {"this suite": 1.0, **others}))
    height = 40 + ROW * len(groups)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>Speed per GPU as a fraction of this suite's</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for position, (label, colour) in enumerate(COLOURS.items()):
        left = LEFT + 190 * position
        lines.append(f'<rect x="{left}" y="10" width="{BAR}" height="{BAR}" fill="{colour}"/>')
        lines.append(f'<text x="{left + BAR + 6}" y="20">{escape(label)}</text>')
    for position, (name, bars) in enumerate(groups):
        lines += _bars(name, bars, 36 + ROW * position)
    return "\n".join([*lines, "</svg>", ""])


def _bars(name: str, bars: Mapping[str, float], top: int) -> Iterable[str]:
    yield f'<text x="{LEFT - 8}" y="{top + 26}" text-anchor="end">{escape(name)}</text>'
    for position, (label, value) in enumerate(bars.items()):
        y, width = top + position * (BAR + 4), value * (WIDTH - LEFT - 60)
        yield f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[label]}"/>'
        yield f'<text x="{LEFT + width + 5:.1f}" y="{y + 10}" font-size="11">{value:.2f}</text>'


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = read()
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(), found))
    PLOT.write_text(plot(found))
