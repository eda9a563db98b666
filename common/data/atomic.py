"""Write files atomically: a file gets its final name only when it is complete and on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``, and rename it to ``path`` when the block succeeds.

    Creates the folder. The block must close the file, which is then flushed to the disk. If the block fails, the
    temporary file stays, and the next attempt overwrites it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def save(path: Path, array: NDArray[Any]) -> None:
    """Write ``array`` to the ``.npy`` file ``path``, atomically; see :func:`written`."""
    with written(path) as partial, open(partial, "wb") as file:
        np.save(file, array, allow_pickle=False)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to the file ``path`` in UTF-8, atomically; see :func:`written`."""
    with written(path) as partial:
        partial.write_text(text, encoding="utf-8")
