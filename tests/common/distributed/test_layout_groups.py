"""Process groups of a Layout: neighbourhoods along an axis, and the ranks with the same place in each."""

from __future__ import annotations

import pytest

from common.distributed.layout import Layout
from common.errors import ConfigError

pytestmark = pytest.mark.usefixtures("groups_are_their_ranks")


@pytest.mark.parametrize(("rank", "near", "far"), [(0, (0, 1), (0, 2, 4)), (3, (2, 3), (1, 3, 5))])
def test_groups_of_two_nodes_of_a_single_axis(rank, near, far):
    layout = Layout({"dp": 6}, rank)
    assert layout.subgroup("dp", 2) == near
    assert layout.across("dp", 2) == far


def test_other_axes_keep_their_place_unless_they_are_named():
    # rank = (dp, tp): dp 0..3 times tp 0..1
    layout = Layout({"dp": 4, "tp": 2}, 5)  # dp 2, tp 1
    assert layout.subgroup("dp", 2) == (5, 7)
    assert layout.across("dp", 2) == (1, 5)
    assert layout.across("dp", 2, "tp") == (0, 1, 4, 5)


def test_across_neighbourhoods_of_one_rank_is_the_group_of_the_axis():
    layout = Layout({"dp": 4, "tp": 2}, 5)
    assert layout.across("dp", 1) == layout.group("dp") == (1, 3, 5, 7)


def test_across_a_neighbourhood_that_is_the_whole_axis_is_this_rank_alone():
    assert Layout({"dp": 4, "tp": 2}, 5).across("dp", 4) is None


def test_several_axes_make_neighbourhoods_as_one():
    # rank = (dp, cp, tp): neighbours on dp x cp are two apart
    layout = Layout({"dp": 2, "cp": 4, "tp": 2}, 13)  # dp 1, cp 2, tp 1
    assert layout.subgroup(("dp", "cp"), 2) == (13, 15)
    assert layout.subgroup(("dp", "cp"), 8) == (1, 3, 5, 7, 9, 11, 13, 15)
    assert layout.across(("dp", "cp"), 2) == (1, 5, 9, 13)
    assert layout.across(("dp", "cp"), 4, "tp") == (4, 5, 12, 13)


def test_neighbourhoods_divide_several_axes_as_one():
    with pytest.raises(ConfigError, match="3 ranks does not divide the 8 ranks of the axes dp x cp"):
        Layout({"dp": 4, "cp": 2}).subgroup(("dp", "cp"), 3)


@pytest.mark.parametrize("make", [Layout.subgroup, Layout.across])
def test_neighbourhoods_divide_the_axis(make):
    with pytest.raises(ConfigError, match="3 ranks does not divide the 4 ranks of axis 'dp'"):
        make(Layout({"dp": 4}), "dp", 3)


@pytest.mark.parametrize(
    ("rank", "ranks"), [(0, (0, 1, 2, 3)), (3, (0, 1, 2, 3)), (4, (4, 5, 6, 7)), (9, (8, 9))], ids=str
)
def test_ranks_of_a_node_follow_one_another(rank: int, ranks: tuple[int, ...]) -> None:
    assert Layout({"dp": 5, "tp": 2}, rank).node(4) == ranks


def test_a_rank_alone_on_its_node_has_no_group() -> None:
    assert Layout({"dp": 5}, 4).node(4) is None
    assert Layout({"dp": 3}, 1).node(1) is None
