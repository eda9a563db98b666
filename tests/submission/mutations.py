"""Mutations that damage a valid file, each with a name, and the choice of those that a session runs.

A session runs a fixed sample, or thousands with ``-m slow``. Environment variables: ``MUTATIONS_SEED`` draws others of
these, ``MUTATIONS_COUNT`` changes their number for each test and benchmark, and
``MUTATION="resnet: line 12 (seed) value is NaN"`` runs only the one of this name.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

T = TypeVar("T")


@dataclass(frozen=True)
class Mutation:
    """One change of one file.

    Attributes:
        place: changed part, such as ``line 12 (seed) value``.
        operator: change, such as ``is NaN``.
        apply: changes the file at a path.
        line: number of the damaged line, which a refusal must name; None if the name of the file is enough.
        large: whether the file is so large that a process of its own reads it, whose memory is measured.
    """

    place: str
    operator: str
    apply: Callable[[Path], None]
    line: int | None = None
    large: bool = False

    @property
    def name(self) -> str:
        """The place and the operator."""
        return f"{self.place} {self.operator}"


def drawn(cases: Iterable[T], count: int, seed: int, kind: Callable[[T], str] = attrgetter("operator")) -> list[T]:
    """Return up to ``count`` cases: one of each kind in turn, the same for the same seed."""
    draw = random.Random(seed)
    by_kind: dict[str, list[T]] = {}
    for case in cases:
        by_kind.setdefault(kind(case), []).append(case)
    queues = [by_kind[name] for name in sorted(by_kind)]
    draw.shuffle(queues)
    for queue in queues:
        draw.shuffle(queue)
    found: list[T] = []
    while len(found) < count and any(queues):
        found += [queue.pop() for queue in queues if queue]
    return found[:count]


SEED = int(os.environ.get("MUTATIONS_SEED", "0"))
SAMPLE_SEED = 0


class Case(NamedTuple):
    """A mutation of a valid file of one benchmark."""

    benchmark: str
    mutation: Mutation

    @property
    def name(self) -> str:
        """Value of ``MUTATION`` that selects this case."""
        return f"{self.benchmark}: {self.mutation.name}"


def wants_every_case(config: pytest.Config) -> bool:
    """Whether the session runs the slow tests."""
    expression = str(config.getoption("markexpr", ""))
    return "slow" in expression and "not slow" not in expression


def parametrize(
    metafunc: pytest.Metafunc,
    benchmarks: Sequence[str],
    mutations: Callable[[str], Iterable[Mutation]],
    sample: int,
    many: int,
) -> None:
    """Parametrize the argument ``case``: ``sample`` or, in slow sessions, ``many`` mutations of each benchmark."""
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
    """Fail if ``wrong`` has messages; say how to run the case again."""
    if wrong:
        again = f'MUTATION="{case.name}"'
        pytest.fail("\n  ".join([f"{case.name} (seed {SEED}; again with {again}):", *wrong]), pytrace=False)
