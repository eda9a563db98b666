"""Process groups that their members alone make: who finds whom, what is asked of PyTorch and NCCL, and how often."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import cli
from common.config.composition import compose
from common.config.system import Ctas
from common.distributed import groups
from common.distributed.layout import Layout
from common.errors import ConfigError
from tests.gloo_ranks import on_ranks

WORLD = 6
SIZES = {"pp": 3, "tp": 2}


def run_rank(rank: int, world: int, _: str) -> dict[str, Any]:
    asked: list[list[int]] = []
    original = dist.new_group

    def counted(ranks: list[int], **given: Any) -> Any:
        asked.append(list(ranks))
        return original(ranks, **given)

    dist.new_group = counted  # type: ignore[assignment]
    layout = Layout(SIZES, rank)
    # The second stage has two links and the others one; groups that are created later must still match.
    groups: dict[str, dist.ProcessGroup | None] = {}
    for purpose, around in (("forward", False), ("around", True)):
        links = layout.links("pp", purpose, around)
        assert layout.links("pp", purpose, around) is links
        groups |= {f"{purpose} {first}": group for first, group in links.items()}
        groups[f"tp after {purpose}"] = layout.group("tp")
        groups[f"ends after {purpose}"] = layout.group("tp", ends=("pp",))
    groups |= {"pp": layout.group("pp"), "all": layout.group("pp", "tp"), "none": layout.group("dp")}
    found = {}
    for name, group in groups.items():
        if group is not None:
            members = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size(group))]
            dist.all_gather(members, torch.tensor(rank), group=group)
            found[name] = [int(member) for member in members]
    return {"asked": asked, "found": found}


# Rank = 2 pp + tp.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(run_rank, WORLD, tmp_path_factory.mktemp("ranks"))


def test_the_ranks_of_a_group_find_each_other_whatever_groups_the_others_have(ranks):
    pairs = {0: (0, 2), 1: (2, 4), 2: (0, 4)}
    for rank, result in enumerate(ranks):
        stage, index = divmod(rank, 2)
        wanted = {"pp": [index, index + 2, index + 4], "all": list(range(6))}
        for purpose, firsts in (("forward", (0, 1)), ("around", (0, 1, 2))):
            wanted[f"tp after {purpose}"] = [2 * stage, 2 * stage + 1]
            if stage != 1:  # the ranks of the first and the last stage together
                wanted[f"ends after {purpose}"] = [0, 1, 4, 5]
            for first in firsts:
                if stage in (first, (first + 1) % 3):
                    wanted[f"{purpose} {first}"] = [index + member for member in pairs[first]]
        assert result["found"] == wanted


def test_a_rank_takes_part_in_its_own_groups_alone(ranks):
    """All equally often: of links two turns and three, one of tp, one of the ends, one of pp; the last is the world."""
    for rank, result in enumerate(ranks):
        assert len(result["asked"]) == 2 + 3 + 1 + 1 + 1
        assert all(rank in members for members in result["asked"])
    alone = [sum(len(members) == 1 for members in result["asked"]) for result in ranks]
    assert alone == [2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("around", [False, True])
def test_every_two_neighbours_are_linked_once_and_no_place_is_twice_in_a_turn(monkeypatch, size, around):
    turns = {}
    found = []
    for rank in range(size):
        made = []
        monkeypatch.setattr(groups, "make", lambda ranks, _, made=made: made.append(tuple(ranks)) or made[-1])
        found.append(Layout({"pp": size}, rank).links("pp", "purpose", around))
        turns[rank] = made
    edges = {first: tuple(sorted((first, (first + 1) % size))) for first in range(size if around else size - 1)}
    if size == 1:
        edges = {}
    assert {first for links in found for first in links} == set(edges)
    for first, pair in edges.items():
        assert [rank for rank in range(size) if first in found[rank]] == list(pair)
        assert all(found[rank][first] == pair for rank in pair)
    assert len({len(made) for made in turns.values()}) == 1, "every rank makes as many"
    for turn in zip(*turns.values(), strict=True):
        assert all(turn[other] == members for members in turn for other in members)


def test_ranks_of_the_largest_published_layout_make_fewer_groups_than_it_has_axes_and_links(monkeypatch):
    made = []
    monkeypatch.setattr(groups, "make", lambda ranks, _: made.append(ranks))
    layout = Layout({"pp": 6, "dp": 484, "tp": 4}, 5000)
    for direction in ("forward", "backward"):
        layout.links("pp", direction, around=True)
    assert len(made) == 4  # of 6 x 1,936 pairs each way


class Options:
    """As NCCL's."""

    def __init__(self) -> None:
        self.config = SimpleNamespace()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is asked of PyTorch in a job with NCCL, with the device that the world is bound to meanwhile."""
    options: list[dict[str, Any]] = []
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 3))

    def new_group(ranks: list[int], **given: Any) -> Any:
        options.append({"ranks": ranks, "bound": world.bound_device_id, "world": world, **given})
        return SimpleNamespace()

    fake = SimpleNamespace(
        group=SimpleNamespace(WORLD=world), new_group=new_group, ProcessGroup=SimpleNamespace,
        get_backend=lambda: "nccl", ProcessGroupNCCL=SimpleNamespace(Options=Options),
    )  # fmt: skip
    monkeypatch.setattr(groups, "dist", fake)
    return options


def test_nccl_splits_nothing_and_connects_the_members_at_once(nccl):
    groups.make([1, 5])
    groups.make([1])
    together, alone = nccl
    assert (together["ranks"], alone["ranks"]) == ([1, 5], [1])
    for options in nccl:
        assert options["bound"] is None
        assert options["use_local_synchronization"] is True
        assert options["pg_options"] is None
        assert options["world"].bound_device_id == torch.device("cuda", 3)
    assert together["device_id"] == torch.device("cuda", 3)
    assert alone["device_id"] is None, "a communicator of one rank would take memory"


def test_groups_wait_as_long_as_the_world(monkeypatch, nccl):
    timeouts = []
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: True, raising=False)
    monkeypatch.setattr(groups.dist, "set_timeout", timeouts.append, raising=False)
    monkeypatch.setattr(groups._Waiting, "timeout", None)
    groups.make([0, 1])
    groups.wait_at_most(timedelta(hours=2))
    groups.make([0, 1])
    assert timeouts == [timedelta(hours=2)]
    groups.make([0, 1], Ctas(max=2))
    assert [options["timeout"] for options in nccl] == [None, *[timedelta(hours=2)] * 2]
    assert nccl[-1]["pg_options"]._timeout == timedelta(hours=2)


def test_the_world_is_bound_again_after_an_error(monkeypatch, nccl):
    def fails(ranks: list[int], **given: Any) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(groups.dist, "new_group", fails)
    with pytest.raises(RuntimeError, match="no network"):
        groups.make([0, 1])
    assert groups.dist.group.WORLD.bound_device_id == torch.device("cuda", 3)


def test_thread_blocks_are_options_of_the_group(nccl):
    groups.make([0, 1], Ctas(min=2, max=8, cluster=0))
    groups.make([0, 1], Ctas(max=16))
    groups.make([0], Ctas(max=16))
    first, second, alone = (options["pg_options"] for options in nccl)
    assert vars(first.config) == {"min_ctas": 2, "max_ctas": 8, "cga_cluster_size": 0}
    assert vars(second.config) == {"max_ctas": 16}
    assert alone is None


def test_nccl_knows_these_options():
    if not dist.is_nccl_available():
        pytest.skip("this PyTorch has no NCCL")
    config = dist.ProcessGroupNCCL.Options().config
    for name in ("min_ctas", "max_ctas", "cga_cluster_size"):
        setattr(config, name, 4)
        assert getattr(config, name) == 4


def test_gloo_has_no_thread_blocks(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert groups.options(Ctas(max=8)) is None


def test_communicators_have_the_thread_blocks_of_their_axis(monkeypatch):
    made = []
    monkeypatch.setattr(groups, "make", lambda ranks, given: made.append(given) or object())
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    of_axis = {axis: Ctas(max=number) for number, axis in enumerate(("pp", "dp", "cp", "tp"), 1)}
    layout = Layout({"pp": 2, "dp": 4, "tp": 2}, 5, ctas=of_axis)
    for expected, make in {
        "tp": lambda: layout.group("tp"),
        "dp": lambda: layout.group("dp"),
        "pp": lambda: layout.group("pp", "tp"),
        "dp, of several": lambda: layout.group("pp", "dp"),
        "dp, of neighbours": lambda: layout.subgroup("dp", 2),
        "dp, of neighbourhoods": lambda: layout.across("dp", 2, "tp"),
        "dp, and all ranks": lambda: layout.group("pp", "dp", "cp", "tp"),
        "pp, of links": lambda: layout.links("pp", "purpose"),
        "none, of a node": lambda: layout.node(8),
    }.items():
        made.clear()
        make()
        assert made == [of_axis.get(expected.partition(",")[0], Ctas())], expected


def test_pipeline_links_use_two_thread_blocks_by_default(monkeypatch):
    made = []
    monkeypatch.setattr(groups, "make", lambda ranks, given: made.append(given) or object())
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    layout = Layout({"pp": 2, "dp": 2}, ctas={"pp": Ctas(), "dp": Ctas(max=8)})
    layout.links("pp", "purpose")
    layout.group("pp")
    assert made == [Ctas(max=2), Ctas()]


@pytest.mark.parametrize(
    ("options", "of_links"),
    [
        (Ctas(cluster=0), Ctas(max=2, cluster=0)),
        (Ctas(min=1), Ctas(min=1, max=2)),
        (Ctas(min=4), Ctas(min=4)),
        (Ctas(max=64), Ctas(max=64)),
        (Ctas(max=1), Ctas(max=1)),
    ],
)
def test_pipeline_links_use_the_configured_thread_blocks(options, of_links):
    assert groups.of_links({"pp": options}, "pp") == of_links


def test_an_axis_of_all_ranks_has_a_communicator_of_its_own_only_with_nccl_options(monkeypatch):
    monkeypatch.setattr(groups, "make", lambda ranks, given: "of its own")
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr("common.distributed.layout.dist.group", SimpleNamespace(WORLD="the world"))
    assert Layout({"dp": 4}, ctas={"tp": Ctas(max=8)}).group("dp") == "the world"
    assert Layout({"dp": 4}, ctas={"dp": Ctas(max=8)}).group("dp") == "of its own"


def test_network_choices_list_the_thread_blocks_of_existing_axes():
    options = {"dp": Ctas(min=1, max=8, cluster=4), "tp": Ctas(max=16), "pp": Ctas()}
    of_dp = {"thread blocks of dp": "at least 1, at most 8, in clusters of 4"}
    assert Layout({"dp": 2}, device="cuda", ctas=options).network_choices() == of_dp
    choices = Layout({"dp": 2, "pp": 2}, device="cuda", ctas=options).network_choices()
    assert choices == {**of_dp, "thread blocks of links of pp": "at most 2"}
    assert Layout({"dp": 2}, device="cpu", ctas=options).network_choices() == {}


def loaded(*overrides: str) -> dict[str, Ctas]:
    run, _ = cli.load(compose(["benchmark=llama31_8b", "scale=test", "device=cpu", *overrides]))
    return run.system.network.ctas.by_axis()


def test_the_systems_file_sets_thread_blocks():
    assert loaded() == dict.fromkeys(("pp", "dp", "cp", "tp"), Ctas())
    given = loaded("system.network.ctas.dp={max: 8, min: 4}", "system.network.ctas.tp.cluster=0")
    assert given == {"pp": Ctas(), "dp": Ctas(min=4, max=8), "cp": Ctas(), "tp": Ctas(cluster=0)}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dp.max=0", r"system\.network\.ctas\.dp\.max=0: from 1 to 64"),
        ("tp.min=65", r"system\.network\.ctas\.tp\.min=65: from 1 to 64"),
        ("pp.cluster=9", r"system\.network\.ctas\.pp\.cluster=9: from 0 to 8"),
        ("cp={min: 8, max: 4}", r"system\.network\.ctas\.cp.*min=8: more thread blocks than max=4"),
        ("dp.max=many", r"system\.network\.ctas\.dp\.max"),
        ("dp.priority=high", r"system\.network\.ctas\.dp\.priority"),
    ],
)
def test_thread_blocks_outside_nccl_s_range_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        loaded(f"system.network.ctas.{override}")


@pytest.mark.usefixtures("groups_are_their_ranks")
@pytest.mark.parametrize(("rank", "near", "far"), [(0, (0, 1), (0, 2, 4)), (3, (2, 3), (1, 3, 5))])
def test_groups_of_two_nodes_of_a_single_axis(rank, near, far):
    layout = Layout({"dp": 6}, rank)
    assert layout.subgroup("dp", 2) == near
    assert layout.across("dp", 2) == far


@pytest.mark.usefixtures("groups_are_their_ranks")
def test_other_axes_keep_their_place_unless_they_are_named():
    # rank = (dp, tp): dp 0..3 times tp 0..1
    layout = Layout({"dp": 4, "tp": 2}, 5)  # dp 2, tp 1
    assert layout.subgroup("dp", 2) == (5, 7)
    assert layout.across("dp", 2) == (1, 5)
    assert layout.across("dp", 2, "tp") == (0, 1, 4, 5)


@pytest.mark.usefixtures("groups_are_their_ranks")
def test_across_neighbourhoods_of_one_rank_is_the_group_of_the_axis():
    layout = Layout({"dp": 4, "tp": 2}, 5)
    assert layout.across("dp", 1) == layout.group("dp") == (1, 3, 5, 7)


@pytest.mark.usefixtures("groups_are_their_ranks")
def test_across_a_neighbourhood_that_is_the_whole_axis_is_this_rank_alone():
    assert Layout({"dp": 4, "tp": 2}, 5).across("dp", 4) is None


@pytest.mark.usefixtures("groups_are_their_ranks")
def test_several_axes_make_neighbourhoods_as_one():
    # rank = (dp, cp, tp): neighbours on dp x cp are two apart
    layout = Layout({"dp": 2, "cp": 4, "tp": 2}, 13)  # dp 1, cp 2, tp 1
    assert layout.subgroup(("dp", "cp"), 2) == (13, 15)
    assert layout.subgroup(("dp", "cp"), 8) == (1, 3, 5, 7, 9, 11, 13, 15)
    assert layout.across(("dp", "cp"), 2) == (1, 5, 9, 13)
    assert layout.across(("dp", "cp"), 4, "tp") == (4, 5, 12, 13)


@pytest.mark.usefixtures("groups_are_their_ranks")
def test_neighbourhoods_divide_several_axes_as_one():
    with pytest.raises(ConfigError, match="3 ranks does not divide the 8 ranks of the axes dp x cp"):
        Layout({"dp": 4, "cp": 2}).subgroup(("dp", "cp"), 3)


@pytest.mark.usefixtures("groups_are_their_ranks")
@pytest.mark.parametrize("make", [Layout.subgroup, Layout.across])
def test_neighbourhoods_divide_the_axis(make):
    with pytest.raises(ConfigError, match="3 ranks does not divide the 4 ranks of axis 'dp'"):
        make(Layout({"dp": 4}), "dp", 3)


@pytest.mark.usefixtures("groups_are_their_ranks")
@pytest.mark.parametrize(
    ("rank", "ranks"), [(0, (0, 1, 2, 3)), (3, (0, 1, 2, 3)), (4, (4, 5, 6, 7)), (9, (8, 9))], ids=str
)
def test_ranks_of_a_node_follow_one_another(rank, ranks):
    assert Layout({"dp": 5, "tp": 2}, rank).node(4) == ranks


@pytest.mark.usefixtures("groups_are_their_ranks")
def test_a_rank_alone_on_its_node_has_no_group():
    assert Layout({"dp": 5}, 4).node(4) is None
    assert Layout({"dp": 3}, 1).node(1) is None
