"""A network that ranks share; test_gpt3_split.py compares it with one rank's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small_gpt3 import B, Passes, S, handwritten, losses, network, part, randomise, rows
from torch import Tensor

from common.distributed.layout import Layout
from common.distributed.tensor_parallel.layers import partial_parameters
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.language.network import Decoder

LAYOUTS: dict[int, dict[str, dict[str, int]]] = {2: {"tp2": {"tp": 2}}, 4: {"tp4": {"tp": 4}}}
CPU = torch.device("cpu")
BLOCKS = ("autograd", "handwritten")
FP8_STEPS = 2
"""The first of which finds its scales in a sample."""


def shared_network(layout: Layout, dtype: torch.dtype) -> Decoder:
    """This rank's part of :func:`small_gpt3.network`."""
    shape = network().architecture
    model = part(shape, dtype=dtype, parallel=TensorParallel.from_layout(layout))
    randomise(model)
    return model


def whole_gradients(model: Decoder, layout: Layout) -> dict[str, Tensor]:
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


def two_passes(layout: Layout, blocks: str) -> dict[str, Any]:
    """Losses, their sum, and gradients of two equal micro-batches, of which the second's sum counts twice."""
    model = shared_network(layout, torch.float64)
    network = handwritten(model) if blocks == "handwritten" else Passes(model)
    found = losses(network)
    sums = [summed(network) for _ in range(2)]
    (sums[0] + 2.0 * sums[1]).backward()
    return {"losses": found.detach(), "sum": sums[0].detach(), "gradients": whole_gradients(model, layout)}


def summed(network: Passes) -> Tensor:
    """The summed loss of :func:`small_gpt3.rows`."""
    tokens_BS, labels_BS = rows(network.architecture)
    hidden = network.through(0, network.embed(tokens_BS), B)
    return network.summed_loss(hidden, labels_BS.flatten())


def fp8_steps(model: Decoder) -> list[Tensor]:
    """Mean losses of some steps; the gradients of the last one stay."""
    halves, found = handwritten(model, "fp8"), []
    for _ in range(FP8_STEPS):
        model.zero_grad()
        mean = summed(halves) / (B * (S - 1))
        mean.backward()
        found.append(mean.detach())
    return found


def last_stage(layout: Layout, pending: int) -> dict[str, Tensor]:
    """Whole gradients of two micro-batches of the last of several stages, those of the head deferred or not."""
    shape = network().architecture
    parallel = TensorParallel.from_layout(layout)
    model = part(shape, [range(1, 2)], False, dtype=torch.float64, parallel=parallel)
    randomise(model)
    halves = handwritten(model, pending=pending)
    with halves.same_weights():
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            whole = torch.randn(B * S, shape.hidden, generator=generator, dtype=torch.float64)
            hidden = model.parallel.own_tokens(whole).clone().requires_grad_()
            _, labels_BS = rows(shape, seed)
            halves.summed_loss(halves.through(0, hidden, B), labels_BS.flatten()).backward()
    return whole_gradients(model, layout)


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, axes in LAYOUTS[world].items():
        layout = Layout(axes, rank)
        for blocks in BLOCKS:
            results[f"{name}/{blocks}"] = two_passes(layout, blocks)
        if name == "tp2":
            results["last stage"] = [last_stage(layout, pending) for pending in (0, 1, 2)]
            model = shared_network(layout, torch.bfloat16)
            results["fp8"] = {"losses": fp8_steps(model), "gradients": whole_gradients(model, layout)}
    return results
