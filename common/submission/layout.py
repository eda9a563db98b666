"""Which files of a submitter's folder are which: descriptions of systems, results, code; and what is none of them.

The layout is that of :mod:`common.submission.tree`. Of results outside of it the checkers say nothing at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.mlperf.refusals import Refusal
from common.submission.found_files import FoundFiles
from common.submission.sources import RESULT

PARTS = {
    "results": "the logs results/<system>/<benchmark>/result_<i>.txt",
    "systems": "the descriptions systems/<system>.json",
}
"""Folders that every submission has, and what is in them."""
SCALINGS = ("strong", "weak")
"""Folders between system and benchmark in results of the HPC rounds."""
SCALING_FILE = "scaling.json"
BYPASS_FILE = "package_checker_params"

NAME = re.compile(r"\w[\w.+=@,()#~&%'!:-]*")
"""Names that the checkers are given: nothing that a pattern, a path or a terminal takes for something else."""
_LOGS = "result_*.txt"
_ELSEWHERE = ("power", "pruned_results")
"""Folders that the rules have within a benchmark's, and no checker here judges."""


@dataclass(frozen=True)
class ResultFolder:
    """The runs of one benchmark on one system.

    Attributes:
        path: relative to the submitter's folder.
        system, benchmark: names of folders.
        logs: ``result_<i>.txt``, relative to the submitter's folder.
    """

    path: PurePosixPath
    system: str
    benchmark: str
    logs: tuple[PurePosixPath, ...]

    @property
    def weak(self) -> bool:
        """Whether these are runs beside each other, on parts of the system."""
        return self.path.parts[2] == "weak"


def result_folders(content: FoundFiles) -> list[ResultFolder]:
    """The folders of results: ``results/<system>/<benchmark>``, in HPC with ``strong`` or ``weak`` between."""
    return [
        ResultFolder(path, path.parts[1], path.name, tuple(each for each in content.within(path) if _is_log(each)))
        for path in content.folders
        if _is_result_folder(path)
    ]


def has_layout(results: Path) -> bool:
    """Whether a folder has logs where a submission has them, below ``<system>/<benchmark>``; links are followed."""
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
    """The files ``systems/<system>.json``."""
    return [path for path in content.within(PurePosixPath("systems")) if path.suffix == ".json"]


def missing_parts(content: FoundFiles) -> Iterator[Refusal]:
    """Yield ``results`` and ``systems`` where they are missing or files; ``special`` names links and pipes."""
    for name, purpose in PARTS.items():
        path = PurePosixPath(name)
        if path not in content.folders and path not in content.special:
            kind = "is a file" if path in content.files else "is missing"
            yield Refusal("part-missing", f"{name} {kind}: a submission has a folder of this name, with {purpose}")


def remarks(content: FoundFiles) -> Iterator[str]:
    """Files in ``results`` that are not judged, which forbids nothing: no result depends on them."""
    known = {folder.path for folder in result_folders(content)}
    for path in content.files:
        if path.name == BYPASS_FILE:
            yield f"{path}: was left out: no check is bypassed here"
        elif path.parts[0] != "results" or (path.parent in known and (_is_log(path) or path.name == SCALING_FILE)):
            continue
        elif not _is_log(path):
            yield f"{path}: is neither a log nor {SCALING_FILE}: nothing looks at it"
        elif not set(path.parts[:-1]) & set(_ELSEWHERE):
            yield (
                f"{path}: is not judged and belongs to no result: results are in "
                "results/<system>/<benchmark>/result_<i>.txt"
            )
