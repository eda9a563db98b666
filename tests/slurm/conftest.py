"""The Slurm that the tests of this folder submit their jobs to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing_programs


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running Slurm, one for all tests; skips where its programs are not installed."""
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)")
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Cluster]:
    """The same, idle. What a test that fails leaves running would keep the nodes from the next."""
    yield cluster
    cluster.clear()
