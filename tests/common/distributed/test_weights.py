"""Weights that are published arrive bit for bit, in order, on every evaluation rank."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
import weight_ranks
from torch.distributed import TCPStore

from common.distributed.weights import ALIGNMENT, Template, senders_for


def test_a_template_survives_its_text():
    template = Template.of(weight_ranks.weights(0), 2)
    assert Template.decode(template.encode()) == template


def test_views_of_one_buffer_do_not_overlap_and_start_aligned():
    tensors = weight_ranks.weights(0)
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
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: the system chooses a free one
    world_size = training_ranks + evaluation_ranks
    arguments = (world_size, store.port, evaluation_ranks, senders, str(tmp_path))
    mp.start_processes(weight_ranks.run, arguments, nprocs=world_size, start_method="forkserver")
    for rank in range(evaluation_ranks):
        seen, stopped_at = torch.load(tmp_path / f"rank{rank}.pt")
        assert stopped_at == weight_ranks.STOPPED_AT
        assert [(index, samples) for index, samples, _ in seen] == [(0, 0), (1, 100), (2, 200)]
        for index, _, tensors in seen:
            expected = weight_ranks.weights(index)
            assert tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert tensors[name].dtype == tensor.dtype
                assert torch.equal(tensors[name], tensor), name
