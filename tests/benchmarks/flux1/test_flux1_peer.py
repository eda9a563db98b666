"""The peers of the bench: the transformer of diffusers, and our own step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from flux_ranks import loaded
from small_flux import SMALL

from benchmarks.flux1 import peer
from benchmarks.flux1.config import Facts
from benchmarks.flux1.model import parameter_count
from benchmarks.flux1.peer import build, step_of
from benchmarks.flux1.workload import FluxTraining
from common.contract import peer_steps
from common.contract.peer_steps import fill_zeros
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from common.ops.operation import REFERENCE
from common.step.train_step import TrainStep

pytest.importorskip("diffusers", reason="the peer is diffusers' network")

PUBLIC = dataclasses.replace(SMALL, feed_forward=4 * SMALL.hidden)
"""diffusers has MLPs of four times the hidden size."""


def test_our_compiled_step_uses_references_and_recomputes_nothing(monkeypatch):
    run, _ = loaded("scale=test", "model.recomputed_blocks=1", "model.recomputed_operations=1")
    (example,) = FluxTraining(run, Layout()).example_batches()
    started: list[FluxTraining] = []

    class Recorded(FluxTraining):
        def build_step(self) -> TrainStep:
            started.append(self)
            return super().build_step()

    monkeypatch.setattr(peer, "FluxTraining", Recorded)
    monkeypatch.setattr(peer_steps, "compile_blocks", lambda network, names: None)
    step = peer.start_compiled_references(run, example, torch.device("cpu"))
    (workload,) = started
    assert workload.memory_sizes().asked == (0, 0)
    assert {workload.choices[name] for name in peer.COMPILED} == {REFERENCE}
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    step()
    assert any(not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True))


@pytest.mark.parametrize("depth", [{}, {"double_blocks": 8, "single_blocks": 16}])
def test_the_peer_has_our_number_of_parameters(depth):
    facts = dataclasses.replace(fixed_facts(Facts, "flux1"), **depth)
    with torch.device("meta"):
        network = build(facts)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameter_count(facts)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_an_iteration_of_the_peer_changes_its_weights(weights):
    network = build(PUBLIC).to(weights)
    fill_zeros(network)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    step = step_of(network, PUBLIC, 2, torch.device("cpu"), torch.bfloat16)
    assert step().isfinite()
    changed = [not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True)]
    # An update of 1e-5 is less than half of the last bit of a bf16 weight of 0.02 to 1, and many of them are lost.
    assert all(changed) if weights == torch.float32 else any(changed)


def test_mixed_precision_keeps_fp32_weights_and_computes_products_in_bf16():
    network = build(PUBLIC)
    seen = []
    network.transformer_blocks[0].attn.to_q.register_forward_hook(lambda layer, given, result: seen.append(result))
    step_of(network, PUBLIC, 2, torch.device("cpu"), torch.bfloat16)()
    assert [result.dtype for result in seen] == [torch.bfloat16]
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
