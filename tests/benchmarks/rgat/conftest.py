"""What several files of R-GAT's tests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.benchmarks.rgat.store_ranks import ranks_found


@pytest.fixture(scope="session")
def store_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """A function from a number of ranks to what each has found of features and graph, started once a session."""
    made: dict[int, list[dict[str, Any]]] = {}

    def find(world: int) -> list[dict[str, Any]]:
        if world not in made:
            made[world] = ranks_found(world, tmp_path_factory.mktemp(f"stores{world}"))
        return made[world]

    return find
