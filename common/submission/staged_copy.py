"""What MLCommons' checkers are shown of a submission: a copy of what was read before and is fit for them.

They write into the folder that they check, take bypass flags out of it, follow links and build names of files from its
content. The copy has regular files with plain names only: descriptions of systems, and logs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from common.errors import DataError, SuiteError
from common.submission.layout import NAME, SCALING_FILE
from common.untrusted.regular_file import open_regular


def stage(tree: Path, target: Path, names: Iterable[PurePosixPath]) -> Path:
    """Copy some files of a submission.

    Args:
        tree: the submitter's folder.
        target: an existing folder; the copy is made in it under the submitter's name.
        names: of the files, relative to ``tree``.

    Returns:
        the copy.

    Raises:
        DataError: a file is no regular one, or a name is none that the checkers may be given.
        SuiteError: there is no room for the copy.
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
    """The ``scaling.json`` that the package checker wrote into a copy: folder of results to content."""
    written = {}
    for folder in folders:
        path = copy / folder / SCALING_FILE
        if path.is_file():
            written[folder] = path.read_bytes()
    return written
