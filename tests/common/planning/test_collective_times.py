"""Times of collectives against their formulas, and the property that better links are never slower."""

import dataclasses
import random

import pytest

from common.config.system import Hardware, Link
from common.errors import ConfigError
from common.planning.collectives import (
    RankGroup,
    all_reduce,
    all_to_all,
    group_of,
    inside_node,
    reduce_scatter,
    require_links,
    transfer,
)

HARDWARE = Hardware(
    gpu="NVIDIA H200",
    gpus_per_node=8,
    memory_gb=150.0,
    memory_gbs=4250.0,
    collective_us=10.0,
    node_link=Link(1.0, 300.0),
    network_link=Link(5.0, 40.0),
)
COLLECTIVES = (all_reduce, reduce_scatter, all_to_all)


@pytest.mark.parametrize(
    ("ranks", "stride", "expected"),
    [(8, 1, (8, 1)), (64, 1, (8, 8)), (8, 8, (1, 8)), (16, 4, (2, 8)), (4, 1, (4, 1)), (6, 1, (2, 3))],
)
def test_a_group_is_divided_over_nodes(ranks, stride, expected):
    group = group_of(ranks, stride, 8)
    assert (group.per_node, group.nodes) == expected


def test_a_large_all_reduce_has_the_bus_bandwidth_of_the_link():
    size = 2**40
    assert all_reduce(size, RankGroup(8, 8), HARDWARE) == pytest.approx(2 * size * 7 / 8 / 300e9, rel=1e-4)


def test_a_ring_leaves_a_node_through_the_ports_of_all_its_gpus():
    size = 2**40
    narrow = dataclasses.replace(HARDWARE, network_link=Link(5.0, 20.0))
    assert all_reduce(size, RankGroup(64, 8), narrow) == pytest.approx(2 * size * 63 / 64 / 160e9, rel=1e-4)
    assert all_reduce(size, RankGroup(8, 1), narrow) == pytest.approx(2 * size * 7 / 8 / 20e9, rel=1e-4)


def test_a_small_all_reduce_passes_the_nodes_as_a_tree():
    # 10 us, 2 x 7 messages inside the node, 2 x log2(8) between nodes
    assert all_reduce(1, RankGroup(64, 8), HARDWARE) == pytest.approx((10 + 14 * 1 + 6 * 5) * 1e-6, rel=1e-3)


def test_messages_between_switches_take_longer():
    split = dataclasses.replace(HARDWARE, nodes_per_switch=4, switch_us=1.0)
    # 8 nodes below two switches: one level more, which a message passes up and down
    extra = all_reduce(1, RankGroup(64, 8), split) - all_reduce(1, RankGroup(64, 8), HARDWARE)
    assert extra == pytest.approx(6 * 2e-6)
    assert all_reduce(1, RankGroup(32, 8), split) == all_reduce(1, RankGroup(32, 8), HARDWARE)


def test_an_all_to_all_sends_inside_and_between_nodes_at_the_same_time():
    size = 1e9
    # 7 of 64 parts stay in the node, 56 leave it
    expected = max(size * 7 / 64 / 300e9, size * 56 / 64 / 40e9)
    assert all_to_all(size, RankGroup(64, 8), HARDWARE) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_and_no_bytes_take_no_time(collective):
    assert collective(1e9, RankGroup(1, 1), HARDWARE) == 0.0
    assert collective(0.0, RankGroup(16, 8), HARDWARE) == 0.0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_better_links_are_never_slower(collective):
    draw = random.Random(0)
    for _ in range(300):
        worse = dataclasses.replace(
            HARDWARE,
            node_link=Link(draw.uniform(0, 10), draw.uniform(1, 1000)),
            network_link=Link(draw.uniform(0, 50), draw.uniform(1, 100)),
        )
        node, network = worse.node_link, worse.network_link
        better = dataclasses.replace(
            worse,
            node_link=Link(node.latency_us * draw.random(), node.gbs * draw.uniform(1, 3)),
            network_link=Link(network.latency_us * draw.random(), network.gbs * draw.uniform(1, 3)),
        )
        per_node = draw.choice([1, 2, 4, 8])
        group, size = RankGroup(per_node * draw.choice([1, 2, 3, 16]), per_node), draw.uniform(1, 1e10)
        assert collective(size, group, better) <= collective(size, group, worse)


def test_the_same_bytes_are_fastest_inside_a_node():
    fast = inside_node(HARDWARE)
    assert all_reduce(1e9, RankGroup(16, 8), fast) == pytest.approx(2e9 * 15 / 16 / 300e9)
    assert transfer(3e9, True, fast) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("missing", "gpus"), [("node_link", 2), ("network_link", 16)]
)  # fmt: skip
def test_a_missing_link_is_named(missing, gpus):
    hardware = dataclasses.replace(HARDWARE, **{missing: None})
    with pytest.raises(ConfigError, match=rf"^system mine: hardware\.{missing} is missing, and {gpus} GPUs .*doctor"):
        require_links(hardware, "mine", gpus)
    require_links(hardware, "mine", 1)
