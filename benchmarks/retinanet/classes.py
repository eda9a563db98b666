"""The classes of OpenImages-MLPerf: the leaf classes of OpenImages' hierarchy with 1,000 boxes or more.

``classes.txt`` has their names in the order of the reference's list. A class is known by its place, from 0.
"""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def class_names() -> tuple[str, ...]:
    """The names of all classes, in their order."""
    return tuple(Path(__file__).with_name("classes.txt").read_text(encoding="utf-8").splitlines())
