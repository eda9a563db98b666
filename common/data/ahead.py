"""Lookahead for an iterator whose steps start asynchronous work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

Begun = TypeVar("Begun")


def ahead(begun: Iterator[Begun], window: int, abandon: Callable[[Begun], object]) -> Iterator[Begun]:
    """Yield the items of ``begun`` in order, while the work of the next ``window`` items is already started.

    Args:
        begun: starts one piece of work per step, such as a future.
        window: number of pieces in progress in addition to the one that is yielded.
        abandon: cancels a piece that was started but not yielded, when the iteration ends early.
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
