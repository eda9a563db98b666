"""Positions of the members of samples in a tar, in the layout of WebDataset: ``KEY.SUFFIX`` for each member."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.formats.raw_files import data_members, listed

_NAMED = 3  # largest number of samples named in a message


def numbered_tars(folder: Path, name: str) -> list[Path]:
    """Return the tars of a folder whose names are ``name`` with the numbers 0, 1, ..., in order.

    Args:
        name: a format with one field, such as ``shard_{:06d}.tar``.

    Raises:
        DataError: a number is missing, or another name has the same beginning.
    """
    tars = listed(folder, f"{name.partition('{')[0]}*.tar")
    for number, path in enumerate(tars):
        if path.name != (wanted := name.format(number)):
            raise DataError(f"{folder} has {path.name} where {wanted} belongs: a tar is missing or foreign")
    return tars


def index_tar(path: Path, suffixes: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Return the keys of a tar's samples and the positions of their members; this reads only the tar's headers.

    Args:
        path: file of the tar. Folders in it, and members with other suffixes, are ignored.
        suffixes: what follows the first dot in the names of the members that every sample must have.

    Returns:
        Keys of S samples in the order of the tar, and (S, len(suffixes), 2): offset and size of each member, in bytes.

    Raises:
        DataError: the tar is missing, truncated, damaged or empty, or a sample has none or two of a member.
    """
    columns = {suffix: column for column, suffix in enumerate(suffixes)}
    rows: dict[str, list[tuple[int, int] | None]] = {}
    try:
        with open(path, "rb") as file:
            for name, offset, size in data_members(file, path):
                key, _, suffix = name.partition(".")
                row = rows.setdefault(key, [None] * len(columns))
                if (column := columns.get(suffix)) is None:
                    continue
                if row[column] is not None:
                    raise DataError(f"{path} has {name} twice")
                row[column] = (offset, size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not rows:
        raise DataError(f"{path} has no samples; fetch it again")
    for suffix, column in columns.items():
        lacking = [key for key, row in rows.items() if row[column] is None]
        if lacking:
            named = ", ".join(lacking[:_NAMED])
            raise DataError(
                f"{path}: {len(lacking)} of {len(rows)} samples have no .{suffix}: {named}; fetch the tar again"
            )
    return list(rows), np.array(list(rows.values()), np.int64)


def decode_text(content: bytes, name: str) -> str:
    """Return the text of a member, such as a caption.

    Args:
        name: name of the member, for messages.

    Raises:
        DataError: the content is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is no UTF-8: {error}") from error
