"""What the ranks of the tests of weight transfers do; started in processes of their own."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from common.distributed.rank_info import Role
from common.distributed.startup import find_rank_info, initialise, shutdown
from common.distributed.weights import Arrived, Template, Transfer, WeightReceiver, WeightSender

PUBLICATIONS = 3
STOPPED_AT = 17


def parameters(number: int) -> dict[str, Tensor]:
    """The same as a model holds them."""
    return {
        name: torch.nn.Parameter(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in weights(number).items()
    }


def weights(number: int) -> dict[str, Tensor]:
    """Tensors of several dtypes and odd sizes that differ from one publication to the next."""
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randn(1000, generator=generator)
    return {
        "convolution": drawn[:270].view(10, 3, 9).to(torch.bfloat16),
        "transposed": drawn[270:300].view(5, 6).t(),
        "bias": drawn[300:307].double(),
        "steps": torch.tensor(10**12 + number),
        "empty": torch.zeros(0, 4),
        "norm": drawn[400:1000],
    }


def run(rank: int, world_size: int, port: int, evaluation_ranks: int, senders: int, folder: str) -> None:
    """One rank: trains (publishes) or evaluates (saves what it receives to ``folder``)."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the test holds the store
        "GLOO_SOCKET_IFNAME": "lo",
    }
    rank_info = find_rank_info(os.environ)
    initialise(rank_info, torch.device("cpu"), 120, evaluation_ranks=evaluation_ranks)
    role = Role.of(rank_info, evaluation_ranks)
    template = Template.of(weights(0), senders)
    transfer = Transfer("test", senders, evaluation_ranks)
    if role.name == "train":
        _publish(role.rank, transfer, template)
    else:
        _receive(role.rank, transfer, template, folder)
    shutdown()


def _publish(rank: int, transfer: Transfer, template: Template) -> None:
    if rank >= transfer.senders:
        return
    sender = WeightSender(transfer, rank, template, torch.device("cpu"))
    for number in range(PUBLICATIONS):
        current = parameters(number)
        sender.publish(number, 100 * number, current)
        for tensor in current.values():
            tensor.detach().zero_()  # training goes on as soon as they are published
    assert not any(view.requires_grad for view in sender._views.values()), "snapshots keep every step's graph alive"
    sender.end(STOPPED_AT)


def _receive(rank: int, transfer: Transfer, template: Template, folder: str) -> None:
    receiver = WeightReceiver(transfer, rank, template, torch.device("cpu"))
    seen: list[object] = []
    while isinstance(item := receiver.take(), Arrived):
        tensors = {name: tensor.clone() for name, tensor in receiver.assemble(item).items()}
        seen.append((item.index, item.samples, tensors))
    torch.save((seen, item.stopped_at), f"{folder}/rank{rank}.pt")
