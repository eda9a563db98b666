"""Recognise the files of a submitter's folder: system descriptions, result folders, and files that nothing reads.

:mod:`common.submission.tree` shows the layout. The MLCommons checkers silently ignore results outside of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.mlperf.refusals import Refusal
from common.submission.found_files import FoundFiles
from common.submission.run_sets import PRUNED, RESULT, WEAK

PARTS = {
    "results": "the logs results/<system>/<benchmark>/result_<i>.txt",
    "systems": "the descriptions systems/<system>.json",
}
"""Folders that every submission has, with their content as a phrase for messages."""
STRONG = "strong"
SCALINGS = (STRONG, WEAK)
"""Folders between system and benchmark in HPC results: of times to solution, and of throughput."""
SCALING_FILE = "scaling.json"
BYPASS_FILE = "package_checker_params"

NAME = re.compile(r"\w[\w.+=@,()#~&%'!:-]*")
"""Names that are safe for the checkers: no character has a special meaning in glob patterns, paths or terminals."""
_LOGS = "result_*.txt"
_ELSEWHERE = "power"
"""Subfolder of a benchmark folder that the rules allow and that no checker here judges."""


@dataclass(frozen=True)
class ResultFolder:
    """The runs of one benchmark on one system.

    Attributes:
        path: path relative to the submitter's folder.
        logs: files ``result_<i>.txt``, relative to the submitter's folder.
        pruned: such files of instances that do not count in a throughput result.
    """

    path: PurePosixPath
    system: str
    benchmark: str
    logs: tuple[PurePosixPath, ...]
    pruned: tuple[PurePosixPath, ...]

    @property
    def scaling(self) -> str | None:
        """The folder between system and benchmark: one of :data:`SCALINGS`, or None."""
        return self.path.parts[2] if len(self.path.parts) > len(("results", self.system, self.benchmark)) else None

    @property
    def weak(self) -> bool:
        """Whether this is a throughput result: many runs at the same time, each on a part of the system."""
        return self.scaling == WEAK


def result_folders(content: FoundFiles) -> list[ResultFolder]:
    """Return all folders ``results/<system>/<benchmark>``, or ``results/<system>/{strong,weak}/<benchmark>`` (HPC)."""
    return [
        ResultFolder(path, path.parts[1], path.name, _logs_in(content, path), _pruned_in(content, path))
        for path in content.folders
        if _is_result_folder(path)
    ]


def _logs_in(content: FoundFiles, folder: PurePosixPath) -> tuple[PurePosixPath, ...]:
    return tuple(each for each in content.within(folder) if _is_log(each))


def _pruned_in(content: FoundFiles, folder: PurePosixPath) -> tuple[PurePosixPath, ...]:
    return _logs_in(content, folder / PRUNED) if folder.parts[2] == WEAK else ()


def has_layout(results: Path) -> bool:
    """Return whether a folder ``results`` has logs where a submission has them. Links are followed."""
    folders = (results.glob(f"*/{between}*/{_LOGS}") for between in ("", *(f"{name}/" for name in SCALINGS)))
    return any(RESULT.fullmatch(path.name) for found in folders for path in found)


def _is_result_folder(path: PurePosixPath) -> bool:
    if path.parts[0] != "results" or len(path.parts) not in (3, 4):
        return False
    between = path.parts[2] in SCALINGS
    return between == (len(path.parts) == 4)


def _is_log(path: PurePosixPath) -> bool:
    return RESULT.fullmatch(path.name) is not None


def descriptions(content: FoundFiles) -> list[PurePosixPath]:
    """Return the paths ``systems/<system>.json``."""
    return [path for path in content.within(PurePosixPath("systems")) if path.suffix == ".json"]


def missing_parts(content: FoundFiles) -> Iterator[Refusal]:
    """Yield a refusal if ``results`` or ``systems`` is missing or a file. The caller reports ``content.special``."""
    for name, purpose in PARTS.items():
        path = PurePosixPath(name)
        if path not in content.folders and path not in content.special:
            kind = "is a file" if path in content.files else "is missing"
            yield Refusal("part-missing", f"{name} {kind}: a submission has a folder of this name, with {purpose}")


def remarks(content: FoundFiles) -> Iterator[str]:
    """Yield notes on files that are not judged. They do not forbid anything, because no result depends on them."""
    judged = {
        path
        for folder in result_folders(content)
        for path in (*folder.logs, *folder.pruned, folder.path / SCALING_FILE)
    }
    for path in content.files:
        if path.name == BYPASS_FILE:
            yield f"{path}: was left out: no check is bypassed here"
        elif path.parts[0] != "results" or path in judged:
            continue
        elif not _is_log(path):
            yield f"{path}: is neither a log nor {SCALING_FILE}: nothing looks at it"
        elif _ELSEWHERE not in path.parts[:-1]:
            yield (
                f"{path}: is not judged and belongs to no result: results are in "
                "results/<system>/<benchmark>/result_<i>.txt"
            )
