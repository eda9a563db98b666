"""Classes of OpenImages-MLPerf: the leaf classes of OpenImages' hierarchy with at least 1,000 boxes.

``classes.txt`` has their names in the order of the reference's list. The index in this list, from 0, is the class id.
"""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def class_names() -> tuple[str, ...]:
    """Return the names of all classes, in the order of their ids."""
    return tuple(Path(__file__).with_name("classes.txt").read_text(encoding="utf-8").splitlines())
