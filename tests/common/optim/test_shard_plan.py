"""Test which ranks share shards, by layout and node size."""

from __future__ import annotations

import pytest

from common.distributed.layout import Layout
from common.errors import ConfigError
from common.optim.groups import ParameterGroup, Route, ShardPlan, shard_ranks

pytestmark = pytest.mark.usefixtures("groups_are_their_ranks")


def test_without_shards_a_rank_shares_with_nobody():
    plan = ShardPlan(Layout({"dp": 4}, 2), "none")
    route = plan.route(ParameterGroup({}))
    assert (plan.ranks, plan.index, plan.group) == (1, 0, None)
    assert (route.shard, route.across, route.everyone) == (None, (0, 1, 2, 3), (0, 1, 2, 3))


def test_all_replicas_share():
    plan = ShardPlan(Layout({"dp": 4}, 2), "all")
    route = plan.route(ParameterGroup({}))
    assert (plan.ranks, plan.index, plan.group) == (4, 2, (0, 1, 2, 3))
    assert (route.shard, route.across) == ((0, 1, 2, 3), None)


def test_the_ranks_of_a_node_share_and_the_same_places_of_all_nodes_are_summed():
    plan = ShardPlan(Layout({"dp": 8}, 6), "node", 4)
    route = plan.route(ParameterGroup({}))
    assert (plan.ranks, plan.index, plan.group) == (4, 2, (4, 5, 6, 7))
    assert (route.across, route.everyone) == ((2, 6), tuple(range(8)))


def test_a_layer_that_tp_ranks_compute_redundantly_is_summed_over_them_too():
    # rank = (dp, tp); two dp ranks fit in a node of four
    plan = ShardPlan(Layout({"dp": 4, "tp": 2}, 5), "node", 4)
    assert plan.group == (5, 7)
    assert plan.other_ranks == (4, 5)
    assert plan.route(ParameterGroup({}, replicated_over=("tp",))).across == (0, 1, 4, 5)
    assert plan.route(ParameterGroup({})).across == (1, 5)


def test_the_ranks_of_a_sample_share_as_replicas_do():
    # rank = (dp, cp); a node of four holds two replicas
    plan = ShardPlan(Layout({"dp": 4, "cp": 2}, 5), "node", 4)
    route = plan.route(ParameterGroup({}))
    assert (plan.ranks, plan.index, plan.group, plan.other_ranks) == (4, 1, (4, 5, 6, 7), None)
    assert (route.shard, route.across, route.everyone) == ((4, 5, 6, 7), (1, 5), tuple(range(8)))
    assert plan.route(ParameterGroup({}, replicated_over=("cp",))) == route
    every = ShardPlan(Layout({"dp": 4, "cp": 2}, 5), "all")
    assert (every.ranks, every.index, every.group) == (8, 5, tuple(range(8)))
    assert every.route(ParameterGroup({})) == Route(tuple(range(8)), None, tuple(range(8)))


def test_a_node_with_a_part_of_the_ranks_of_a_sample_shares_among_those():
    # rank = (dp, cp, tp); a node of four holds two of four ranks of cp
    plan = ShardPlan(Layout({"dp": 2, "cp": 4, "tp": 2}, 13), "node", 4)
    assert (plan.ranks, plan.index, plan.group, plan.other_ranks) == (2, 0, (13, 15), (12, 13))
    assert plan.route(ParameterGroup({})).across == (1, 5, 9, 13)
    assert plan.route(ParameterGroup({}), done=["cp"]) == Route(None, (5, 13), (5, 13), pieces=2)


def test_every_rank_of_a_node_has_a_place_of_its_own_in_it():
    made = [ShardPlan(Layout({"dp": 4, "cp": 2}, rank), "node", 4) for rank in range(8)]
    assert [plan.index for plan in made] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_what_is_summed_over_the_ranks_of_a_sample_is_not_summed_over_them_again():
    plan = ShardPlan(Layout({"dp": 4, "cp": 2}, 5), "none")
    route = plan.route(ParameterGroup({}, replicated_over=("cp",)), done=["cp"])
    assert (route.shard, route.across, route.everyone) == (None, (1, 3, 5, 7), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("shard", "ranks_per_node", "expected"),
    [
        ("all", None, Route((1, 3, 5, 7), None, (1, 3, 5, 7), pieces=2)),
        ("node", 4, Route((5, 7), (1, 5), (1, 3, 5, 7), pieces=2)),
        ("node", 2, Route(None, (1, 3, 5, 7), (1, 3, 5, 7), pieces=2)),
    ],
)
def test_sums_over_the_ranks_of_a_sample_are_scattered_over_replicas_in_pieces_of_several(
    shard, ranks_per_node, expected
):
    plan = ShardPlan(Layout({"dp": 4, "cp": 2}, 5), shard, ranks_per_node)
    assert plan.route(ParameterGroup({}), done=["cp"]) == expected


