"""Test that the blocks for gathering weights all run, in the order of the list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from benchmarks import WORKLOADS
from common import cli
from common.config.composition import compose
from common.distributed.layout import Layout
from common.optim import optimizer
from common.optim.communication import WeightGatherer

WITH_BLOCKS = {"bert", "cosmoflow", "flux1", "gpt3", "llama31_8b", "rnnt", "stable_diffusion", "unet3d"}


def blocks_and_order(monkeypatch: pytest.MonkeyPatch, name: str, *overrides: str) -> tuple[list[str], list[str]]:
    """Return the names of a workload's blocks in its order, and in the order of their first use in a step."""
    given: list[tuple[str, nn.Module]] = []

    class Gatherer(WeightGatherer):
        def __init__(self, partitions: Any, group: Any, blocks: Sequence[tuple[str, nn.Module]], exchange: Any) -> None:
            super().__init__(partitions, group, blocks, exchange)
            given.extend(blocks)

    monkeypatch.setattr(optimizer, "WeightGatherer", Gatherer)
    run, _ = cli.load(compose([f"benchmark={name}", "scale=test", "device=cpu", *overrides]))
    workload = cli.workload_class(name)(run, Layout())
    step = workload.build_step()
    example = next(iter(workload.example_batches()))
    entered: list[str] = []
    for block, module in given:
        module.register_forward_pre_hook(lambda *_, block=block: entered.append(block))
    step([example] * run.grad_accumulation_steps)
    workload.close()
    return [block for block, _ in given], list(dict.fromkeys(entered))


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_blocks_run_in_the_order_of_the_list(monkeypatch, name):
    given, order = blocks_and_order(monkeypatch, name)
    assert bool(given) == (name in WITH_BLOCKS)
    assert order == given
