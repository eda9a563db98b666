"""No garbage is collected while a graph is captured: what it frees could end the capture, or the process."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from common.step.capture import capturing


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What ``torch.cuda.graph`` was asked for, which does nothing here."""
    found: list[dict[str, object]] = []

    @contextlib.contextmanager
    def graph(graph: object, **settings: object) -> Iterator[None]:
        found.append(settings)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    return found


def test_garbage_is_collected_before_and_not_during_a_capture(seen):
    before = weakref.ref(Cycle())
    assert gc.isenabled()
    with capturing("graph", "stream", "pool"):  # type: ignore[arg-type]
        assert before() is None
        during = weakref.ref(Cycle())
        junk = [Cycle() for _ in range(10 * gc.get_threshold()[0])]
        del junk
        assert during() is not None
    assert gc.isenabled()
    assert seen == [{"pool": "pool", "stream": "stream", "capture_error_mode": "thread_local"}]


def test_a_failed_capture_gives_the_collector_back_as_it_was(seen):
    with pytest.raises(RuntimeError, match="no"), capturing("graph", "stream"):  # type: ignore[arg-type]
        raise RuntimeError("no")
    assert gc.isenabled()
    gc.disable()
    try:
        with capturing("graph", "stream"):  # type: ignore[arg-type]
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
