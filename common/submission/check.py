"""``mlperf-suite check``: what logs, folders of results and whole submissions may claim."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, DataError, printable
from common.mlperf.checker_process import one_checker_process
from common.mlperf.parsed_log import ParsedLog
from common.mlperf.rules import RULESETS, Usage, rules_for
from common.mlperf.verdict import Verdict, format_verdict
from common.submission.found_files import find_files
from common.submission.layout import has_layout
from common.submission.score import Score, score
from common.submission.sources import NAMED_AT_MOST, RunSet, find_run_sets


def verdict_of_set(scored: Score) -> Verdict:
    """What a set of runs may claim together: submittable, or refused with everything that prevents it."""
    rules = scored.rules
    return Verdict(
        "submittable" if scored.minutes is not None else "refused",
        scored.obstacles,
        scored.notes,
        None if rules is None else rules.log_name,
        None if rules is None else rules.ruleset,
        scored.run_set.logs,
        converged=scored.olympic_minutes is not None,
        score=scored.minutes,
    )


def check_paths(paths: Sequence[Path], ruleset: str | None, known: dict[Path, ParsedLog] | None = None) -> bool:
    """Print the verdict of each run, and of each set of several runs; returns whether nothing is refused.

    Args:
        paths: logs, and folders of results.
        ruleset: version to judge by; None for the one that each states, or the newest valid one.
        known: gets the logs that were read.

    Raises:
        ConfigError: the ruleset is not known.
        DataError: a path does not exist, or a folder has no results.
    """
    return _check_run_sets(find_run_sets(paths), ruleset, known)


def _check_run_sets(run_sets: Sequence[RunSet], ruleset: str | None, known: dict[Path, ParsedLog] | None) -> bool:
    ok = True
    for run_set in run_sets:
        scored = score(run_set, ruleset)
        verdicts = [run.verdict for run in scored.runs]
        for verdict in verdicts:
            print(format_verdict(verdict))
        if run_set.declared_together and (len(verdicts) != 1 or run_set.series is not None):
            verdicts.append(verdict_of_set(scored))
            print(format_verdict(verdicts[-1], f"{run_set.name} ({len(run_set.logs)} runs)"))
        ok = ok and all(verdict.kind != "refused" for verdict in verdicts)
        if known is not None:
            known |= {verdict.log.path: verdict.log for verdict in verdicts if verdict.log is not None}
    return ok


def check_submission(tree: Path, ruleset: str | None) -> bool:
    """Judge a submitter's folder: every log and set of runs, then MLCommons' checkers; returns whether all accept.

    Raises:
        ConfigError: no ruleset was named.
        DataError: the folder cannot be read.
    """
    # Imported here because one log, which needs none of it, is judged in less time than the imports take.
    from common.submission.checkers import check_tree, format_report, result_folders

    if ruleset is None:
        raise ConfigError(f"{tree} is a submission: name the one version that it is for with --ruleset")
    known: dict[Path, ParsedLog] = {}
    ok = True
    for folder in result_folders(tree):
        try:
            run_sets = [each for each in find_run_sets([folder]) if each.logs and each.logs[0].parent == folder]
        except DataError as error:
            print(f"{printable(str(folder))}: REFUSED\n  - {printable(str(error))}")
            ok = False
        else:
            ok = _check_run_sets(run_sets, ruleset, known) and ok
    reports = check_tree(tree, _usage(tree, ruleset), ruleset, known)
    for report in reports:
        print(format_report(report))
    return ok and all(report.accepted for report in reports)


def _usage(tree: Path, ruleset: str) -> Usage:
    """Training or HPC, whose rulesets have the same numbers: from the first benchmark that the ruleset accepts."""
    from common.submission.checkers import result_folders

    for folder in result_folders(tree):
        try:
            return rules_for(folder.name, ruleset).usage
        except ConfigError:
            continue
    return "training"


def _is_submission(path: Path) -> bool:
    """Whether a path is a submitter's folder: it has an entry ``systems`` of any kind, or ``results`` with its layout.

    The layout is ``results/<system>/<benchmark>/result_<i>.txt``. A folder of results has neither, and is judged
    without :func:`check_tree`.
    """
    return os.path.lexists(path / "systems") or has_layout(path / "results")


def _submissions_below(path: Path) -> list[Path]:
    """The submitters' folders within a folder that is none itself, such as those of a whole round.

    They have ``results``, and ``systems`` or ``benchmarks``. A clone of this suite has ``benchmarks``, too, and may
    have a folder ``results`` without the layout of a submission.
    """
    if not os.path.isdir(path):
        return []
    folders = [path / each for each in find_files(path).folders]
    return [
        each
        for each in folders
        if os.path.lexists(each / "results")
        and (
            os.path.lexists(each / "systems") or (os.path.lexists(each / "benchmarks") and has_layout(each / "results"))
        )
    ]


def _sort(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The submitters' folders among the paths, and the others.

    Raises:
        DataError: a path holds submitters' folders.
    """
    submissions = [path for path in paths if _is_submission(path)]
    others = [path for path in paths if path not in submissions]
    for path in others:
        if below := _submissions_below(path):
            named = " ".join(shlex.quote(str(each)) for each in below[:NAMED_AT_MOST])
            raise DataError(
                f"{path}: holds {len(below)} submission(s), each of one submitter and one ruleset; name the "
                f"submitters' folders: mlperf-suite check --ruleset X.Y.Z {named}"
            )
    return submissions, others


def main(argv: Sequence[str] | None = None) -> int:
    """``mlperf-suite check PATH… [--ruleset X.Y.Z]``.

    Returns:
        0; 1 if a log, a set of runs or a submission is refused.

    Raises:
        ConfigError: the ruleset is not known, or missing for a submission.
        DataError: a path does not exist, has nothing to judge, or holds several submissions.
    """
    parser = argparse.ArgumentParser(
        prog="mlperf-suite check",
        description="Say what runs may claim: refused, format, valid run, or submittable as a set.",
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH",
        help="logs (several are one set, in launch order), folders of results, or a submitter's folder",
    )  # fmt: skip
    parser.add_argument(
        "--ruleset",
        help="version to judge by (default: the one that a log states, or the newest under which it is valid)",
    )
    args = parser.parse_args(argv)
    if args.ruleset is not None and not any(args.ruleset in versions for versions in RULESETS.values()):
        raise ConfigError(f"--ruleset {args.ruleset} is not known; known are {', '.join(RULESETS['training'])}")
    submissions, others = _sort(args.paths)
    with one_checker_process():
        ok = [check_submission(path, args.ruleset) for path in submissions]
        ok += [check_paths(others, args.ruleset)] if others else []
    return 0 if all(ok) else 1
