"""``mlperf-suite check``: judge logs, result folders and whole submissions, and print the verdicts."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, DataError, printable
from common.mlperf.checker_process import one_checker_process
from common.mlperf.parsed_log import ParsedLog
from common.mlperf.rules import Usage, require_ruleset, rules_for
from common.mlperf.verdict import Verdict, format_verdict
from common.submission.found_files import find_files
from common.submission.layout import has_layout
from common.submission.run_sets import NAMED_AT_MOST, RunSet, find_run_sets
from common.submission.score import ResultScore, score


def verdict_of_set(scored: ResultScore) -> Verdict:
    """Return the verdict of a set of runs: "submittable", or "refused" with every reason."""
    rules = scored.rules
    return Verdict(
        "submittable" if scored.minutes is not None else "refused",
        scored.obstacles,
        scored.notes,
        None if rules is None else rules.log_name,
        None if rules is None else rules.ruleset,
        scored.run_set.logs,
        converged=scored.olympic_minutes is not None or scored.throughput is not None,
        score=scored.minutes,
    )


def check_run_sets(run_sets: Sequence[RunSet], ruleset: str | None, known: dict[Path, ParsedLog] | None = None) -> bool:
    """Print the verdict of each run and of each set of several runs. Return True if nothing is refused.

    A log without an end is refused, and its set is not, because the run counts as a failed one.

    Args:
        ruleset: version to judge by; None for the version that each log states, or the newest that accepts it.
        known: dictionary to which the parsed logs are added, by path.

    Raises:
        ConfigError: the ruleset is not known.
    """
    ok = True
    for run_set in run_sets:
        scored = score(run_set, ruleset)
        verdicts = [run.verdict for run in scored.runs]
        for verdict in verdicts:
            print(format_verdict(verdict))
        if run_set.declared_together and (len(verdicts) != 1 or run_set.series is not None):
            verdicts.append(verdict_of_set(scored))
            print(format_verdict(verdicts[-1], f"{run_set.name} ({len(run_set.logs)} runs)"))
        tolerated = scored.minutes is not None and run_set.may_be_cut_short
        ok = ok and all(verdict.kind != "refused" or (tolerated and verdict.cut_short) for verdict in verdicts)
        if known is not None:
            known |= {verdict.log.path: verdict.log for verdict in verdicts if verdict.log is not None}
    return ok


def check_submission(tree: Path, ruleset: str | None) -> bool:
    """Judge a submitter's folder: each log, each set of runs, then all checkers. Return True if all accept.

    Raises:
        ConfigError: ``ruleset`` is None.
        DataError: the folder cannot be read.
    """
    # Imported here because these imports take longer than judging a single log, which does not need them.
    from common.submission.checkers import judge_tree, result_folders
    from common.submission.mlcommons_checkers import format_report

    if ruleset is None:
        raise ConfigError(f"{tree} is a submission: name the one version that it is for with --ruleset")
    known: dict[Path, ParsedLog] = {}
    ok = True
    for folder in result_folders(tree):
        try:
            run_sets = [each for each in find_run_sets([folder]) if any(log.parent == folder for log in each.logs)]
        except DataError as error:
            print(f"{printable(str(folder))}: REFUSED\n  - {printable(str(error))}")
            ok = False
        else:
            ok = check_run_sets(run_sets, ruleset, known) and ok
    judged = judge_tree(tree, _usage(tree, ruleset), ruleset, known, finished=True)
    for report in judged.reports:
        print(format_report(report))
    return ok and judged.accepted


def _usage(tree: Path, ruleset: str) -> Usage:
    """Return the usage of the first accepted benchmark. Training and HPC rulesets share version numbers."""
    from common.submission.checkers import result_folders

    for folder in result_folders(tree):
        try:
            return rules_for(folder.name, ruleset).usage
        except ConfigError:
            continue
    return "training"


def _is_submission(path: Path) -> bool:
    """Return whether a path is a submitter's folder.

    Such a folder has an entry ``systems`` of any kind, or logs at ``results/<system>/<benchmark>/result_<i>.txt``.
    Plain result folders have neither, and MLCommons' checkers do not run on them.
    """
    return os.path.lexists(path / "systems") or has_layout(path / "results")


def _submissions_below(path: Path) -> list[Path]:
    """Return the submitters' folders below a folder, for example below the folder of a whole round.

    They have ``results``, and ``systems`` or ``benchmarks``. With ``benchmarks`` alone, ``results`` must have the
    layout of a submission, because a clone of this suite can have both folders, too.
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
    """Split the paths into submitters' folders and others.

    Raises:
        DataError: a path contains submitters' folders but is not one itself.
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
    """Run ``mlperf-suite check PATH… [--ruleset X.Y.Z]``.

    Returns:
        1 if a log, a set of runs or a submission is refused, otherwise 0.

    Raises:
        ConfigError: the ruleset is not known, or a submission is given without a ruleset.
        DataError: a path does not exist, has nothing to judge, or contains submitters' folders.
    """
    parser = argparse.ArgumentParser(
        prog="mlperf-suite check",
        description="Check logs against the rules. The verdict is refused, format, valid run or submittable.",
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH",
        help="logs (several are one series, in launch order), folders of results, or a submission",
    )  # fmt: skip
    parser.add_argument(
        "--ruleset",
        help="version of the rules (default: the one in the log, or the newest under which the log is valid)",
    )
    args = parser.parse_args(argv)
    require_ruleset(args.ruleset)
    submissions, others = _sort(args.paths)
    with one_checker_process():
        ok = [check_submission(path, args.ruleset) for path in submissions]
        ok += [check_run_sets(find_run_sets(others), args.ruleset)] if others else []
    return 0 if all(ok) else 1
