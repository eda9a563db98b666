"""Test tensor-parallel layers: products that overlap with transfers equal collectives, eager and captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.distributed.context_parallel import ContextSplit
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.layers import Adapter, ColumnParallelLinear, RowParallelLinear
from common.distributed.tensor_parallel.overlap import PRODUCTS, SymmetricMemoryProducts, build_products
from common.distributed.tensor_parallel.ranks import (
    CollectiveProducts,
    RowProduct,
    TensorParallel,
    TokenProducts,
    times,
)
from common.distributed.tensor_parallel.vocabulary import next_token_loss
from common.errors import UnsupportedImplementation
from common.ops.linear.fp8 import multiply
from common.step.capture import capturing
from tests.gpu.support import relative_error

pytestmark = pytest.mark.multigpu

TOKENS, HIDDEN, INNER, WORDS = 2048, 1024, 4096, 2000
REPLAYS = 20
RANK, ALPHA = 16, 32.0
HALF = 0.02
"""Largest relative difference of bf16 results. Partial sums are rounded before they are added."""

E4M3 = torch.float8_e4m3fn


def whole(seed: int, *shape: int, device: torch.device) -> Tensor:
    """Return random bf16 values, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().to(device)


def products_in_full(products: TokenProducts, parallel: TensorParallel, device: torch.device) -> dict[str, float]:
    """Return relative errors of bf16 and FP8 products against fp32, and of the gathered operands."""
    x_TK, b_NK = whole(1, TOKENS, HIDDEN, device=device), whole(2, INNER, HIDDEN, device=device)
    wanted_TN = x_TK.float() @ b_NK.float().t()
    own = parallel.own_tokens
    products.begin()
    T, s, ranks = TOKENS, TOKENS // parallel.size, parallel.size
    half = {"dtype": torch.bfloat16, "device": device}
    y_TN, kept, y_sN = torch.empty(T, INNER, **half), torch.empty_like(x_TK), torch.empty(s, INNER, **half)
    products.gather_product(own(x_TK), None, times(b_NK.t()), y_TN, kept)
    found = {"gather": relative_error(y_TN, wanted_TN), "kept": relative_error(kept, x_TK)}
    # Of a scattered product each rank has its part of the columns that are summed over.
    x_Tk, b_Nk = (t.chunk(ranks, 1)[parallel.index].contiguous() for t in (x_TK, b_NK))
    products.product_scatter(x_Tk, None, times(b_Nk.t()), y_sN)
    found["scatter"] = relative_error(y_sN, own(wanted_TN))

    one = torch.ones((), device=device)

    def in_fp8(weight_NK: Tensor) -> RowProduct:
        def product(x_nK: Tensor, scale_inverse: Tensor | None, y_nN: Tensor) -> None:
            assert scale_inverse is not None
            multiply(x_nK, weight_NK.to(E4M3), scale_inverse, one, torch.bfloat16, out=y_nN)

        return product

    # Rank r casts its tokens with the scale 2^r, which changes no bit but the exponent.
    rows8 = [(rows * 2.0**rank).to(E4M3) for rank, rows in enumerate(x_TK.chunk(ranks))]
    scale_inverse = one * 2.0**-parallel.index
    wanted_TN = x_TK.to(E4M3).float() @ b_NK.to(E4M3).float().t()
    kept = torch.empty(x_TK.shape, dtype=E4M3, device=device)
    products.gather_product(rows8[parallel.index], scale_inverse, in_fp8(b_NK), y_TN, kept)
    found |= {"gather fp8": relative_error(y_TN, wanted_TN), "kept fp8": relative_error(kept, torch.cat(rows8))}
    products.product_scatter(x_Tk.to(E4M3), one, in_fp8(b_Nk), y_sN)
    found["scatter fp8"] = relative_error(y_sN, own(wanted_TN))
    return found


class Pair(torch.nn.Module):
    """A column-parallel and a row-parallel layer with adapters."""

    def __init__(self, parallel: TensorParallel, products: TokenProducts, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "adapter": Adapter(RANK, ALPHA), "products": products, "device": device, "dtype": torch.bfloat16
        }  # fmt: skip
        self.up = ColumnParallelLinear(HIDDEN, (INNER,), parallel, **options)
        self.down = RowParallelLinear(INNER, HIDDEN, parallel, **options)
        with torch.no_grad():
            for seed, (name, parameter) in enumerate(self.named_parameters()):
                layer, kind = name.split(".")
                split = self.get_submodule(layer).splits.get(kind)
                full = whole(seed, *(split.full_shape if split else parameter.shape), device=device) * 0.02
                parameter.copy_(split.local_of(full) if split else full)

    def forward(self, x_sE: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x_sE)))


