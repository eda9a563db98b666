"""Test two GPUs of one machine as two nodes of one: the same training, over sockets alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.distributed import symmetric_memory
from tests.gpu.support import start_rank
from tests.node_runs import CASES, STEPS, act_as_node, acts_as_node, trained

pytestmark = pytest.mark.multigpu

WORLD = 2
OVER_SOCKETS = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM",
}  # fmt: skip
CLOSE = 1e-3
"""Largest difference from the changes on one machine, relative to their norm: atomic additions have no fixed order."""


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    found: dict[str, Any] = {"refusal": symmetric_memory.refusal(dist.group.WORLD, device)}
    mapping = AssertionError("a node maps the memory of another one")
    if acts_as_node():
        mock.patch.object(symmetric_memory.torch_symmetric_memory, "rendezvous", side_effect=mapping).start()
    for case in CASES:
        before = loopback_bytes()
        found[case] = trained(case, rank, world, device)
        found[f"{case}, bytes"] = loopback_bytes() - before
        dist.barrier()
    return found


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has received."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    received = next(line.split(":")[1].split()[0] for line in lines if line.strip().startswith("lo:"))
    return int(received)


def start_node(rank: int, folder: Path) -> None:
    """Run :func:`run_rank` as a node of its own, whose NCCL writes a log."""
    os.environ.update(OVER_SOCKETS, NCCL_DEBUG_FILE=str(folder / f"nccl_{rank}.log"))
    act_as_node(rank)
    start_rank(rank, run_rank, WORLD, folder)


@pytest.fixture(scope="module")
def on_machine(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("machine")
    mp.spawn(start_rank, args=(run_rank, WORLD, folder), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def on_nodes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("nodes")
    mp.spawn(start_node, args=(folder,), nprocs=WORLD)
    logs = [(folder / f"nccl_{rank}.log").read_text() for rank in range(WORLD)]
    return [torch.load(folder / f"{rank}.pt") | {"log": log} for rank, log in enumerate(logs)]


@pytest.mark.parametrize("case", CASES)
def test_two_nodes_train_as_two_gpus_of_one(on_machine, on_nodes, case):
    for expected, found in zip((rank[case] for rank in on_machine), (rank[case] for rank in on_nodes), strict=True):
        assert found["losses"] == pytest.approx(expected["losses"], rel=CLOSE)
        assert found["changes"].keys() == expected["changes"].keys()
        moved = sum(float(change.norm()) for change in expected["changes"].values())
        off = sum(float((found["changes"][name] - change).norm()) for name, change in expected["changes"].items())
        assert 0 < moved < float("inf")
        assert off <= CLOSE * moved, f"{case} differs by {off} of {moved}"


def test_nodes_do_not_map_each_others_memory(on_nodes):
    """Where one did, as tensor parallelism on one machine does, its ranks would have failed."""
    assert [rank["refusal"] for rank in on_nodes] == ["the ranks are on several machines"] * WORLD


def test_nccl_connects_nodes_by_sockets_alone(on_nodes):
    for rank in on_nodes:
        connections = [line for line in rank["log"].splitlines() if " -> " in line and " via " in line]
        assert connections
        assert [line for line in connections if "via NET/Socket" not in line] == []


@pytest.mark.parametrize("case", ["data parallelism", "sharded optimizer"])
def test_all_gradients_of_nodes_cross_the_loopback_interface(on_nodes, case):
    gradients = STEPS * WORLD * on_nodes[0][case]["gradient_bytes"]
    assert min(rank[f"{case}, bytes"] for rank in on_nodes) >= gradients
