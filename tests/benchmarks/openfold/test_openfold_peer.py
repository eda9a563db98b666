"""The peers of the bench: our own step with references, eager and compiled."""

from __future__ import annotations

import pytest
import torch

from benchmarks.openfold import peer
from benchmarks.openfold.evoformer import TriangleMultiplication
from benchmarks.openfold.layers import OPERATIONS, Masks
from benchmarks.openfold.workload import OpenFold
from common.distributed.layout import Layout
from common.ops.operation import REFERENCE
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
    monkeypatch.setattr(peer, "compile_blocks" if compiled else "leave_blocks", started.append)
    step = peer.start(run, example, torch.device("cpu"), compiled)
    (workload,) = started
    assert workload.choices == dict.fromkeys(OPERATIONS, REFERENCE)
    assert {parameter.dtype for parameter in workload.model.parameters()} == {torch.float32}
    assert workload.cfg.chunk_graphs == compiled
    workload.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    step()
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == "highest"
    assert any(not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True))


def test_every_block_is_compiled_and_takes_the_place_of_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, given = built(), list[torch.nn.Module]()
    blocks = [block for part in workload.model.sharded for block in part.children()]
    monkeypatch.setattr(peer.torch, "compile", lambda block: given.append(block) or torch.nn.Sequential(block))
    peer.compile_blocks(workload)
    assert given == blocks
    assert [part[0][0] for part in workload.model.sharded] == blocks


def test_an_update_of_the_pairs_is_traced_as_a_whole_with_dropout() -> None:
    """Without TorchInductor, which takes minutes on a CPU."""
    block = randomised(TriangleMultiplication(MAIN, True, chooser(), SPLIT))
    z = torch.randn(1, 6, 6, MAIN.pair, generator=generator(), dtype=torch.float64)
    inputs = z, torch.ones(1, 6, 6), Masks(torch.tensor(3), 16, True)
    with torch.no_grad():
        found = torch.compile(block, backend="eager", fullgraph=True)(*inputs)
        torch.testing.assert_close(found, block(*inputs))
