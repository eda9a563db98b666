"""MLCommons' four checkers, each in a process of its own, and what their output says.

Exit codes cannot be relied on: the package checker, the system description checker and the repository checker exit
with 0 whatever they find, and the first two die with a traceback on input that they do not expect. A checker accepts
when its output has the sentence with which it says so, and nothing in it says otherwise.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import DataError, SuiteError
from common.mlperf.rcp import has_rcps
from common.mlperf.rules import Usage, accepted

TIMEOUT_SECONDS = 3600.0
SCALINGS = ("strong", "weak")
"""Folders between system and benchmark in results of the HPC rounds."""

_RECORD = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) - ?", re.MULTILINE)
_OLDEST_OF_THE_REPOSITORY_CHECKER = "2.0.0"


@dataclass(frozen=True)
class CheckerReport:
    """What one checker said of one thing.

    Attributes:
        checker: its name.
        subject: file or folder, relative to the folder that holds the submission.
        complaints: why it does not accept, in plain words; empty if it does.
    """

    checker: str
    subject: str
    complaints: tuple[str, ...]

    @property
    def accepted(self) -> bool:
        """Whether the checker accepts the subject."""
        return not self.complaints


def check_tree(tree: Path, usage: Usage, ruleset: str) -> list[CheckerReport]:
    """Run every checker on a submitter's folder; the package checker writes ``scaling.json`` into it.

    Raises:
        DataError: it is not a submission, or cannot be read.
    """
    tree = tree.resolve()
    if not (tree / "results").is_dir() or not (tree / "systems").is_dir():
        raise DataError(f"{tree}: is no submitter's folder: it lacks results/ or systems/")
    reports = [check_names_and_sizes(tree, usage, ruleset)]
    reports += [check_system(tree, path, usage, ruleset) for path in sorted((tree / "systems").glob("*.json"))]
    for folder in result_folders(tree):
        layout = check_layout(tree, folder, ruleset)
        reports.append(layout)
        if layout.accepted and _division(tree, folder) == "closed" and has_rcps(folder.name, ruleset):
            reports.append(check_convergence(tree, folder, usage, ruleset))
    reports.append(check_package(tree, usage, ruleset))
    return reports


def result_folders(tree: Path) -> list[Path]:
    """The folders of results of a submission: ``results/<system>/<benchmark>``, in HPC with ``strong`` between."""
    found: list[Path] = []
    for system in sorted(path for path in (tree / "results").iterdir() if path.is_dir()):
        for inner in sorted(path for path in system.iterdir() if path.is_dir()):
            found += sorted(p for p in inner.iterdir() if p.is_dir()) if inner.name in SCALINGS else [inner]
    return found


def format_report(report: CheckerReport) -> str:
    """A checker's verdict for a human."""
    headline = f"{report.checker}: {report.subject}: {'accepted' if report.accepted else 'NOT ACCEPTED'}"
    return "\n".join([headline, *(f"  - {complaint}" for complaint in report.complaints)])


def _name(tree: Path, path: Path) -> str:
    return str(path.relative_to(tree.parent))


@dataclass(frozen=True)
class _Output:
    """What a checker printed, with paths relative to the folder that holds the submission."""

    code: int
    text: str

    def records(self) -> Iterator[tuple[str, str]]:
        """Level and text of each log record; a record may have several lines."""
        found = list(_RECORD.finditer(self.text))
        ends = [*(match.start() for match in found), len(self.text)][1:]
        for match, end in zip(found, ends, strict=True):
            yield match[1], self.text[match.end() : end].partition("Traceback (most recent")[0].strip()

    def crash(self) -> str | None:
        """How the checker died; None if it did not."""
        if "Traceback (most recent call last)" not in self.text:
            return None
        return self.text.strip().splitlines()[-1]


def _run(tree: Path, module: str, arguments: Sequence[str | Path]) -> _Output:
    plain = [str(each.resolve()) if isinstance(each, Path) else each for each in arguments]
    command = [sys.executable, "-m", f"mlperf_logging.{module}", *plain, "--log_output", "checker.log"]
    with tempfile.TemporaryDirectory(prefix=f"{module}-") as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS,
                check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SuiteError(f"{module} of mlperf-logging cannot be run: {error}") from error
    return _Output(done.returncode, done.stderr.replace(f"{tree.resolve().parent}/", ""))


def check_names_and_sizes(tree: Path, usage: Usage, ruleset: str) -> CheckerReport:
    """The repository checker, on a submitter's folder. Its rules are the same in every round; it knows 2.0.0 on."""
    known = max(ruleset, _OLDEST_OF_THE_REPOSITORY_CHECKER)
    output = _run(tree, "repo_checker", [tree, usage, known])
    complaints = [_crashed(output)] if output.crash() else []
    for level, text in output.records():
        if level == "ERROR" and not text.startswith("Please"):
            title, _, files = text.partition(": ")
            complaints += [f"{name.strip()}: {_repository_words(title)}" for name in files.splitlines()]
    if not complaints and "ALL CHECKS PASSED" not in output.text:
        complaints.append(f"does not say that all checks passed: {output.text.strip()[-200:]}")
    return CheckerReport("repo_checker", tree.name, tuple(complaints))


