"""``mlperf-suite package``: build a submission tree from results, for one ruleset, and check it.

The tree is built in a temporary folder in the output folder. It is renamed to its final name only if every checker
accepts it; otherwise it is deleted, or kept on request.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError, DataError, SuiteError
from common.mlperf.parsed_log import ParsedLog
from common.mlperf.rules import require_ruleset, round_name
from common.mlperf.verdict import UNVERIFIED
from common.submission.checkers import judge_tree
from common.submission.entries import SubmissionEntry, contradicted_descriptions, gather, refusals
from common.submission.layout import SCALING_FILE
from common.submission.mlcommons_checkers import format_report
from common.submission.settings import SubmissionSettings, read_settings
from common.submission.system_description import Description, describe
from common.submission.tree import result_folder, write_tree

ROOT = Path(__file__).resolve().parents[2]

_DESCRIPTION = """Build a submission in DIR/<submitter>: logs, descriptions of the systems, the code of the commit that
ran, and README files. Then MLCommons' package checker, system description checker, repository checker and RCP checker
check it. DIR/<submitter> exists only if all of them accept it."""


def package(
    settings: SubmissionSettings, ruleset: str, output: Path, repository: Path = ROOT, keep_rejected: bool = False
) -> bool:
    """Build and check a submission, and print the reports of the checkers.

    Args:
        output: parent of the new submitter's folder; created if missing.
        repository: clone that has the commits of the runs.
        keep_rejected: keep a tree that is not accepted, as ``<submitter>.rejected``.

    Returns:
        True if every checker accepts the tree, which is then at ``output/<submitter>``.

    Raises:
        ConfigError: the target exists, or the settings do not fit the results or the files on disk.
        DataError: the results cannot be submitted; the message names every file and reason.
        SuiteError: the tree cannot be written.
    """
    target, rejected = output / settings.submitter, output / f"{settings.submitter}.rejected"
    for path in (target, *([rejected] if keep_rejected else [])):
        if path.exists():
            raise ConfigError(f"{path} exists; remove it, or name another folder with --output")
    entries = gather(settings, ruleset)
    if found := refusals(entries, settings):
        raise DataError("these results cannot be packaged:\n  " + "\n  ".join(found))
    descriptions = _descriptions(settings, entries)
    if found := contradicted_descriptions(entries, descriptions):
        raise DataError("these results cannot be packaged:\n  " + "\n  ".join(found))
    try:
        output.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".building-", dir=output))
        try:
            tree = staging / settings.submitter
            write_tree(tree, settings, ruleset, entries, descriptions, repository)
            ok = _check(tree, ruleset, entries)
            if ok or keep_rejected:
                tree.rename(target if ok else rejected)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise SuiteError(f"{output}: the submission cannot be written: {error.strerror or error}") from error
    _conclude(ok, target, rejected if keep_rejected else None, entries, descriptions)
    return ok


def _descriptions(settings: SubmissionSettings, entries: Sequence[SubmissionEntry]) -> dict[str, Description]:
    found = {}
    for name in dict.fromkeys(entry.system for entry in entries):
        doctors = dict.fromkeys(path for entry in entries if entry.system == name for path in entry.doctors)
        found[name] = describe(name, settings.systems[name], settings.submitter, list(doctors))
    return found


def _check(tree: Path, ruleset: str, entries: Sequence[SubmissionEntry]) -> bool:
    """Run the checkers and copy each ``scaling.json`` of the package checker into the tree. Return True if accepted."""
    judged = judge_tree(tree, entries[0].rules.usage, ruleset, _copied_logs(tree, entries))
    for report in judged.reports:
        print(format_report(report))
    for folder, content in (judged.scalings or {}).items():
        (tree / folder / SCALING_FILE).write_bytes(content)
    return judged.accepted


def _copied_logs(tree: Path, entries: Sequence[SubmissionEntry]) -> dict[Path, ParsedLog]:
    """Return the parsed logs in the tree by their path, so that they are not read again."""
    found = {}
    for entry in entries:
        for name, run in entry.files:
            if run.log is not None:
                path = result_folder(tree, entry) / name
                found[path] = replace(run.log, path=path)
    return found


def _conclude(
    ok: bool,
    target: Path,
    rejected: Path | None,
    entries: Sequence[SubmissionEntry],
    descriptions: dict[str, Description],
) -> None:
    for note in [note for each in descriptions.values() for note in each.notes]:
        print(f"note: {note}")
    for entry in entries:
        print(
            f"{entry.system}, {entry.benchmark}: {entry.score.minutes:.3f} minutes ({entry.score.choice}); {UNVERIFIED}"
        )
        if entry.rules.retired:
            print(f"note: {entry.benchmark} can no longer be submitted: its last round was {entry.rules.last_round}")
    if ok:
        print(f"{target}: accepted by every checker under {round_name(entries[0].rules.ruleset)}")
    else:
        kept = f"; the tree is {rejected}" if rejected is not None else "; --keep-rejected keeps the tree to look at"
        print(f"{target}: NOT made, a checker does not accept it{kept}")


def main(argv: Sequence[str]) -> int:
    """Run ``mlperf-suite package [RESULTS…] --ruleset X.Y.Z --submission FILE.yaml --output DIR``.

    Returns:
        0 if every checker accepts the submission, 1 if one does not.

    Raises as :func:`package`.
    """
    parser = argparse.ArgumentParser(prog="mlperf-suite package", description=_DESCRIPTION)
    parser.add_argument(
        "results", nargs="*", type=Path, metavar="RESULTS",
        help="folders of results, if the submission has only one system; otherwise FILE.yaml names them",
    )  # fmt: skip
    parser.add_argument("--ruleset", required=True, help="version of the rules for the whole submission")
    parser.add_argument(
        "--submission", required=True, type=Path, metavar="FILE.yaml",
        help="description of submitter, systems and results; see configs/submission/example.yaml",
    )  # fmt: skip
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="parent of the new folder <submitter>"
    )
    parser.add_argument(
        "--repository", type=Path, default=ROOT, help="git clone with the commit of the runs (default: this one)"
    )
    parser.add_argument(
        "--keep-rejected",
        action="store_true",
        help="if a checker does not accept the submission, keep it as DIR/<submitter>.rejected",
    )
    args = parser.parse_args(argv)
    require_ruleset(args.ruleset)
    settings = read_settings(args.submission, tuple(args.results))
    return 0 if package(settings, args.ruleset, args.output, args.repository, args.keep_rejected) else 1
