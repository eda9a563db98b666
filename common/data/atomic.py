"""Files that have their names only when they are complete and on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Make a file, and its folder if need be: the block writes to the name beside ``path`` that it is given.

    When the block ends well, with the file closed, the file is flushed to the disk and renamed. What a block has
    written that fails stays under the name beside ``path``, where the next attempt writes over it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def write_text(path: Path, text: str) -> None:
    """Make the file ``path`` of ``text`` in UTF-8; see :func:`written`."""
    with written(path) as partial:
        partial.write_text(text, encoding="utf-8")