def _repository_words(title: str) -> str:
    if "git-unfriendly" in title:
        return "the name has a space or begins with a dot"
    return "is larger than 50 MB" if "50MB" in title else title


def check_system(tree: Path, path: Path, usage: Usage, ruleset: str) -> CheckerReport:
    """The system description checker, on one file of ``systems/``, and what it misses or dies of."""
    complaints = _description_complaints(path)
    output = _run(tree, "system_desc_checker", [path, usage, ruleset])
    complaints += [text for level, text in output.records() if level == "ERROR"]
    if output.crash():
        complaints.append(_crashed(output))
    if not complaints and "System description checker passed" not in output.text:
        complaints.append(f"does not say that it passed: {output.text.strip()[-200:]}")
    return CheckerReport("system_desc_checker", _name(tree, path), tuple(complaints))


def _description_complaints(path: Path) -> list[str]:
    """What the checker misses or dies of: anything but text in a field, a division that nobody knows."""
    try:
        fields = _read_description(path)
    except DataError as error:
        return [str(error)]
    complaints = [
        f"{name} is {json.dumps(value)}: write text, {json.dumps(str(value))}"
        for name, value in fields.items()
        if not isinstance(value, str) and name != "other_software_stack"
    ]
    if fields.get("division") not in ("closed", "open"):
        complaints.append(
            f"division is {fields.get('division')!r}, not closed or open: seeds and convergence would not be checked"
        )
    return complaints


def _read_description(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path.name}: is no readable JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{path.name}: is no JSON object")
    return fields


def _system_of(tree: Path, folder: Path) -> str:
    return folder.relative_to(tree / "results").parts[0]


def _division(tree: Path, folder: Path) -> str:
    return str(_read_description(tree / "systems" / f"{_system_of(tree, folder)}.json").get("division"))


def check_layout(tree: Path, folder: Path, ruleset: str) -> CheckerReport:
    """Whether the package checker would die of a folder of results, or pass over it: no such system or benchmark."""
    system = _system_of(tree, folder)
    path = tree / "systems" / f"{system}.json"
    complaints = []
    if not path.is_file():
        complaints.append(f"systems/{system}.json is missing")
    else:
        try:
            _read_description(path)
        except DataError as error:
            complaints.append(str(error))
    if not accepted(folder.name, ruleset):
        complaints.append(f"ruleset {ruleset} does not accept a benchmark named {folder.name}")
    return CheckerReport("layout", _name(tree, folder), tuple(complaints))


def check_convergence(tree: Path, folder: Path, usage: Usage, ruleset: str) -> CheckerReport:
    """The RCP checker, on one folder of results."""
    output = _run(tree, "rcp_checker", [folder, "--rcp_usage", usage, "--rcp_version", ruleset])
    complaints = [text.partition(", consider")[0] for level, text in output.records() if level == "ERROR"]
    if output.crash():
        complaints.append(_crashed(output))
    if not complaints and (output.code != 0 or "RCP test PASSED" not in output.text):
        complaints.append(f"does not say that the RCP test passed: {output.text.strip()[-200:]}")
    return CheckerReport("rcp_checker", _name(tree, folder), tuple(complaints))


def check_package(tree: Path, usage: Usage, ruleset: str) -> CheckerReport:
    """The package checker, on a submitter's folder."""
    output = _run(tree, "package_checker", [tree, usage, ruleset])
    crash = output.crash()
    passed = "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !" in output.text and crash is None and output.code == 0
    complaints = list(_package_complaints(output, passed))
    if crash:
        complaints.append(_crashed(output))
    if not complaints and not passed:
        complaints.append(f"does not say that it found no errors: {output.text.strip()[-200:]}")
    return CheckerReport("package_checker", tree.name, tuple(dict.fromkeys(complaints)))


def _package_complaints(output: _Output, passed: bool) -> Iterator[str]:
    """Its errors with the file or folder that they are about; findings that it tolerates if it passed are none."""
    folder = file = "submission"
    for level, text in output.records():
        if text.startswith("Running compliance checks in dir "):
            folder = file = text.removeprefix("Running compliance checks in dir ")
        elif text.startswith("Running compliance on file: "):
            file = text.removeprefix("Running compliance on file: ")
        elif text.startswith("Running Seed Checker"):
            file = folder
        elif text.startswith("Skipping benchmark"):
            yield f"results of a benchmark that the ruleset does not have were not checked: {text}"
        elif level == "ERROR":
            yield text if folder in text else f"{folder}: {text}"
        elif level == "WARNING" and file != folder and not passed:
            yield f"{file}: {' '.join(text.split())[:300]}"


def _crashed(output: _Output) -> str:
    return f"the checker died: {output.crash()}"
