"""Statistics of batch norms that are averaged over the replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.nn.batch_norm import BatchNorm2d, averaged_statistics


class Network(nn.Module):
    """Two batch norms, and a buffer that is none of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = BatchNorm2d(3)
        self.block = nn.Sequential(nn.Conv2d(3, 5, 1), BatchNorm2d(5))
        self.register_buffer("other", torch.full((2,), 7.0))
        for number, buffer in enumerate(self.buffers()):
            buffer.add_(number)


NAMES = {f"{layer}.{name}" for layer in ("first", "block.1") for name in ("running_mean", "running_var")}


def test_of_one_replica_they_are_the_buffers_themselves():
    network = Network()
    found = averaged_statistics(network, Layout())
    assert found.keys() == NAMES
    for name, tensor in found.items():
        assert tensor.data_ptr() == network.get_buffer(name).data_ptr()


def test_of_two_replicas_they_are_the_means_and_the_buffers_stay(monkeypatch):
    mine, other = Network(), Network()
    for buffer in other.buffers():
        buffer.mul_(3).add_(torch.arange(len(buffer)))
    theirs = torch.cat([other.get_buffer(name) for name, _ in mine.named_buffers() if name in NAMES])
    calls = []

    def all_reduce(tensor: Tensor, group: object) -> None:
        assert group == "replicas"
        calls.append(len(tensor))
        tensor += theirs

    layout = Layout({"dp": 2}, rank=0)
    monkeypatch.setattr(layout, "group", lambda *axes: "replicas" if axes == ("dp",) else None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    kept = {name: buffer.clone() for name, buffer in mine.named_buffers()}
    found = averaged_statistics(mine, layout)
    assert found.keys() == NAMES
    assert calls == [2 * (3 + 5)]
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, (mine.get_buffer(name) + other.get_buffer(name)) / 2)
    assert all(torch.equal(buffer, kept[name]) for name, buffer in mine.named_buffers())
