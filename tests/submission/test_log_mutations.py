"""Logs of four benchmarks, damaged in every way that :mod:`mutations` knows, in a series with its registry and alone.

Which of them a session runs: :mod:`drawing`. What must hold: :mod:`oracle`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from closed_logs import RECIPES
from drawing import Case, parametrize, require, wants_every_case
from launched import log_of
from mutations import Mutation, log_mutations
from oracle import Facts, Workplace, faults, unearned
from undamaged import EXPERIMENT, Baseline, copied_series, facts_of_series, log_text

LOG = "node.log"
COUNTS = {"test_log_in_a_series": (6, 400), "test_log_alone": (20, 1000)}
"""Test to the mutations of each benchmark in a sample and in ``make test-all``."""
SLOW_SERIES = ("unet3d",)
"""Benchmarks whose series, of 40 runs, are judged in ``make test-all`` only."""

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("answers")]


@cache
def mutations_of(benchmark: str) -> tuple[Mutation, ...]:
    return tuple(log_mutations(log_text(benchmark)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        slow = () if wants_every_case(metafunc.config) or "series" not in metafunc.function.__name__ else SLOW_SERIES
        benchmarks = [benchmark for benchmark in RECIPES if benchmark not in slow]
        parametrize(metafunc, benchmarks, mutations_of, *COUNTS[metafunc.function.__name__])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def before_in_a_series(place: Workplace) -> Baseline:
    return facts_of_series(place)


@pytest.fixture(scope="module")
def before_alone(place: Workplace) -> Baseline:
    """A function from a benchmark to the facts of its undamaged log."""

    @cache
    def find(benchmark: str) -> Facts:
        outcome = place.observe([_log(place, benchmark)])
        assert outcome.facts is not None, outcome.messages
        assert outcome.facts.verdicts == ("VALID RUN",), outcome.messages
        return outcome.facts

    return find


def _log(place: Workplace, benchmark: str) -> Path:
    """A copy of one log alone in the folder that is read."""
    place.clear()
    path = place.read / "run" / LOG
    path.parent.mkdir()
    path.write_text(log_text(benchmark))
    return path


def test_log_in_a_series(case: Case, place: Workplace, before_in_a_series: Baseline) -> None:
    before = before_in_a_series(case.benchmark)
    results = copied_series(place, case.benchmark)
    log = log_of(results, EXPERIMENT)
    case.mutation.apply(log)
    require(case, faults(before, place.observe([results]), log.name, case.mutation.line))


def test_log_alone(case: Case, place: Workplace, before_alone: Baseline) -> None:
    before = before_alone(case.benchmark)
    log = _log(place, case.benchmark)
    case.mutation.apply(log)
    require(case, unearned(before, place.observe([log]), LOG, case.mutation.line))
