"""Damaged logs of four benchmarks, in a series with its registry and alone.

What must hold: :mod:`oracle`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from closed_logs import RECIPES
from launched import log_of
from mutated_lines import log_mutations
from mutations import Mutation, parametrize, require, wants_every_case
from oracle import Facts, Workplace, faults, unearned
from undamaged import EXPERIMENT, Baseline, copied_series, facts_of_series, log_text

LOG = "node.log"
COUNTS = {"test_log_in_a_series": (6, 400), "test_log_alone": (20, 1000)}
"""Number of mutations of each benchmark for each test, in a sample and in ``make test-all``."""
SLOW_SERIES = ("unet3d",)
"""Benchmarks whose series have 40 runs and are judged only in ``make test-all``."""

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
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def before_in_a_series(workplace: Workplace) -> Baseline:
    return facts_of_series(workplace)


@pytest.fixture(scope="module")
def before_alone(workplace: Workplace) -> Baseline:
    """A function that returns the facts of the undamaged log of a benchmark."""

    @cache
    def find(benchmark: str) -> Facts:
        outcome = workplace.observe([_log(workplace, benchmark)])
        assert outcome.facts is not None, outcome.messages
        assert outcome.facts.verdicts == ("VALID RUN",), outcome.messages
        return outcome.facts

    return find


def _log(workplace: Workplace, benchmark: str) -> Path:
    """Return a copy of one log, alone in the folder that is read."""
    workplace.clear()
    path = workplace.read / "run" / LOG
    path.parent.mkdir()
    path.write_text(log_text(benchmark))
    return path


def test_log_in_a_series(case, workplace, before_in_a_series):
    before = before_in_a_series(case.benchmark)
    results = copied_series(workplace, case.benchmark)
    log = log_of(results, EXPERIMENT)
    case.mutation.apply(log)
    require(case, faults(before, workplace.observe([results]), log.name, case.mutation.line))


def test_log_alone(case, workplace, before_alone):
    before = before_alone(case.benchmark)
    log = _log(workplace, case.benchmark)
    case.mutation.apply(log)
    require(case, unearned(before, workplace.observe([log]), LOG, case.mutation.line))
