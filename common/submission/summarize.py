"""``mlperf-suite summarize``: print a table of runs with their score, or the reasons why there is no score."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.errors import DataError, printable
from common.mlperf.checker_process import one_checker_process
from common.mlperf.parsed_log import distinct_names
from common.mlperf.rules import Rules
from common.mlperf.verdict import NOT_A_RESULT, UNVERIFIED
from common.submission.run_sets import find_run_sets
from common.submission.score import ResultScore, ScoredRun, score

HOW_COUNTED = (
    "runs counted: experiments that reached run_start; each experiment that ended earlier is left out and must be "
    "replaced, so that a series of M declared experiments has M runs"
)
HOW_INSTANCES_COUNTED = (
    "instances counted: those that reached the target; the others that reached run_start are pruned, and those that "
    "ended earlier are left out"
)


def format_score(scored: ResultScore) -> str:
    """Return a score as text: table of runs, chosen runs, RCP comparison, and the score or its obstacles."""
    rules = scored.rules
    about = f"{rules.log_name}, ruleset {rules.ruleset}" if rules is not None else "no ruleset accepts these logs"
    lines = [f"{scored.run_set.name}: {about}", "", *_table(scored), ""]
    if scored.run_set.series is not None:
        how = HOW_INSTANCES_COUNTED if scored.run_set.instances else HOW_COUNTED
        lines.append(f"  {how}; declared {scored.run_set.series.declared}, ran {len(scored.runs)}")
    if scored.window is not None or scored.instances:
        lines.append(f"  result: {scored.choice}")
    if scored.window is not None:
        lines.append(f"  olympic mean: {_minutes(scored.olympic_minutes)}")
    if rules is not None:
        lines += _convergence(scored, rules)
    lines += [f"  note: {note}" for note in scored.notes]
    if scored.minutes is not None:
        lines.append(f"  score: {_minutes(scored.minutes)}, {UNVERIFIED}")
    else:
        lines.append("  no score:")
        lines += [f"    - {obstacle}" for obstacle in scored.obstacles]
    if scored.other_data:
        lines.append(f"  {NOT_A_RESULT}")
    return "\n".join(printable(line) for line in lines)


def _table(scored: ResultScore) -> list[str]:
    unit = scored.rules.unit if scored.rules is not None else "progress"
    named = distinct_names(run.verdict.paths[0] for run in scored.runs)
    rows = [("run", "minutes", f"{unit} to converge", "seed", "verdict", "log")]
    for run in scored.runs:
        rows.append(
            (
                f"{run.number}{'*' if run in scored.chosen else ''}",
                "-" if run.verdict.score is None else f"{run.verdict.score:.3f}",
                "-" if run.convergence is None else f"{run.convergence:.10g}",
                "-" if run.seed is None else str(run.seed),
                _verdict(run),
                named[run.verdict.paths[0]],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [*(line.rstrip() for line in lines), *(["  * part of the result"] if scored.chosen else [])]


def _verdict(run: ScoredRun) -> str:
    if run.verdict.kind == "valid run" or run.verdict.kind == "refused":
        return run.verdict.kind
    return run.verdict.kind if run.verdict.converged else f"{run.verdict.kind}, not converged"


def _convergence(scored: ResultScore, rules: Rules) -> list[str]:
    reference = scored.reference
    lines = []
    if scored.convergence is not None:
        lines.append(f"  convergence: {scored.convergence:.8g} {rules.unit} (olympic mean)")
    if reference is not None:
        found = {"exact": "", "interpolated": ", interpolated", "smallest": ", of the smallest RCP batch"}
        lines.append(
            f"  reference convergence point (RCP) at this batch{found[reference.found]}: mean {reference.mean:.8g}, "
            f"smallest acceptable mean {reference.limit:.8g} {rules.unit}"
        )
    elif scored.window is not None:
        lines.append("  mlperf-logging has no reference convergence point (RCP) for this batch")
    if scored.factor is not None:
        lines.append(f"  RCP normalisation factor: {scored.factor:.4f}")
    return lines


def _minutes(value: float | None) -> str:
    return "infinite: too many runs failed" if value is None else f"{value:.3f} minutes"


def as_json(scored: ResultScore) -> dict[str, Any]:
    """Return the content of :func:`format_score` for JSON. Times are in minutes, convergence in ``unit``."""
    rules, series = scored.rules, scored.run_set.series
    return {
        "name": scored.run_set.name,
        "benchmark": None if rules is None else rules.log_name,
        "ruleset": None if rules is None else rules.ruleset,
        "unit": None if rules is None else rules.unit,
        "declared": None if series is None else series.declared,
        "runs": [_run_json(run, run in scored.chosen) for run in scored.runs],
        "choice": scored.choice,
        "olympic_minutes": scored.olympic_minutes,
        "throughput": None if scored.throughput is None else asdict(scored.throughput),
        "convergence": scored.convergence,
        "reference": None if scored.reference is None else asdict(scored.reference),
        "factor": scored.factor,
        "score_minutes": scored.minutes,
        "status": NOT_A_RESULT if scored.other_data else UNVERIFIED,
        "obstacles": list(scored.obstacles),
        "notes": list(scored.notes),
    }


def _finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinity as text, because JSON has no such numbers and a log may have any seed."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list) else value


def _run_json(run: ScoredRun, chosen: bool) -> dict[str, Any]:
    return {
        "number": run.number,
        "log": str(run.verdict.paths[0]),
        "chosen": chosen,
        "minutes": run.verdict.score,
        "convergence": run.convergence,
        "converged": run.verdict.converged,
        "seed": run.seed,
        "verdict": run.verdict.kind,
        "reasons": list(run.verdict.reasons),
    }


def main(argv: Sequence[str]) -> int:
    """Run ``mlperf-suite summarize PATH… [--ruleset X.Y.Z] [--json FILE]``.

    Returns:
        0 if every set of runs has a score, otherwise 1.

    Raises:
        ConfigError: the ruleset is not known.
        DataError: a path has no results, or the JSON cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="mlperf-suite summarize",
        description="Compute the score of a series of runs by the rules. Scores are unverified.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="folder with runs.jsonl or result_*.txt, or a parent of such folders; or logs in launch order",
    )
    parser.add_argument(
        "--ruleset",
        help="version of the rules (default: the one in the logs, or the newest under which they are valid)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON to FILE")
    args = parser.parse_args(argv)
    with one_checker_process():
        scores = [score(run_set, args.ruleset) for run_set in find_run_sets(args.paths)]
    print("\n\n".join(format_score(each) for each in scores))
    if args.json is not None:
        try:
            content = [_finite(as_json(each)) for each in scores]
            args.json.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise DataError(f"{args.json}: cannot be written: {error.strerror}") from error
    return 0 if all(each.minutes is not None for each in scores) else 1
