"""Valid series of four benchmarks, for tests that enumerate mutations before any fixture exists."""

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
"""Function that returns the facts of the undamaged files of a benchmark."""


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="undamaged-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def series(benchmark: str) -> Path:
    """A folder with an undamaged series of exactly N runs; do not change it."""
    return write_series(_root() / benchmark, benchmark, COMMIT)


@cache
def log_text(benchmark: str) -> str:
    """The log of :data:`EXPERIMENT`."""
    return log_of(series(benchmark), EXPERIMENT).read_text()


@cache
def registry_text(benchmark: str) -> str:
    """``runs.jsonl``."""
    return (series(benchmark) / "runs.jsonl").read_text()


def copied_series(workplace: Workplace, benchmark: str) -> Path:
    """Return a copy of the series, alone in the folder that is read."""
    workplace.clear()
    return Path(shutil.copytree(series(benchmark), workplace.read / "results"))


def facts_of_series(workplace: Workplace) -> Baseline:
    """Return a function that returns the facts of a benchmark's undamaged series, determined once."""

    @cache
    def find(benchmark: str) -> Facts:
        outcome = workplace.observe([copied_series(workplace, benchmark)])
        assert outcome.facts is not None, outcome.messages
        assert outcome.facts.codes == (0, 0), outcome.messages
        return outcome.facts

    return find
