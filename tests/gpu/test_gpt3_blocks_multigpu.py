"""GPT-3's written blocks and head that GPUs share: tokens that move beside products or before them, eager and captured,
against float64 on one GPU."""

from __future__ import annotations

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

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SHAPE = GptArchitecture(
    vocabulary=500, hidden=1024, layers=3, heads=8, feed_forward=4096, positions=384, norm_epsilon=1e-5,
    initializer_range=0.03,
)  # fmt: skip
ROWS, CHUNK, WARM_UP = 2, 256, 3
BOUNDS = {"torch": (0.002, 0.06), "fp8": (0.02, 0.4)}
"""Of the loss and of a gradient, relative: e5m2 has two bits behind the point, so that is the wiring."""

WAYS = ("collective", "symmetric_memory", "captured")


def network(parallel: TensorParallel, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A rank's part of the same numbers of bf16, with norms and biases that matter."""
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
    """Forward and backward; the loss."""
    hidden = network.through(0, network.embed(tokens_BR[:, :-1]), ROWS)
    loss = network.summed_loss(hidden, tokens_BR[:, 1:].flatten(), CHUNK, 1 / (ROWS * SHAPE.positions))
    loss.backward()
    return loss.detach()


def whole_gradients(model: Decoder, layout: Layout) -> dict[str, Tensor]:
    """Of whole weights without padding, summed over ranks that have parts of sums."""
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
    """Loss and gradients, once scales are known."""
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


def run_rank(rank: int, world: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world, device_id=device)
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
            for way in WAYS[1:]:
                products = SymmetricMemoryProducts(parallel, device, 0.0)
                results[f"{linear}/{way}"] = of_blocks(layout, linear, products, way == "captured")
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("linear", BOUNDS)
def test_shared_blocks_follow_float64_of_one_gpu(ranks, linear, way):
    if f"{linear}/{way}" not in ranks[0]:
        pytest.skip(ranks[0]["unsupported"])
    of_loss, of_gradient = BOUNDS[linear]
    for rank in ranks:
        found = rank[f"{linear}/{way}"]
        torch.testing.assert_close(found["loss"].double(), rank["loss"], rtol=of_loss, atol=0)
        assert found["gradients"].keys() == rank["gradients"].keys()
        for name, wanted in rank["gradients"].items():
            error = float((found["gradients"][name] - wanted).norm() / wanted.norm())
            assert error < of_gradient, f"{name}: {error}"
