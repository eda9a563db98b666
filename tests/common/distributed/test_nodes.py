"""Ranks of one machine that act as several nodes (``layout.machines``): who is asked, and the same training."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig
from common.distributed.layout import Layout
from common.distributed.rank_info import RankInfo
from common.distributed.symmetric_memory import MACHINE_VARIABLE, one_machine
from common.errors import NOT_CONVERGED, ConfigError
from common.run import start
from tests.command_line import logged, training
from tests.conftest import suite
from tests.gloo_ranks import on_ranks
from tests.node_runs import CASES, act_as_node, trained

CPU = torch.device("cpu")


def loaded(*overrides: str) -> RunConfig:
    return cli.load(compose(["benchmark=resnet", "scale=test", "micro_batch=4", *overrides]))[0]


def test_ranks_of_a_machine_are_divided_among_its_nodes():
    assert loaded("scale.gpus_per_node=4").ranks_per_node == 4
    run = loaded("scale.gpus_per_node=4", "layout.machines=2")
    assert (run.ranks_per_node, run.scale.nodes, run.layout["dp"]) == (2, 1, 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layout.machines=0"], "layout.machines=0: .* at least 1 node"),
        (["layout.machines=2"], "layout.machines=2: .* has 1 nodes of 1 ranks"),
        (["layout.machines=2", "scale.nodes=2", "scale.gpus_per_node=2"], "layout.machines=2: .* 2 nodes of 2 ranks"),
    ],
)
def test_nodes_that_cannot_be_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        loaded(*overrides)


def test_every_rank_gets_the_identity_of_its_node_before_anything_uses_a_gpu():
    run, found = loaded("scale.gpus_per_node=4", "layout.machines=2"), []
    for rank in range(4):
        with mock.patch.dict(os.environ, {MACHINE_VARIABLE: "of the shell"}):
            start._set_environment(run, RankInfo(rank, 4, rank, 4, 0, "torchrun"))
            found.append(os.environ[MACHINE_VARIABLE])
    assert found == ["node 0", "node 0", "node 1", "node 1"]


def asked(rank: int, world: int, _: str) -> list[bool]:
    """Return whether all ranks, and those of this rank's half, are on one machine: as they are, then as two nodes."""
    layout = Layout({"dp": world}, rank)
    half = layout.node(world // 2)
    assert half is not None
    assert dist.group.WORLD is not None
    found = [one_machine(group, CPU) for group in (dist.group.WORLD, half)]
    act_as_node(rank // 2)
    return [*found, *(one_machine(group, CPU) for group in (dist.group.WORLD, half))]


def test_ranks_of_different_nodes_are_not_on_one_machine(tmp_path):
    assert on_ranks(asked, 4, tmp_path / "ranks") == [[True, True, False, True]] * 4


def as_machine(rank: int, world: int, _: str) -> dict[str, Any]:
    return {case: trained(case, rank, world, CPU) for case in CASES}


def as_nodes(rank: int, world: int, folder: str) -> dict[str, Any]:
    act_as_node(rank)
    return as_machine(rank, world, folder)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], list[dict]]:
    folder = tmp_path_factory.mktemp("ranks")
    return on_ranks(as_machine, 2, folder / "machine"), on_ranks(as_nodes, 2, folder / "nodes")


@pytest.mark.parametrize("case", CASES)
def test_two_nodes_of_one_rank_train_bit_for_bit_as_two_ranks_of_a_node(both, case):
    for on_machine, on_nodes in zip(*both, strict=True):
        expected, found = on_machine[case], on_nodes[case]
        assert found["losses"] == expected["losses"]
        assert found["changes"].keys() == expected["changes"].keys()
        assert any(change.any() for change in expected["changes"].values())
        for name, change in expected["changes"].items():
            assert torch.equal(found["changes"][name], change), name


def test_the_nodes_of_a_run_are_those_of_its_exchange(data_of, tmp_path):
    fixed = ["scale.gpus_per_node=4", "layout.machines=2", "embeddings.plan=row_wise"]
    data = data_of("dlrm_dcnv2")
    done = suite(*training(data, tmp_path / "run", *fixed, benchmark="dlrm_dcnv2"))
    assert done.code in (0, NOT_CONVERGED), done.errors
    (choices,) = logged(tmp_path / "run" / "mlperf.log", "implementations")
    assert "over 4 ranks, exchanged in nodes of 2 first" in choices["value"]["embeddings"]
    (nodes,) = logged(tmp_path / "run" / "mlperf.log", "number_of_nodes")
    assert nodes["value"] == 1
