"""FLUX.1's layers that two ranks share, alone and beside other samples on further ranks, equal those of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flux_ranks import loaded
from split_flux_ranks import LAYOUTS, run_rank

from benchmarks.flux1.model import parameter_count
from benchmarks.flux1.workload import FluxTraining
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.errors import ConfigError, UnsupportedImplementation
from tests.gloo_ranks import on_ranks

SPLIT = [world for world in LAYOUTS if world > 1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Results of every rank, by the number of ranks."""
    return {world: on_ranks(run_rank, world, tmp_path_factory.mktemp("ranks")) for world in LAYOUTS}


@pytest.mark.parametrize("world", SPLIT)
@pytest.mark.parametrize("what", ["initial", "losses", "gradients", "at times", "weights"])
def test_layers_that_ranks_share_equal_those_of_one_rank(ranks, world, what):
    expected = ranks[1][0][what]
    for rank in ranks[world]:
        torch.testing.assert_close(rank[what], expected, rtol=1e-9, atol=1e-11)


def test_every_parameter_has_a_gradient_and_moves(ranks):
    (found,) = ranks[1]
    assert found["gradients"].keys() == found["initial"].keys() == found["weights"].keys()
    for name, gradient in found["gradients"].items():
        assert gradient.any(), name
        assert not torch.equal(found["initial"][name], found["weights"][name]), name


def test_a_rank_holds_a_part_of_each_product_over_tokens():
    run, _ = loaded("scale=test")
    workload = FluxTraining(run, Layout())
    shape = workload.architecture
    whole = sum(each.numel() for each in workload.model.parameters())
    assert parameter_count(shape) == whole
    blocks = [module for _, module in workload.model.blocks]
    split = ("qkv.weight", "qkv.bias", "up.weight", "up.bias", "proj.weight", "down.weight")
    halved = sum(
        parameter.numel() // 2
        for block in blocks
        for name, parameter in block.named_parameters()
        if name.endswith(split)
    )
    assert parameter_count(shape, TensorParallel(2, 0, object())) == whole - halved


def test_a_micro_batch_is_divided_over_the_ranks():
    with pytest.raises(ConfigError, match="micro_batch=1: 2 samples are computed together"):
        loaded("scale=test", "scale.gpus_per_node=2", "layout.tp=2", "micro_batch=1")


def test_fp8_products_are_not_split(monkeypatch):
    run, _ = loaded("scale=test", "precision=bf16", "model.implementations.linear=fp8")
    monkeypatch.setattr(TensorParallel, "from_layout", lambda layout: TensorParallel(2, 0, object()))
    with pytest.raises(UnsupportedImplementation, match=r"linear=fp8: layout\.tp=2"):
        FluxTraining(run, Layout())


def test_an_evaluation_batch_is_divided_over_the_ranks(monkeypatch):
    run, _ = loaded("scale=test", "reader.eval_batch=3")
    monkeypatch.setattr(TensorParallel, "from_layout", lambda layout: TensorParallel(2, 0, object()))
    with pytest.raises(ConfigError, match=r"reader\.eval_batch=3: a multiple of layout\.tp=2"):
        FluxTraining(run, Layout())


def test_heads_are_divided_over_the_ranks(monkeypatch):
    run, _ = loaded("scale=test", "reader.eval_batch=3")
    monkeypatch.setattr(TensorParallel, "from_layout", lambda layout: TensorParallel(3, 0, object()))
    with pytest.raises(ConfigError, match=r"layout\.tp=3 does not divide the 2 query heads"):
        FluxTraining(run, Layout())
