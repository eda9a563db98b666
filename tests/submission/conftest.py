"""Results, repositories and accepted trees that the tests copy and break."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import (
    SYSTEM,
    Clone,
    make_repository,
    package_arguments,
    submission,
    write_series,
    write_submission,
)
from oracle import kept_answers

from common.mlperf.checker_process import one_checker_process
from common.submission import mlcommons_checkers
from common.submission.package import main
from common.untrusted.confined import ConfinedResult


@pytest.fixture(scope="session", autouse=True)
def checker() -> Iterator[None]:
    """One process of MLCommons' checkers for all tests, because its imports take a second."""
    with one_checker_process() as process:
        process.ask("reference", benchmark="resnet", ruleset="4.0.0", global_batch=3264)
        yield


@pytest.fixture(scope="module")
def answers() -> Iterator[None]:
    """One process of MLCommons' checkers, which judges the same events only once."""
    with kept_answers():
        yield


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """The repository that the runs were launched from."""
    path = tmp_path_factory.mktemp("clone")
    return Clone(path, make_repository(path))


@pytest.fixture(scope="session")
def series_of(tmp_path_factory: pytest.TempPathFactory, clone: Clone) -> Callable[[str], Path]:
    """A function from a benchmark to an undamaged series of exactly N runs, made once."""
    made: dict[str, Path] = {}

    def find(benchmark: str) -> Path:
        if benchmark not in made:
            made[benchmark] = write_series(tmp_path_factory.mktemp("results") / benchmark, benchmark, clone.commit)
        return made[benchmark]

    return find


@pytest.fixture
def results(series_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of an undamaged series of ResNet runs."""
    return Path(shutil.copytree(series_of("resnet"), tmp_path / "results"))


@pytest.fixture(scope="session")
def accepted_tree(tmp_path_factory: pytest.TempPathFactory, clone: Clone, series_of: Callable[[str], Path]) -> Path:
    """A submitter's folder with one ResNet result, as `package` made it."""
    folder = tmp_path_factory.mktemp("accepted")
    settings = write_submission(
        folder / "acme.yaml", submission({"system": SYSTEM, "results": str(series_of("resnet"))})
    )
    assert main(package_arguments(settings, folder, clone)) == 0
    return folder / "acme"


@pytest.fixture
def tree(accepted_tree: Path, tmp_path: Path) -> Path:
    """A copy of the accepted tree."""
    return Path(shutil.copytree(accepted_tree, tmp_path / "acme"))


CONTENT = """INFO - ALL CHECKS PASSED.
INFO - System description checker passed
INFO - RCP test PASSED
INFO - PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !
"""


@pytest.fixture
def content_checkers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace MLCommons' checkers by one that accepts everything; the names of those that ran."""
    asked: list[str] = []

    def accept(module: str, *arguments: object, **more: object) -> ConfinedResult:
        asked.append(module)
        return ConfinedResult(0, CONTENT, "")

    monkeypatch.setattr(mlcommons_checkers, "run_confined", accept)
    return asked
