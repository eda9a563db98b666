"""Copy a submission for the MLCommons checkers.

The checkers write into the folder that they check, read bypass flags from it, follow links, and build file names from
its content. So they get a copy that has only regular files with plain names: system descriptions and logs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from common.errors import DataError, SuiteError
from common.submission.layout import NAME, SCALING_FILE
from common.untrusted.regular_file import open_regular


def stage(tree: Path, target: Path, names: Iterable[PurePosixPath]) -> Path:
    """Copy some files of a submission and return the folder of the copy.

    Args:
        tree: the submitter's folder.
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