def test_a_sum_over_the_only_ranks_there_are_is_not_summed_again():
    plan = ShardPlan(Layout({"cp": 4}, 2), "all")
    assert plan.route(ParameterGroup({}), done=["cp"]) == Route(None, None, None, pieces=4)


def test_a_layer_that_tp_ranks_compute_redundantly_is_summed_over_the_ranks_of_a_sample_as_well():
    # rank = (dp, cp, tp)
    plan = ShardPlan(Layout({"dp": 2, "cp": 2, "tp": 2}, 5), "all")
    assert (plan.group, plan.index, plan.other_ranks) == ((1, 3, 5, 7), 2, (4, 5))
    assert plan.route(ParameterGroup({})).across is None
    assert plan.route(ParameterGroup({}, replicated_over=("tp",))).across == (4, 5)


@pytest.mark.parametrize(("ranks_per_node", "shared"), [(8, 4), (2, 1), (1, 1)])
def test_a_node_larger_than_the_replicas_or_smaller_than_one(ranks_per_node, shared):
    assert ShardPlan(Layout({"dp": 4, "tp": 2}, 0), "node", ranks_per_node).ranks == shared


def test_the_first_replica_writes_and_those_it_shares_with_help():
    made = [ShardPlan(Layout({"dp": 4, "tp": 2}, rank), "node", 4) for rank in range(8)]
    assert [plan.writes for plan in made] == [True, True, *[False] * 6]
    assert [plan.near_writer for plan in made] == [True] * 4 + [False] * 4


def test_of_the_ranks_of_a_sample_the_first_writes():
    # rank = (dp, cp)
    made = [ShardPlan(Layout({"dp": 4, "cp": 2}, rank), "node", 4) for rank in range(8)]
    assert [plan.writes for plan in made] == [True, *[False] * 7]
    assert [plan.near_writer for plan in made] == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("sizes", "ranks_per_node", "shared"),
    [
        ({"dp": 4}, 2, (4, 2)), ({"dp": 4, "cp": 2}, 8, (8, 8)), ({"dp": 4, "cp": 2}, 2, (8, 2)),
        ({"dp": 2, "cp": 2, "tp": 2}, 4, (4, 2)), ({"cp": 8, "tp": 4}, 8, (8, 2)), ({"dp": 2, "tp": 8}, 4, (2, 1)),
    ],
)  # fmt: skip
def test_memory_plans_divide_by_the_ranks_of_the_plan(sizes, ranks_per_node, shared):
    layout = Layout(sizes)
    for shard, ranks in zip(("none", "all", "node"), (1, *shared), strict=True):
        assert ShardPlan(layout, shard, ranks_per_node).ranks == ranks
        assert shard_ranks(shard, layout, ranks_per_node) == ranks


@pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 3, "tp": 4}, {"dp": 6, "cp": 4}])
def test_a_node_that_cuts_layers_or_samples_unevenly_is_refused(sizes):
    with pytest.raises(ValueError, match=r"ranks_per_node=6: it must fit cp x tp = (12|4) ranks"):
        ShardPlan(Layout(sizes), "node", 6)


@pytest.mark.parametrize(
    ("shard", "ranks_per_node", "message"),
    [("some", None, "shard='some'"), ("node", None, "ranks_per_node=None"), ("node", 3, "cp x tp = 2")],
)
def test_sharing_without_sense_is_refused(shard, ranks_per_node, message):
    with pytest.raises(ValueError, match=message):
        ShardPlan(Layout({"dp": 4, "tp": 2}), shard, ranks_per_node)


def test_a_node_that_does_not_divide_the_replicas_is_refused():
    with pytest.raises(ConfigError, match="3 ranks does not divide the 4 ranks of the axes dp x cp"):
        ShardPlan(Layout({"dp": 4}), "node", 3)
