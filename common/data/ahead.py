"""Work that is begun before it is wanted, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

Begun = TypeVar("Begun")


def ahead(begun: Iterator[Begun], window: int, abandon: Callable[[Begun], object]) -> Iterator[Begun]:
    """Hand on what ``begun`` yields, in its order, with ``window`` more of it begun.

    Args:
        begun: begins a piece of work with every step.
        window: pieces that are on their way beside the one that is handed on.
        abandon: ends a piece that nobody will want, when the iteration ends early.
    """
    pending: deque[Begun] = deque()
    try:
        for piece in begun:
            pending.append(piece)
            if len(pending) > window:
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        for piece in pending:
            abandon(piece)
