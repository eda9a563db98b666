"""Judge a submitter's folder: its files, contradictions between them, and the four MLCommons checkers.

Only regular files are opened, and the folder is never written to. We read every file before an MLCommons checker
reads a copy of it. If a file is not safe for a checker, that checker does not run, and a complaint gives the reason.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from common.errors import DataError, SuiteError
from common.mlperf.compliance import inadmissible
from common.mlperf.parsed_log import ParsedLog, read_log
from common.mlperf.rcp import has_rcps
from common.mlperf.refusals import Refusal
from common.mlperf.rules import Usage, accepted
from common.submission import layout
from common.submission.found_files import FoundFiles, find_files
from common.submission.layout import NAME, SCALING_FILE
from common.submission.mlcommons_checkers import (
    CheckerReport,
    check_convergence,
    check_names_and_sizes,
    check_package,
    check_system,
)
from common.submission.source_code import LARGEST_FILE
from common.submission.system_description import DIVISIONS, description_refusals, description_remarks, division_of
from common.submission.tree_agreement import (
    at_most,
    folder_disagreements,
    folder_remarks,
    implementation_findings,
    missing_code,
    read_object,
    repeated_runs,
    size_refusals,
)
from common.untrusted.regular_file import open_regular

PROCESSES = 2
"""Number of checkers that run at the same time."""


@dataclass(frozen=True)
class TreeCheck:
    """The result of checking a submitter's folder.

    Attributes:
        scalings: by result folder, the content of ``scaling.json`` that the package checker wrote; None if the
            package checker did not run.
    """

    reports: tuple[CheckerReport, ...]
    scalings: dict[PurePosixPath, bytes] | None

    @property
    def accepted(self) -> bool:
        """Whether every checker accepts the folder."""
        return all(report.accepted for report in self.reports)


def judge_tree(
    tree: Path, usage: Usage, ruleset: str, known: Mapping[Path, ParsedLog] | None = None, finished: bool = False
) -> TreeCheck:
    """Run every checker on a submitter's folder.

    Args:
        tree: the folder, which is never written to.
        known: logs of the folder that were already read, by path.
        finished: also check each ``scaling.json``, which a tree under construction does not have yet.

    Raises:
        DataError: the folder cannot be read.
    """
    tree = tree.resolve()
    return _TreeChecker(tree, usage, ruleset, find_files(tree), known or {}).check(finished)


def result_folders(tree: Path) -> list[Path]:
    """Return the folders with logs at ``results/<system>/<benchmark>``, in HPC also below ``strong`` or ``weak``."""
    return [tree / folder.path for folder in layout.result_folders(find_files(tree)) if folder.logs]


class _TreeChecker:
    """All checks of one submitter's folder, which share the files that were read."""

    def __init__(
        self, tree: Path, usage: Usage, ruleset: str, content: FoundFiles, known: Mapping[Path, ParsedLog]
    ) -> None:
        self._tree, self._usage, self._ruleset, self._content = tree, usage, ruleset, content
        self._folders = layout.result_folders(content)
        self._systems: dict[str, dict[str, Any]] = {}
        self._logs: dict[PurePosixPath, ParsedLog] = {}
        self._withheld: list[str] = []
        self._known = {path.resolve(): log for path, log in known.items()}

    def check(self, finished: bool) -> TreeCheck:
        reports = [self._files(), *self._descriptions(), *self._layouts()]
        self._read_logs()
        reports += self._agreement()
        if self._content.unfit or self._content.special or not NAME.fullmatch(self._tree.name):
            reports.append(self._not_run("repo_checker", "a name or a kind of file is not fit for it"))
        else:
            reports.append(check_names_and_sizes(self._tree, self._usage, self._ruleset))
        if self._withheld:
            return TreeCheck((*reports, self._not_run("package_checker", self._withheld[0])), None)
        staged, written = self._staged()
        reports += staged
        if finished:
            reports += self._scalings(written)
        return TreeCheck(tuple(reports), written)

    def _not_run(self, checker: str, reason: str) -> CheckerReport:
        return CheckerReport(checker, self._tree.name, (Refusal("checker-refuses", f"was not run: {reason}"),))

    def _named(self, name: PurePosixPath) -> str:
        return f"{self._tree.name}/{name}"

    def _files(self) -> CheckerReport:
        """Check names and file types of everything in the folder."""
        content = self._content
        special = [
            f"{self._named(path)}: {kind}: submissions hold plain files only" for path, kind in content.special.items()
        ]
        complaints = [Refusal("file-unfit", text) for text in (*content.unfit, *special)]
        complaints += [refusal.about(f"{self._tree.name}/") for refusal in layout.missing_parts(content)]
        notes = at_most(f"{self._tree.name}/{text}" for text in layout.remarks(content))
        return CheckerReport("files", self._tree.name, tuple(at_most(iter(complaints))), tuple(notes))

    def _descriptions(self) -> Iterator[CheckerReport]:
        """Read and check the system descriptions. If one is unreadable, the checkers that need a copy do not run."""
        for path in layout.descriptions(self._content):
            complaints: list[Refusal] = []
            notes: list[str] = []
            try:
                fields = read_object(self._tree / path)
            except DataError as error:
                complaints = [Refusal("description-unreadable", str(error))]
                self._withheld.append(str(error))
            else:
                self._systems[path.stem] = fields
                complaints, notes = list(description_refusals(fields)), at_most(description_remarks(fields))
            yield CheckerReport("system description", self._named(path), tuple(complaints), tuple(notes))

    def _layouts(self) -> Iterator[CheckerReport]:
        """Report result folders on which the package checker would crash, or which it would skip."""
        if not self._folders:
            text = "has no results/<system>/<benchmark> with result_<i>.txt"
            self._withheld.append(f"{self._tree.name}: {text}")
            yield CheckerReport("layout", self._tree.name, (Refusal("part-missing", text),))
        benchmarks = {folder.benchmark for folder in self._folders}
        scalings = {(folder.benchmark, folder.scaling) for folder in self._folders if folder.logs}
        for folder in self._folders:
            complaints = []
            if folder.system not in self._systems:
                present = PurePosixPath("systems", f"{folder.system}.json") in self._content.files
                problem = "is no description of a system" if present else "is missing"
                complaints.append(Refusal("description-missing", f"systems/{folder.system}.json {problem}"))
            if not accepted(folder.benchmark, self._ruleset):
                text = f"ruleset {self._ruleset} does not accept a benchmark named {folder.benchmark}"
                complaints.append(Refusal("benchmark-unknown", text))
            if self._usage == "hpc" and folder.scaling is None:
                text = f"is not in results/{folder.system}/strong or weak, where the package checker looks for it"
                complaints.append(Refusal("scaling-folder", text))
            self._withheld += [f"{self._named(folder.path)}: {text}" for text in complaints]
            missing, notes = missing_code(self._content, folder, benchmarks)
            if folder.weak and (folder.benchmark, layout.STRONG) not in scalings:
                text = f"there is no time to solution of {folder.benchmark}: results/<system>/strong/{folder.benchmark}"
                complaints.append(Refusal("throughput-alone", text))
            yield CheckerReport("layout", self._named(folder.path), (*complaints, *missing), tuple(notes))

    def _read_logs(self) -> None:
        """Read each log once, and collect the reasons why a log must not be given to the checkers."""
        for folder in self._folders:
            for name in (*folder.logs, *folder.pruned):
                path = self._tree / name
                if self._content.files.get(name, 0) > LARGEST_FILE:
                    self._withheld.append(f"{self._named(name)}: is larger than 50 MB")
                    continue
                try:
                    log = self._known.get(path) or read_log(path)
                except DataError as error:
                    self._withheld.append(str(error))
                    continue
                self._logs[name] = log
                self._withheld += [
                    f"{path}, {text}" for text in inadmissible((*log.events, *log.echoes), self._usage, self._ruleset)
                ]

    def _agreement(self) -> Iterator[CheckerReport]:
        for folder in self._folders:
            fields = self._systems.get(folder.system, {})
            logs = [self._logs[name] for name in (*folder.logs, *folder.pruned) if name in self._logs]
            found = list(implementation_findings(self._tree, self._content, folder, fields, logs))
            complaints = [
                *folder_disagreements(folder, fields, logs),
                *(size_refusals(logs, fields, f"systems/{folder.system}.json") if folder.weak else ()),
                *(Refusal("counts-differ", text) for wrong, text in found if wrong),
            ]
            notes = [*folder_remarks(folder, fields, logs), *(text for wrong, text in found if not wrong)]
            yield CheckerReport(
                "agreement", self._named(folder.path), tuple(at_most(iter(complaints))), tuple(at_most(iter(notes)))
            )
        if repeated := at_most(repeated_runs(self._logs)):
            yield CheckerReport("agreement", f"{self._tree.name}/results", tuple(repeated))

    def _staged(self) -> tuple[list[CheckerReport], dict[PurePosixPath, bytes]]:
        """Run the MLCommons checkers on a copy. Return their reports and each ``scaling.json`` that they wrote."""
        names = [PurePosixPath("systems", f"{name}.json") for name in self._systems]
        with_rcps = [
            folder
            for folder in self._folders
            if division_of(self._systems[folder.system]) == "closed" and has_rcps(folder.benchmark, self._ruleset)
        ]
        with _folder_for_copy() as target, ThreadPoolExecutor(max_workers=PROCESSES) as pool:
            copy, rules = stage(self._tree, Path(target).resolve(), [*names, *self._logs]), (self._usage, self._ruleset)
            for name, fields in self._systems.items():
                if fields.get("division") != division_of(fields) in DIVISIONS:
                    plain = fields | {"division": division_of(fields)}
                    (copy / "systems" / f"{name}.json").write_text(json.dumps(plain))
            package = pool.submit(check_package, copy, *rules)  # first, because it takes longest
            systems = [pool.submit(check_system, copy, copy / name, *rules) for name in names]
            rcps = [pool.submit(check_convergence, copy, copy / folder.path, *rules) for folder in with_rcps]
            reports = [job.result() for job in (*systems, *rcps, package)]
            return reports, scalings(copy, [folder.path for folder in self._folders])

    def _scalings(self, written: Mapping[PurePosixPath, bytes]) -> Iterator[CheckerReport]:
        for folder in self._folders:
            name = folder.path / SCALING_FILE
            if name not in self._content.files and folder.path not in written:
                continue
            factor = None if folder.path not in written else json.loads(written[folder.path])["scaling_factor"]
            if name not in self._content.files:
                text = f"is missing; the package checker writes it, with the factor {factor:.6f}, which the score has"
                yield CheckerReport("scaling", self._named(name), (), (text,))
                continue
            complaint = scaling_refusal(self._tree / name, factor)
            yield CheckerReport("scaling", self._named(name), () if complaint is None else (complaint,))