def replayed(run: Callable[[], list[Tensor]], device: torch.device) -> list[Tensor]:
    """Return the results of a graph of ``run`` after many replays."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream):
            results = run()
        for _ in range(REPLAYS):
            graph.replay()
    torch.cuda.synchronize()
    found = [result.clone() for result in results]
    graph.reset()
    return found


def layers(parallel: TensorParallel, products: TokenProducts, device: torch.device, captured: bool) -> list[Tensor]:
    """Return result and gradients of two layers."""
    pair = Pair(parallel, products, device)
    x_sE = parallel.own_tokens(whole(9, TOKENS, HIDDEN, device=device)).clone().requires_grad_()
    dy_sE = parallel.own_tokens(whole(10, TOKENS, HIDDEN, device=device))
    leaves = [x_sE, *pair.parameters()]

    def run() -> list[Tensor]:
        products.begin()
        y_sE = pair(x_sE)
        return [y_sE.detach(), *torch.autograd.grad(y_sE, leaves, dy_sE)]

    return replayed(run, device) if captured else run()


def head(parallel: TensorParallel, device: torch.device) -> list[Tensor]:
    """Return whole losses and gradients of a captured head."""
    hidden = parallel.own_tokens(whole(11, TOKENS, HIDDEN, device=device)).clone().requires_grad_()
    weight = (whole(12, WORDS, HIDDEN, device=device) * 0.05).chunk(parallel.size)[parallel.index].contiguous()
    labels_T = torch.randint(-1, WORDS, (TOKENS,), generator=torch.Generator().manual_seed(1)).to(device)

    def run() -> list[Tensor]:
        losses_T = next_token_loss(hidden, weight, labels_T, parallel, 512)
        return [losses_T.detach(), *torch.autograd.grad(losses_T.sum(), [hidden])]

    losses_T, gradient = replayed(run, device)
    return [losses_T.cpu(), parallel.all_gather(gradient).cpu()]


def wrong_keys(layout: Layout, device: torch.device) -> int:
    """Return the number of wrong elements of captured gathered keys and values, and of their summed gradients."""
    split = ContextSplit.from_layout(layout, 64 * layout.size("cp"))
    k_BSKD = torch.arange(2 * split.row_length * 8, device=device).view(2, -1, 2, 4).to(torch.bfloat16)
    k_BLKD = split.own_tokens(k_BSKD)

    def run() -> list[Tensor]:
        k, v = split.all_gather_kv(k_BLKD, -k_BLKD)
        return [k, v, *split.start_reduce_scatter_kv([(k, v)])()]

    wanted = [k_BSKD, -k_BSKD, split.ranks * k_BLKD, -split.ranks * k_BLKD]
    return sum(int((found != want).sum()) for found, want in zip(replayed(run, device), wanted, strict=True))


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    parallel = TensorParallel.from_layout(Layout({"tp": world}, rank, device=device))
    results: dict[str, Any] = {
        "auto": build_products(parallel, device).name,
        "head": head(parallel, device),
        "wrong keys": wrong_keys(Layout({"cp": world}, rank, device=device), device),
    }
    implementations: dict[str, TokenProducts] = {CollectiveProducts.name: CollectiveProducts(parallel)}
    try:
        build_products(parallel, device, SymmetricMemoryProducts.name)
        implementations[SymmetricMemoryProducts.name] = SymmetricMemoryProducts(parallel, device, 0.0)
    except UnsupportedImplementation as error:
        results["unsupported"] = str(error)
    for name, products in implementations.items():
        results[f"products/{name}"] = products_in_full(products, parallel, device)
        for captured in (False, True):
            results[f"layers/{name}/{captured}"] = [t.cpu() for t in layers(parallel, products, device, captured)]
    if rank == 0:
        results["whole head"] = head(TensorParallel(), device)
    return results


def supported(ranks: list[dict[str, Any]], name: str) -> None:
    if name == SymmetricMemoryProducts.name and "unsupported" in ranks[0]:
        pytest.skip(ranks[0]["unsupported"])


def test_auto_takes_symmetric_memory_where_it_can(ranks):
    wanted = "collective" if "unsupported" in ranks[0] else "symmetric_memory"
    assert [rank["auto"] for rank in ranks] == [wanted] * len(ranks)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_whole_operands(ranks, name):
    supported(ranks, name)
    for rank in ranks:
        found = rank[f"products/{name}"]
        assert found["kept"] == found["kept fp8"] == 0.0
        assert max(found.values()) < HALF


@pytest.mark.parametrize("captured", [False, True])
def test_layers_that_overlap_equal_those_that_wait(ranks, captured):
    supported(ranks, SymmetricMemoryProducts.name)
    for rank in ranks:
        waiting = rank["layers/collective/False"]
        for found, wanted in zip(rank[f"layers/symmetric_memory/{captured}"], waiting, strict=True):
            assert relative_error(found, wanted) < HALF


def test_captured_collectives_equal_eager_ones(ranks):
    for rank in ranks:
        for found, wanted in zip(rank["layers/collective/True"], rank["layers/collective/False"], strict=True):
            assert relative_error(found, wanted) < HALF


def test_the_head_of_all_ranks_is_that_of_one(ranks):
    losses, gradient = ranks[0]["whole head"]
    for rank in ranks:
        found_losses, found_gradient = rank["head"]
        torch.testing.assert_close(found_losses, losses, rtol=1e-3, atol=1e-3)
        assert relative_error(found_gradient, gradient) < HALF
        assert torch.equal(found_losses, ranks[0]["head"][0])


def test_captured_keys_and_values_stand_in_the_rows_order(ranks):
    assert [rank["wrong keys"] for rank in ranks] == [0] * len(ranks)
