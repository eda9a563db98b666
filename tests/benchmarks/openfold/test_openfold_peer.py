"""The peers of the bench: our own step with references, eager and compiled."""

from __future__ import annotations

import pytest
import torch

from benchmarks.openfold import peer
from benchmarks.openfold.evoformer import TriangleMultiplication
from benchmarks.openfold.layers import OPERATIONS, Masks
from benchmarks.openfold.workload import OpenFold
from common.contract import peer_steps
from common.distributed.layout import Layout
from common.ops.operation import REFERENCE
from common.step.train_step import TrainStep
from tests.benchmarks.openfold.small_folds import MAIN, SPLIT, chooser, generator, randomised
from tests.benchmarks.recipes import recipes_of

loaded, built = recipes_of("openfold", OpenFold)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_peer_trains_in_tf32_with_the_references_of_all_operations(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = loaded("scale=test", "precision=bf16", "cuda_graphs=chunks")
    example = next(iter(OpenFold(run, Layout()).example_batches()))
    started: list[OpenFold] = []
    seen: list[str] = []
    blocks: list[torch.nn.Module] = []

    class Recorded(OpenFold):
        def build_step(self) -> TrainStep:
            started.append(self)
            return super().build_step()

    def left(block: torch.nn.Module) -> torch.nn.Module:
        blocks.append(block)
        return block

    monkeypatch.setattr(peer, "OpenFold", Recorded)
    monkeypatch.setattr(peer_steps, "_compiled", left)
    step = peer.start(run, example, torch.device("cpu"), compiled)
    (workload,) = started
    assert blocks == ([block for stack in workload.model.sharded for block in stack.children()] if compiled else [])
    assert workload.choices == dict.fromkeys(OPERATIONS, REFERENCE)
    assert {parameter.dtype for parameter in workload.model.parameters()} == {torch.float32}
    assert workload.cfg.chunk_graphs == compiled
    workload.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    step()
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == "highest"
    assert any(not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True))


def test_an_update_of_the_pairs_is_traced_as_a_whole_with_dropout() -> None:
    """Without TorchInductor, which takes minutes on a CPU."""
    block = randomised(TriangleMultiplication(MAIN, True, chooser(), SPLIT))
    z = torch.randn(1, 6, 6, MAIN.pair, generator=generator(), dtype=torch.float64)
    inputs = z, torch.ones(1, 6, 6), Masks(torch.tensor(3), 16, True)
    with torch.no_grad():
        found = torch.compile(block, backend="eager", fullgraph=True)(*inputs)
        torch.testing.assert_close(found, block(*inputs))
