"""Which ranks of a layout are on one node."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from common.distributed import groups
from common.distributed.layout import Layout


@pytest.fixture(autouse=True)
def groups_are_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "make", lambda ranks, _: tuple(ranks))
    monkeypatch.setattr(dist, "get_world_size", lambda: 10**6)  # no group is the whole world


@pytest.mark.parametrize(
    ("rank", "ranks"), [(0, (0, 1, 2, 3)), (3, (0, 1, 2, 3)), (4, (4, 5, 6, 7)), (9, (8, 9))], ids=str
)
def test_ranks_of_a_node_follow_one_another(rank: int, ranks: tuple[int, ...]) -> None:
    assert Layout({"dp": 5, "tp": 2}, rank).node(4) == ranks


def test_a_rank_alone_on_its_node_has_no_group() -> None:
    assert Layout({"dp": 5}, 4).node(4) is None
    assert Layout({"dp": 3}, 1).node(1) is None
