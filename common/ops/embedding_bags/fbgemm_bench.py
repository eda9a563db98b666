"""FBGEMM's table-batched embeddings with its exact Adagrad beside ours: tables and keys of DLRM-DCNv2's bench.

``python -m common.ops.embedding_bags.fbgemm_bench`` first makes both train one step on the same small tables and
compares what is left in them, then times both: pooling, and everything that comes after the gradient (FBGEMM sorts its
keys there; ours can be sorted beside the forward pass, so its sort is told apart and counted in the sum).

FBGEMM (pytorch.org/FBGEMM) is no dependency: install the ``fbgemm-gpu`` that belongs to your PyTorch beside the suite.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from common.ops import embedding_bags
from common.ops.bench.stopwatch import copy_bandwidth, median_ms, require_gpu
from common.ops.cases import Draw
from common.ops.embedding_bags.bags import AdagradRows, Bags
from common.ops.embedding_bags.cases import EPSILON, RATE, SAMPLES, TABLES, WIDTH, bags_of, keys
from common.optional_packages import OptionalPackage

CUDA = torch.device("cuda")
SMALL = ((1_000, 3), (40, 20), (7, 1))
"""Rows and hotness of the tables that are compared."""
SMALL_SAMPLES = 512
REPEATS = 20
FBGEMM = OptionalPackage(
    "fbgemm-gpu",
    (
        "fbgemm_gpu.split_table_batched_embeddings_ops_training",
        "fbgemm_gpu.split_table_batched_embeddings_ops_common",
        "fbgemm_gpu.split_embedding_configs",
    ),
)


class Fbgemm:
    """FBGEMM's embedding bags with fp32 rows and states, exact Adagrad, sums in the gradient's dtype.

    Args:
        tables: rows and hotness of each.
        dtype: of the pooled vectors.

    Raises:
        ConfigError: fbgemm-gpu is not installed.
    """

    def __init__(self, tables: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        reason = FBGEMM.unavailable()
        if reason is not None:
            raise ConfigError(f"the peer cannot be measured: {reason}")
        training, shared, configs = (importlib.import_module(name) for name in FBGEMM.imports)
        where = shared.EmbeddingLocation.DEVICE, shared.ComputeDevice.CUDA
        self.tables = tables
        self.module = training.SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[(rows, WIDTH, *where) for rows, _ in tables],
            optimizer=configs.EmbOptimType.EXACT_ADAGRAD,
            learning_rate=RATE,
            eps=EPSILON,
            weights_precision=configs.SparseType.FP32,
            output_dtype=configs.SparseType.from_dtype(dtype),
            pooling_mode=shared.PoolingMode.SUM,
            bounds_check_mode=shared.BoundsCheckMode.NONE,
            stochastic_rounding=False,
            device=CUDA,
        )

    def inputs(self, ids_NL: Tensor) -> tuple[Tensor, Tensor]:
        """Keys table by table, and where each bag begins, both int64."""
        columns = ids_NL.split([hotness for _, hotness in self.tables], 1)
        counts = torch.cat([torch.full((len(ids_NL),), hotness) for _, hotness in self.tables])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        return torch.cat([column.flatten() for column in columns]).long(), offsets.to(CUDA)


def compare() -> float:
    """The largest difference between the rows of both after a step from the same rows."""
    function = embedding_bags.EMBEDDING_BAGS.function("triton")
    generator = torch.Generator(CUDA).manual_seed(1)
    other, bags = Fbgemm(SMALL, torch.float32), bags_of(SMALL, CUDA)
    rows = torch.randn((bags.rows, WIDTH), device=CUDA, generator=generator)
    for mine, theirs in zip(
        rows.split([count for count, _ in SMALL]), other.module.split_embedding_weights(), strict=True
    ):
        theirs.data.copy_(mine)
    ids_NL = torch.cat(
        [torch.randint(count, (SMALL_SAMPLES, hot), device=CUDA, generator=generator) for count, hot in SMALL], 1
    ).int()
    gradient = torch.randn((SMALL_SAMPLES, len(SMALL), WIDTH), device=CUDA, generator=generator)
    _update(function, bags, ids_NL, gradient, rows, torch.zeros_like(rows))()
    other.module(*other.inputs(ids_NL)).backward(gradient.flatten(1))
    theirs = torch.cat([weight.detach() for weight in other.module.split_embedding_weights()])
    return float((theirs - rows).abs().max())


def _update(
    function: Any, bags: Bags, ids_NL: Tensor, gradient: Tensor, rows: Tensor, state: Tensor
) -> Callable[[], None]:
    found = function.sort(ids_NL, bags)
    scalars = [torch.full((), value, device=CUDA) for value in (RATE, 1.0, True)]
    rule = AdagradRows(EPSILON)
    return lambda: function.update(found, gradient, rows, state, rule, *scalars)


def time_ours(skewed: bool, dtype: torch.dtype) -> tuple[float, float, float]:
    """Milliseconds of pooling, sort and update."""
    function, bags = embedding_bags.EMBEDDING_BAGS.function("triton"), bags_of(TABLES, CUDA)
    ids_NL = keys(Draw(CUDA, dtype), SAMPLES, TABLES, skewed)
    rows, state = (torch.zeros((bags.rows, WIDTH), device=CUDA) for _ in range(2))
    out = torch.empty((SAMPLES, len(bags), WIDTH), dtype=dtype, device=CUDA)
    gradient = torch.randn(out.shape, device=CUDA).to(dtype)
    runs = (
        lambda: function.pool(rows, ids_NL, bags, out),
        lambda: function.sort(ids_NL, bags),
        _update(function, bags, ids_NL, gradient, rows, state),
    )
    pool, sort, update = (_captured_ms(run) for run in runs)
    return pool, sort, update


def time_fbgemm(skewed: bool, dtype: torch.dtype) -> tuple[float, float]:
    """Milliseconds of pooling, and of what its backward pass does, by events on the stream."""
    other = Fbgemm(TABLES, dtype)
    inputs = other.inputs(keys(Draw(CUDA, dtype), SAMPLES, TABLES, skewed))
    gradient = torch.randn((SAMPLES, len(TABLES) * WIDTH), device=CUDA).to(dtype)
    for _ in range(3):
        other.module(*inputs).backward(gradient)
    forward = median_ms(lambda: other.module(*inputs), REPEATS)
    both = median_ms(lambda: other.module(*inputs).backward(gradient), REPEATS)
    return forward, both - forward


def _captured_ms(run: Callable[[], None]) -> float:
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_ms(graph.replay, REPEATS)


def main() -> None:
    """Compare, time and print."""
    require_gpu("common.ops.embedding_bags.fbgemm_bench")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, copy {copy_bandwidth() * 1e-9:.0f} GB/s")
    print(f"rows after a step of both differ by at most {compare():.2e}")
    for skewed in (False, True):
        pool, sort, update = time_ours(skewed, torch.bfloat16)
        torch.cuda.empty_cache()
        forward, backward = time_fbgemm(skewed, torch.bfloat16)
        torch.cuda.empty_cache()
        print(
            f"{'skewed' if skewed else 'uniform'} keys, ms: ours pooling {pool:.3f}, sort {sort:.3f}, "
            f"update {update:.3f}, sum {pool + sort + update:.3f}; FBGEMM's pooling {forward:.3f}, "
            f"backward {backward:.3f}, sum {forward + backward:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