def _folder_for_copy() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="mlperf-submission-")
    except OSError as error:
        raise SuiteError(f"there is no folder for a copy of the submission: {error.strerror}") from error


def scaling_refusal(path: Path, factor: float | None) -> Refusal | None:
    """Return the fault of a ``scaling.json``, or None if it is correct.

    Args:
        factor: scaling factor that the package checker writes; None if it writes no file.
    """
    try:
        own = read_object(path)
    except DataError as error:
        return Refusal("scaling-wrong", str(error))
    stated = own.get("scaling_factor")
    if set(own) != {"scaling_factor"} or isinstance(stated, bool) or not isinstance(stated, int | float):
        return Refusal("scaling-wrong", 'is not {"scaling_factor": <number>}, as the package checker writes it')
    if factor is None:
        text = f"has the factor {stated}, but the runs' convergence is not scaled: remove it"
        return Refusal("scaling-wrong", text)
    if not math.isclose(stated, factor, rel_tol=1e-9):
        return Refusal("scaling-wrong", f"has the factor {stated}, the RCP check gives {factor}")
    return None


def stage(tree: Path, target: Path, names: Iterable[PurePosixPath]) -> Path:
    """Copy some files of a submission for the MLCommons checkers and return the folder of the copy.

    The checkers write into the folder that they check, read bypass flags from it, follow links, and build file names
    from its content. So they get a copy that has only regular files with plain names: system descriptions and logs.

    Args:
        target: an existing folder; the copy is created in it, with the name of ``tree``.
        names: files to copy, relative to ``tree``.

    Raises:
        DataError: a file is not regular, or a name is not safe for the checkers
            (:data:`common.submission.layout.NAME`).
        SuiteError: the copy cannot be written, for example because the disk is full.
    """
    copy = target / tree.name
    for name in [PurePosixPath(tree.name), *names]:
        if odd := next((part for part in name.parts if not NAME.fullmatch(part)), None):
            raise DataError(f"{tree / name}: the name {odd!a} cannot be given to the checkers: rename it")
    try:
        (copy / "results").mkdir(parents=True)
        (copy / "systems").mkdir()
        for name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            with open_regular(tree / name, follow=False) as file, (copy / name).open("xb") as written:
                shutil.copyfileobj(file, written)
    except OSError as error:
        raise SuiteError(f"{tree}: cannot be copied for the checkers: {error.strerror}") from error
    return copy


def scalings(copy: Path, folders: Iterable[PurePosixPath]) -> dict[PurePosixPath, bytes]:
    """Return the content of each ``scaling.json`` that the package checker wrote into a copy, by result folder."""
    written = {}
    for folder in folders:
        path = copy / folder / SCALING_FILE
        if path.is_file():
            written[folder] = path.read_bytes()
    return written
