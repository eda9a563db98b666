"""The Slurm cluster of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing_programs


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running Slurm for all tests; skipped if its programs are not installed."""
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)")
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Cluster]:
    """The same cluster, whose jobs are cancelled after the test, because jobs of a failed test would hold the nodes."""
    yield cluster
    cluster.clear()
