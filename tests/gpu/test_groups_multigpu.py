"""Process groups of NCCL that their members alone make, beside a default group that is bound to a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.config.schema import Ctas
from common.distributed.layout import Layout

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def run_rank(rank: int, world: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world, device_id=device)
    found: dict[str, Any] = {}
    stages = Layout({"pp": world}, rank, device, ctas={"pp": Ctas(max=2)})
    groups = {f"link {first}": group for first, group in stages.links("pp", "purpose", around=True).items()}
    limited = Layout({"dp": world}, rank, device, ctas={"dp": Ctas(min=1, max=4)})
    groups["limited"] = limited.group("dp")
    groups["pairs"] = limited.subgroup("dp", 2)
    everyone = Layout({"dp": world}, rank, device).group("dp")
    assert everyone is dist.group.WORLD
    assert everyone.bound_device_id == device
    for name, group in groups.items():
        members = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(members, torch.tensor([rank], device=device), group=group)
        large = torch.full((1 << 22,), float(rank), device=device)
        dist.all_reduce(large, group=group)
        found[name] = members.tolist(), float(large[0]), float(large[-1])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_members_find_each_other_and_sums_are_right(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    for rank, found in enumerate(ranks):
        assert found["limited"][0] == list(range(world))
        for first in ((rank - 1) % world, rank):
            assert found[f"link {first}"][0] == sorted((first, (first + 1) % world))
        for members, first_sum, last_sum in found.values():
            assert first_sum == last_sum == sum(members)
