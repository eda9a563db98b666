"""Run the four MLCommons checkers, each in a separate process, and parse their output.

Exit codes are not reliable: the package, system description and repository checkers always exit with 0, and the first
two crash with a traceback on unexpected input. So a checker accepts only if it prints its sentence of success and no
complaint.

The repository checker reads names and sizes only and runs on the original folder. The others run on a copy
(:func:`common.submission.checkers.stage`), because the package checker writes files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import printable
from common.mlperf.refusals import Refusal
from common.mlperf.rules import Usage, version_key
from common.untrusted.confined import run_confined

SECONDS = 600.0
"""Time limit of a checker in seconds. For 500 logs it needs about 20."""
_RECORD = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) - ?", re.MULTILINE)
_OLDEST_OF_THE_REPOSITORY_CHECKER = "2.0.0"


@dataclass(frozen=True)
class CheckerReport:
    """The report of one checker on one file or folder.

    Attributes:
        subject: file or folder, relative to the parent of the submitter's folder.
        complaints: reasons why the checker does not accept; empty if it accepts.
        notes: information that does not change the verdict.
    """

    checker: str
    subject: str
    complaints: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether the checker accepts the subject."""
        return not self.complaints


def format_report(report: CheckerReport) -> str:
    """Return a report as text for humans."""
    headline = f"{report.checker}: {report.subject}: {'accepted' if report.accepted else 'NOT ACCEPTED'}"
    lines = [f"  - {complaint}" for complaint in report.complaints] + [f"  note: {note}" for note in report.notes]
    return "\n".join(printable(line) for line in [headline, *lines])


@dataclass(frozen=True)
class CheckerOutput:
    """The exit code and output of a checker.

    Attributes:
        text: output, in which paths are relative to the parent of the submitter's folder.
        stopped: reason why we stopped the checker; empty if it ended by itself.
    """

    code: int
    text: str
    stopped: str = ""

    def records(self) -> Iterator[tuple[str, str]]:
        """Yield level and text of each log record. A record can have several lines."""
        found = list(_RECORD.finditer(self.text))
        ends = [*(match.start() for match in found), len(self.text)][1:]
        for match, end in zip(found, ends, strict=True):
            yield match[1], self.text[match.end() : end].partition("Traceback (most recent")[0].strip()

    def crash(self) -> str | None:
        """Return why the checker crashed or was stopped, or None if it finished."""
        if self.stopped:
            return f"the checker gave no answer: {self.stopped}"
        if "Traceback (most recent call last)" not in self.text:
            return None
        return f"the checker crashed: {self.text.strip().splitlines()[-1][:300]}"

    def says(self, sentence: str) -> bool:
        """Return whether the checker finished with exit code 0 and printed ``sentence``."""
        return self.code == 0 and self.crash() is None and sentence in self.text


def _run(tree: Path, module: str, arguments: Sequence[str | Path], folder: Path | None = None) -> CheckerOutput:
    plain = [str(each) for each in arguments]
    plain += ["--log_output", "checker.log"]
    ended = run_confined(module, plain, readable=[tree], seconds=SECONDS, folder=folder)
    return CheckerOutput(ended.code, ended.text.replace(f"{tree.parent}/", ""), ended.stopped)


def _name(tree: Path, path: Path) -> str:
    return str(path.relative_to(tree.parent))


def _no_success(output: CheckerOutput, what: str) -> str:
    return f"does not say that {what}: {output.text.strip()[-200:]}"


def _refusals(complaints: Iterable[str]) -> tuple[Refusal, ...]:
    return tuple(Refusal("checker-refuses", text) for text in dict.fromkeys(complaints))


def check_names_and_sizes(tree: Path, usage: Usage, ruleset: str) -> CheckerReport:
    """Run the repository checker on a submitter's folder."""
    # The checker accepts versions from 2.0.0 on. Its rules are the same in every version.
    known = max(ruleset, _OLDEST_OF_THE_REPOSITORY_CHECKER, key=version_key)
    tree = tree.resolve()
    output = _run(tree, "repo_checker", [tree, usage, known])
    complaints = [] if (crash := output.crash()) is None else [crash]
    for level, text in output.records():
        if level == "ERROR" and not text.startswith("Please"):
            title, _, files = text.partition(": ")
            complaints += [f"{name.strip()}: {_repository_words(title)}" for name in files.splitlines()]
    if not complaints and not output.says("ALL CHECKS PASSED"):
        complaints.append(_no_success(output, "all checks passed"))
    return CheckerReport("repo_checker", tree.name, _refusals(complaints))


def _repository_words(title: str) -> str:
    if "git-unfriendly" in title:
        return "the name has a space or begins with a dot"
    return "is larger than 50 MB" if "50MB" in title else title


def check_system(tree: Path, path: Path, usage: Usage, ruleset: str) -> CheckerReport:
    """Run the system description checker on one file of ``systems/`` in the submitter's folder ``tree``."""
    output = _run(tree, "system_desc_checker", [path, usage, ruleset])
    complaints = [text for level, text in output.records() if level == "ERROR"]
    if crash := output.crash():
        complaints.append(crash)
    if not complaints and not output.says("System description checker passed"):
        complaints.append(_no_success(output, "it passed"))
    return CheckerReport("system_desc_checker", _name(tree, path), _refusals(complaints))


def check_convergence(tree: Path, folder: Path, usage: Usage, ruleset: str) -> CheckerReport:
    """Run the RCP checker on the result folder ``folder``, which is below the submitter's folder ``tree``."""
    output = _run(tree, "rcp_checker", [folder, "--rcp_usage", usage, "--rcp_version", ruleset])
    complaints = [text.partition(", consider")[0] for level, text in output.records() if level == "ERROR"]
    if crash := output.crash():
        complaints.append(crash)
    if not complaints and not output.says("RCP test PASSED"):
        complaints.append(_no_success(output, "the RCP test passed"))
    return CheckerReport("rcp_checker", _name(tree, folder), _refusals(complaints))


def check_package(tree: Path, usage: Usage, ruleset: str) -> CheckerReport:
    """Run the package checker on a copy of a submitter's folder.

    Args:
        tree: the copy. The checker writes ``scaling.json`` files into it, and may write anywhere in its parent folder.
    """
    output = _run(tree, "package_checker", [tree, usage, ruleset], folder=tree.parent)
    passed = output.says("PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !")
    complaints = list(_package_complaints(output))
    if crash := output.crash():
        complaints.append(crash)
    if not complaints and not passed:
        complaints.append(_no_success(output, "it found no errors"))
    return CheckerReport("package_checker", tree.name, _refusals(complaints))


def _package_complaints(output: CheckerOutput) -> Iterator[str]:
    """Yield errors of the package checker, each with its file or folder.

    Warnings about single files count only if the checker rejects their folder because of its files, or crashes.
    """
    folder = file = "submission"
    of_files: list[str] = []
    for level, text in output.records():
        if text.startswith("Running compliance checks in dir "):
            folder = file = text.removeprefix("Running compliance checks in dir ")
            of_files = []
        elif text.startswith("Running compliance on file: "):
            file = text.removeprefix("Running compliance on file: ")
        elif text.startswith("Running Seed Checker"):
            file = folder
        elif text.startswith("Skipping benchmark"):
            yield f"results of a benchmark that the ruleset does not have were not checked: {text}"
        elif level == "ERROR":
            if "files do not comply" in text:
                yield from of_files
            yield text if folder in text else f"{folder}: {text}"
        elif level == "WARNING" and file != folder:
            of_files.append(f"{file}: {' '.join(text.split())[:300]}")
    if output.crash():
        yield from of_files
