"""Which mutations a session runs: a fixed sample, or with ``-m slow`` thousands, or the one that is named.

``MUTATIONS_SEED`` draws others of these, ``MUTATIONS_COUNT`` more or fewer for each test and benchmark, and
``MUTATION="resnet: line 12 (seed) value is NaN"`` takes the one of this name alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pytest
from mutations import Mutation, drawn

SEED = int(os.environ.get("MUTATIONS_SEED", "0"))
SAMPLE_SEED = 0


class Case(NamedTuple):
    """A mutation of a valid file of one benchmark."""

    benchmark: str
    mutation: Mutation

    @property
    def name(self) -> str:
        """What ``MUTATION`` takes."""
        return f"{self.benchmark}: {self.mutation.name}"


def wants_every_case(config: pytest.Config) -> bool:
    """Whether the session asks for the slow tests."""
    expression = str(config.getoption("markexpr", ""))
    return "slow" in expression and "not slow" not in expression


def parametrize(
    metafunc: pytest.Metafunc,
    benchmarks: Sequence[str],
    mutations: Callable[[str], Iterable[Mutation]],
    sample: int,
    many: int,
) -> None:
    """Give a test with the argument ``case`` its mutations: ``sample`` or ``many`` of each benchmark."""
    named = os.environ.get("MUTATION")
    large = wants_every_case(metafunc.config)
    count = int(os.environ.get("MUTATIONS_COUNT", many)) if large else sample
    cases = []
    for number, benchmark in enumerate(benchmarks):
        if named is not None:
            found = [each for each in mutations(benchmark) if Case(benchmark, each).name == named]
        else:
            seed = (SEED if large else SAMPLE_SEED) + number
            found = drawn(mutations(benchmark), count, seed)
        cases += [Case(benchmark, each) for each in found]
    marks = [pytest.mark.slow] if large else []
    metafunc.parametrize("case", [pytest.param(case, id=case.name, marks=marks) for case in cases])


def require(case: Case, wrong: Sequence[str]) -> None:
    """Fail with what went wrong and how to see it again."""
    if wrong:
        again = f'MUTATION="{case.name}"'
        pytest.fail("\n  ".join([f"{case.name} (seed {SEED}; again with {again}):", *wrong]), pytrace=False)
