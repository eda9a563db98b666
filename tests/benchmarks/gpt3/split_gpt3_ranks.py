"""A network that ranks share; test_gpt3_split.py compares it with one rank's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small_gpt3 import losses, network, randomise
from torch import Tensor

from benchmarks.gpt3.network import Gpt
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.layers import partial_parameters
from common.distributed.tensor_parallel.ranks import TensorParallel

LAYOUTS: dict[int, dict[str, dict[str, int]]] = {2: {"tp2": {"tp": 2}}, 4: {"tp4": {"tp": 4}}}
CPU = torch.device("cpu")


def shared_network(layout: Layout, dtype: torch.dtype) -> Gpt:
    """This rank's part of :func:`small_gpt3.network`."""
    shape = network().architecture
    model = Gpt(shape, [range(shape.layers)], dtype=dtype, parallel=TensorParallel.from_layout(layout))
    randomise(model)
    return model


def whole_gradients(model: Gpt, layout: Layout) -> dict[str, Tensor]:
    """Gradients of whole weights without padding, summed over the ranks that have parts of sums."""
    partial, splits = partial_parameters(model), model.tensor_splits()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad.double()
        if name in splits:
            whole = splits[name].gather(gradient, layout.group("tp"), CPU)
            gradient = splits[name].without_padding(whole)
            assert not whole[len(gradient) :].any(), name
        elif name in partial:
            dist.all_reduce(gradient, group=layout.group("tp"))
        found[name] = gradient
    return found


def one_pass(layout: Layout) -> dict[str, Any]:
    """Losses, the first of whose gradients is twice that of the others, and gradients."""
    model = shared_network(layout, torch.float64)
    found = losses(model)
    (found.sum() + found[0]).backward()
    return {"losses": found.detach(), "gradients": whole_gradients(model, layout)}


def run_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    results: dict[str, Any] = {}
    for name, axes in LAYOUTS[world].items():
        layout = Layout(axes, rank)
        results[f"{name}/autograd"] = one_pass(layout)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
