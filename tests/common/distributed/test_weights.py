"""Weights that are published arrive bit for bit, in order, on every evaluation rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import TCPStore

from common.distributed.rank_info import Role
from common.distributed.startup import find_rank_info, initialise, shutdown
from common.distributed.weights import ALIGNMENT, Arrived, Template, Transfer, WeightReceiver, WeightSender, senders_for

PUBLICATIONS = 3
STOPPED_AT = 17


def parameters(number: int, device: torch.device) -> dict[str, Tensor]:
    """The same as a model on ``device`` holds them."""
    return {
        name: torch.nn.Parameter(tensor.to(device)) if tensor.is_floating_point() else tensor.to(device)
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


def run(
    rank: int, world_size: int, port: int, evaluation_ranks: int, senders: int, folder: str, kind: str = "cpu"
) -> None:
    """One rank on a device of this kind: trains (publishes) or evaluates (saves what it receives to ``folder``)."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the test holds the store
        "GLOO_SOCKET_IFNAME": "lo",
    }
    rank_info, device = find_rank_info(os.environ), torch.device(f"cuda:{rank}" if kind == "cuda" else kind)
    others = {"evaluate": evaluation_ranks}
    initialise(rank_info, device, 120, others=others)
    role = Role.of(rank_info, others)
    template = Template.of(weights(0), senders)
    transfer = Transfer("test", senders, evaluation_ranks)
    if role.name == "train":
        _publish(role.rank, transfer, template, device)
    else:
        _receive(role.rank, transfer, template, folder, device)
    shutdown()


def _publish(rank: int, transfer: Transfer, template: Template, device: torch.device) -> None:
    if rank >= transfer.senders:
        return
    sender = WeightSender(transfer, rank, template, device)
    for number in range(PUBLICATIONS):
        current = parameters(number, device)
        sender.publish(number, 100 * number, current)
        for tensor in current.values():
            tensor.detach().zero_()  # training goes on as soon as they are published
    assert not any(view.requires_grad for view in sender._views.values()), "snapshots keep every step's graph alive"
    sender.end(STOPPED_AT)


def _receive(rank: int, transfer: Transfer, template: Template, folder: str, device: torch.device) -> None:
    receiver = WeightReceiver(transfer, rank, template, device)
    seen: list[object] = []
    while isinstance(item := receiver.take(), Arrived):
        tensors = {name: tensor.cpu().clone() for name, tensor in receiver.assemble(item).items()}
        seen.append((item.index, item.samples, tensors))
    torch.save((seen, item.stopped_at), f"{folder}/rank{rank}.pt")


def test_a_template_survives_its_text():
    template = Template.of(weights(0), 2)
    assert Template.decode(template.encode()) == template


def test_views_of_one_buffer_do_not_overlap_and_start_aligned():
    tensors = weights(0)
    template = Template.of(tensors, 3)
    buffer = torch.zeros(template.bytes, dtype=torch.uint8)
    views = template.views(buffer)
    for name, tensor in tensors.items():
        assert views[name].storage_offset() * tensor.element_size() % ALIGNMENT == 0
        views[name].copy_(tensor)
    for name, tensor in tensors.items():
        assert views[name].dtype == tensor.dtype
        assert torch.equal(views[name], tensor)


@pytest.mark.parametrize(
    ("evaluation_ranks", "training_ranks_of_first_node", "senders"),
    [(1, 8, 1), (8, 8, 8), (16, 8, 8), (96, 8, 8), (2, 1, 1), (6, 4, 3), (5, 4, 1)],
)
def test_the_most_senders_that_fill_rows(evaluation_ranks, training_ranks_of_first_node, senders):
    assert senders_for(evaluation_ranks, training_ranks_of_first_node) == senders


@pytest.mark.parametrize(
    ("training_ranks", "evaluation_ranks", "senders"),
    [(2, 1, 1), (1, 2, 1), (2, 2, 2), pytest.param(2, 4, 2, marks=pytest.mark.slow)],
)
def test_every_evaluation_rank_receives_the_published_weights(training_ranks, evaluation_ranks, senders, tmp_path):
    published_weights_arrive(training_ranks, evaluation_ranks, senders, tmp_path)


def published_weights_arrive(
    training_ranks: int, evaluation_ranks: int, senders: int, folder: Path, kind: str = "cpu"
) -> None:
    """Send weights between ranks on devices of this kind, and compare what each evaluation rank receives."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: the system chooses a free one
    world_size = training_ranks + evaluation_ranks
    arguments = (world_size, store.port, evaluation_ranks, senders, str(folder), kind)
    mp.start_processes(run, arguments, nprocs=world_size, start_method="forkserver" if kind == "cpu" else "spawn")
    for rank in range(evaluation_ranks):
        seen, stopped_at = torch.load(folder / f"rank{rank}.pt")
        assert stopped_at == STOPPED_AT
        assert [(index, samples) for index, samples, _ in seen] == [(0, 0), (1, 100), (2, 200)]
        for index, _, tensors in seen:
            expected = weights(index)
            assert tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert tensors[name].dtype == tensor.dtype
                assert torch.equal(tensors[name], tensor), name
