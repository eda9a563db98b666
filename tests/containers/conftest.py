"""The container engine of these tests, and the images that it builds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.containers.engine import Built, Engine, obstacle

WHEELHOUSE = Path(os.environ.get("WHEELHOUSE", ROOT / "wheelhouse")).resolve()


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A function that prints a line at once, also while pytest keeps the output of tests."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def print_line(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\ncontainers: {text}", flush=True)

    return print_line


@pytest.fixture(scope="session")
def engine(say: Callable[[str], None]) -> Iterator[Engine]:
    """A container engine of its own. Where none can work tests are skipped, and fail in CI."""
    if why := obstacle(WHEELHOUSE):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    engine = Engine()
    if engine.isolation:
        say(f"no container runs here ({engine.isolation}): built and run with buildah --isolation chroot")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def base(engine: Engine, say: Callable[[str], None]) -> list[str]:
    """The options of docker/build.sh for a base image of Debian's packages and the wheelhouse."""
    began = time.monotonic()
    options = engine.build_base("mlperf-suite:base", WHEELHOUSE)
    say(f"base image: {engine.inspect('mlperf-suite:base')['Size'] / 1e9:.1f} GB, in {time.monotonic() - began:.0f} s")
    return options


@pytest.fixture(scope="session")
def build(engine: Engine, base: list[str], say: Callable[[str], None]) -> Callable[[str], Built]:
    """A function that builds the image of a family."""

    def build_family(family: str) -> Built:
        began = time.monotonic()
        built = engine.build(family, base)
        size = engine.inspect(built.name)["Size"] / 1e9
        say(f"{built.name}: {size:.1f} GB, in {time.monotonic() - began:.0f} s")
        return built

    return build_family


@pytest.fixture(scope="session")
def image(build: Callable[[str], Built]) -> Built:
    """The image of the family ``recommendation``, which has no libraries of its own."""
    return build("recommendation")


@pytest.fixture
def containers(engine: Engine) -> Engine:
    """The engine, if containers run."""
    if engine.isolation:
        pytest.skip(f"no container runs here: {engine.isolation}")
    return engine
