"""Measures of self-play from the counts of a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.minigo.measures import ServerCounts

COUNTS = ServerCounts(
    batches=10,
    positions=2000,
    computed=2560,
    hits=500,
    games=4,
    search_seconds=0.8,
    inference_seconds=1.0,
    idle_seconds=0.5,
    seconds=2.0,
)


def test_rates_and_shares_follow_from_the_counts():
    assert COUNTS.measures(workers=2) == pytest.approx(
        {
            "games": 4,
            "seconds": 2.0,
            "games_per_second": 2.0,
            "leaves_per_second": 1000.0,
            "cache_hits": 0.2,
            "batch_leaves": 200.0,
            "batch_fill": 0.78125,
            "search_us_per_leaf": 400.0,
            "search_share": 0.2,
            "inference_share": 0.5,
            "queue_share": 0.25,
            "bound": "inference",
        }
    )


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"search_seconds": 3.8, "idle_seconds": 0.9}, "search"),
        ({"inference_seconds": 1.8, "idle_seconds": 0.1}, "inference"),
        ({"inference_seconds": 0.3, "idle_seconds": 0.1}, "queue"),
    ],
)
def test_the_bound_is_what_takes_the_largest_share_of_the_time(changes, bound):
    assert replace(COUNTS, **changes).measures(workers=2)["bound"] == bound


def test_counts_are_subtracted_field_by_field():
    assert COUNTS.since(ServerCounts()) == COUNTS
    assert COUNTS.since(COUNTS) == ServerCounts()


def test_a_server_that_has_not_run_has_no_measures():
    assert ServerCounts(seconds=1.0).measures(workers=1) == {}
