"""Parts of peers that several workloads share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.contract import peer_steps
from common.contract.peer_steps import compile_blocks


class _Compiled(nn.Module):
    """Records the module that was to be compiled."""

    def __init__(self, block: nn.Module, dynamic: bool) -> None:
        super().__init__()
        self.block = block
        assert not dynamic


def test_every_named_block_is_compiled_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", _Compiled)
    first, second, alone, other = (nn.Linear(1, 1) for _ in range(4))
    network = nn.Module()
    network.blocks, network.middle, network.other = nn.ModuleList([first, second]), alone, other
    compile_blocks(network, ("blocks", "middle"))
    assert [part.block for part in (*network.blocks, network.middle)] == [first, second, alone]
    assert network.other is other


def test_only_tensors_of_zeros_are_filled() -> None:
    network = nn.Linear(3, 3)
    nn.init.zeros_(network.bias)
    weight = network.weight.detach().clone()
    peer_steps.fill_zeros(network)
    assert network.bias.all()
    assert torch.equal(network.weight, weight)
