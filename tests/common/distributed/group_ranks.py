"""Ranks that make all kinds of groups; test_groups.py says which ranks must have found each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from common.distributed.layout import Layout

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
    # The second stage has two links and the others one; what comes behind must find each other all the same.
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
