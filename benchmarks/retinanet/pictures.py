"""Files of pictures on their way from the raw to the prepared folder, and what is noted of each."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from common.data.placing import place
from common.errors import DataError
from common.formats.jpeg import checked_size
from common.untrusted.regular_file import read_bytes

PICTURE_BYTES = 2**28
"""Of a picture: OpenImages' have less than 30 MB."""


def place_pictures(raw_folder: Path, folder: Path, names: list[str], trust: bool) -> dict[str, Any]:
    """Bring pictures from ``raw_folder`` to ``folder``, their bytes unchanged; with ``trust`` they are not decoded.

    Returns:
        ``width`` and ``height`` (px), ``bytes``, and ``sha256`` (hexadecimal) of each.

    Raises:
        DataError: one is no JPEG or cut off, or ``folder`` has another of its name.
    """
    noted: dict[str, Any] = {"width": [], "height": [], "bytes": [], "sha256": []}
    for name in names:
        path = raw_folder / name
        data = read_bytes(path, PICTURE_BYTES)
        try:
            width, height = checked_size(data, trust)
        except ValueError as error:
            raise DataError(f"{path}: no whole JPEG: {error}; delete it and download it again") from error
        place(path, folder / name, "delete it and prepare again")
        entry = (width, height, len(data), hashlib.sha256(data).hexdigest())
        for column, value in zip(noted.values(), entry, strict=True):
            column.append(value)
    return noted
