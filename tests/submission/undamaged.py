"""Valid series of four benchmarks for tests that enumerate what can be damaged before any fixture exists."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from launched import log_of, write_series
from oracle import Facts, Workplace

COMMIT = "0123456789" * 4
EXPERIMENT = 2
"""The experiment whose log is damaged."""


Baseline = Callable[[str], Facts]
"""From a benchmark to what is known of it undamaged."""


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="undamaged-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def series(benchmark: str) -> Path:
    """A folder with an undamaged series of exactly N runs, which nobody may change."""
    return write_series(_root() / benchmark, benchmark, COMMIT)


@cache
def log_text(benchmark: str) -> str:
    """The log of :data:`EXPERIMENT`."""
    return log_of(series(benchmark), EXPERIMENT).read_text()


@cache
def registry_text(benchmark: str) -> str:
    """``runs.jsonl``."""
    return (series(benchmark) / "runs.jsonl").read_text()


def copied_series(place: Workplace, benchmark: str) -> Path:
    """A copy of the series alone in the folder that is read."""
    place.clear()
    return Path(shutil.copytree(series(benchmark), place.read / "results"))


def facts_of_series(place: Workplace) -> Baseline:
    """A function from a benchmark to the facts of its undamaged series, found out once."""

    @cache
    def find(benchmark: str) -> Facts:
        outcome = place.observe([copied_series(place, benchmark)])
        assert outcome.facts is not None, outcome.messages
        assert outcome.facts.codes == (0, 0), outcome.messages
        return outcome.facts

    return find
