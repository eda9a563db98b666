"""Test GPT-3's hand-written blocks and its head with tensor parallelism against float64 on one GPU.

Tokens move during the products or before them, eagerly and in a graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpt3.config import GptArchitecture
from common.distributed.context_parallel import ContextSplit
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.layers import partial_parameters
from common.distributed.tensor_parallel.overlap import SymmetricMemoryProducts, build_products
from common.distributed.tensor_parallel.ranks import CollectiveProducts, TensorParallel, TokenProducts
from common.errors import UnsupportedImplementation
from common.language.architecture import choose_operations
from common.language.decoder import HandwrittenDecoder
from common.language.network import Decoder
from common.ops.operation import AUTO
from common.step.capture import capturing
from tests.benchmarks.gpt3.small_gpt3 import Passes
from tests.generators import generator_of

pytestmark = pytest.mark.multigpu

SHAPE = GptArchitecture(
    vocabulary=500, hidden=1024, layers=3, heads=8, feed_forward=4096, positions=384, norm_epsilon=1e-5,
    initializer_range=0.03,
)  # fmt: skip
ROWS, CHUNK, WARM_UP = 2, 256, 3
BOUNDS = {"torch": (0.002, 0.06), "fp8": (0.02, 0.4)}
"""Largest relative errors of the loss and of a gradient. With the two mantissa bits of e5m2, they show wrong wiring."""

MODES = ("collective", "symmetric_memory", "captured")


def network(parallel: TensorParallel, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return this rank's shards of a network whose norms and biases are random; the weights are bf16 values in any
    dtype."""
    model = Decoder(SHAPE, device, torch.bfloat16, parallel=parallel)
    model.initialise(lambda name: generator_of(name, device))
    splits = model.tensor_splits()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            shape = splits[name].full_shape if name in splits else parameter.shape
            whole = torch.empty(shape, device=device).normal_(0.0, 0.1, generator=generator_of(name, device))
            parameter.data.copy_(splits[name].local_of(whole) if name in splits else whole)
    return model.to(dtype)


def rows(device: torch.device) -> Tensor:
    generator = generator_of("tokens", device)
    return torch.randint(SHAPE.vocabulary, (ROWS, SHAPE.positions + 1), generator=generator, device=device)


def passes(network: Passes, tokens_BR: Tensor) -> Tensor:
    """Run a forward and a backward pass, and return the loss."""
    hidden = network.through(0, network.embed(tokens_BR[:, :-1]), ROWS)
    loss = network.summed_loss(hidden, tokens_BR[:, 1:].flatten(), CHUNK, 1 / (ROWS * SHAPE.positions))
    loss.backward()
    return loss.detach()


def whole_gradients(model: Decoder, layout: Layout) -> dict[str, Tensor]:
    """Return the gradients of whole weights without padding. Partial gradients are summed over the ranks."""
    partial, splits, found = partial_parameters(model), model.tensor_splits(), {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad.double()
        if name in splits:
            gradient = splits[name].without_padding(splits[name].gather(gradient, layout.group("tp"), layout.device))
        elif name in partial:
            dist.all_reduce(gradient, group=layout.group("tp"))
        found[name] = gradient.cpu()
    return found


def of_blocks(layout: Layout, linear: str, products: TokenProducts, captured: bool) -> dict[str, Any]:
    """Return loss and gradients after the FP8 scales have been measured."""
    device, parallel = layout.device, TensorParallel.from_layout(layout)
    model = network(parallel, device, torch.bfloat16)
    operations, _ = choose_operations({}, SHAPE, ContextSplit(SHAPE.positions), device, torch.bfloat16)
    written = HandwrittenDecoder(model, operations, linear, ROWS * SHAPE.positions, products=products)
    halves = Passes(model, written, cross_entropy=AUTO)
    tokens, stream, graph = rows(device), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            model.zero_grad(set_to_none=False)
            loss = passes(halves, tokens)
        if captured:
            torch.cuda.synchronize()
            with capturing(graph, stream):
                loss = passes(halves, tokens)
            for _ in range(2):  # one replay after another meets the slots of the one before
                model.zero_grad(set_to_none=False)
                graph.replay()
    torch.cuda.synchronize()
    results = {"loss": loss.cpu(), "gradients": whole_gradients(model, layout)}
    graph.reset()
    return results


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    layout = Layout({"tp": world}, rank, device=device)
    parallel = TensorParallel.from_layout(layout)
    exact = network(TensorParallel(), device, torch.float64)
    results: dict[str, Any] = {"loss": passes(Passes(exact), rows(device)).cpu()}
    results["gradients"] = {
        name: parameter.grad[: SHAPE.vocabulary].cpu() if name == "embedding.weight" else parameter.grad.cpu()
        for name, parameter in exact.named_parameters()
        if parameter.grad is not None
    }
    for linear in BOUNDS:
        results[f"{linear}/collective"] = of_blocks(layout, linear, CollectiveProducts(parallel), False)
    try:
        build_products(parallel, device, SymmetricMemoryProducts.name)
    except UnsupportedImplementation as error:
        results["unsupported"] = str(error)
    else:
        for linear in BOUNDS:
            for mode in MODES[1:]:
                products = SymmetricMemoryProducts(parallel, device, 0.0)
                results[f"{linear}/{mode}"] = of_blocks(layout, linear, products, mode == "captured")
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("linear", BOUNDS)
def test_shared_blocks_follow_float64_of_one_gpu(ranks, linear, mode):
    if f"{linear}/{mode}" not in ranks[0]:
        pytest.skip(ranks[0]["unsupported"])
    of_loss, of_gradient = BOUNDS[linear]
    for rank in ranks:
        found = rank[f"{linear}/{mode}"]
        torch.testing.assert_close(found["loss"].double(), rank["loss"], rtol=of_loss, atol=0)
        assert found["gradients"].keys() == rank["gradients"].keys()
        for name, wanted in rank["gradients"].items():
            error = float((found["gradients"][name] - wanted).norm() / wanted.norm())
            assert error < of_gradient, f"{name}: {error}"
