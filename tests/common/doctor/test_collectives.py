"""Pairs of nodes, and the stage in the message about a collective that hangs or fails."""

import threading
from dataclasses import replace

import pytest
import torch

from common.distributed.rank_info import RankInfo
from common.doctor import collectives
from common.doctor.collectives import CollectiveOptions, ring_rounds
from common.doctor.reading import Reading


@pytest.mark.parametrize("count", [3, 4, 5, 8, 9])
def test_every_node_meets_both_neighbours_and_is_in_one_pair_at_a_time(count):
    rounds = ring_rounds(count)
    pairs = sorted(pair for pairs in rounds for pair in pairs)
    assert pairs == sorted((node, (node + 1) % count) for node in range(count))
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))


@pytest.mark.parametrize(("count", "rounds"), [(4, 2), (5, 3), (512, 2)])
def test_pairs_need_two_rounds_or_three(count, rounds):
    assert len(ring_rounds(count)) == rounds


def test_bus_bandwidth_does_not_depend_on_the_number_of_ranks():
    # An all-reduce of 8 GB over 4 ranks in 2 s moves 2 x 3/4 of it over each link: 6 GB/s. An all-gather half of that.
    assert collectives._bus_gbs(8_000_000_000, 2.0, 4, 2) == pytest.approx(6.0)
    assert collectives._bus_gbs(8_000_000_000, 2.0, 4, 1) == pytest.approx(3.0)


@pytest.fixture
def plan():
    return CollectiveOptions(
        RankInfo(0, 1, 0, 1, 0, "single"), [[0]], torch.device("cpu"), 0.1, False, timeout_seconds=200
    )


def test_a_stage_that_hangs_is_named(plan):
    never = threading.Event()

    def hang(plan, progress):
        progress.enter("collectives inside the node")
        progress.node["node_all_reduce_64mb_gbs"] = Reading(300.0)
        progress.enter("collectives over all ranks")
        never.wait()

    progress = collectives.run(replace(plan, timeout_seconds=3), hang)
    assert progress.failed == "no answer for 3 s in: collectives over all ranks"
    assert progress.stage == "collectives over all ranks"
    assert progress.node["node_all_reduce_64mb_gbs"].value == 300.0
    never.set()


def test_a_stage_that_fails_is_named_in_one_line(plan):
    def fail(plan, progress):
        progress.enter("collectives over all ranks")
        raise RuntimeError("NCCL error: unhandled system error\nmany\nlines")

    progress = collectives.run(plan, fail)
    assert progress.failed == "collectives over all ranks: NCCL error: unhandled system error"
    assert progress.stage == ""


def test_after_all_stages_there_is_no_message_and_no_stage(plan):
    progress = collectives.run(plan, lambda plan, progress: progress.enter("short"))
    assert (progress.failed, progress.stage) == ("", "")
