"""Time the FP8 products of an encoder layer, their casts, and whole layers against bf16 and Transformer Engine.

``python -m common.ops.linear.bench`` prints, at BERT-large's sizes, milliseconds and TFLOP/s of each product and
GB/s of each cast (2 bytes read, 1 + 1 written per element), then forward and backward of whole layers. ``--sweep`` also
tries other tiles for the cast. Everything runs in CUDA graphs over several sets of random inputs that together exceed
the L2 cache. What fails prints its reason, and the rest goes on.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.ops import bias_gelu, dropout_add_norm, fp8_cast
from common.ops.bench.stopwatch import copy_bandwidth, time_graph
from common.ops.dropout.plain import DropoutMask
from common.ops.fp8_cast.plain import E4M3, E5M2, Fp8Tensor, Scaling, cast_torch
from common.ops.implementation import AUTO, OperationRequest, select
from common.ops.linear.fp8 import Fp8Product, multiply

LAYERS = {"QKV": (1024, 3072), "output": (1024, 1024), "FC1": (1024, 4096), "FC2": (4096, 1024)}
"""Linear layer of BERT-large's encoder -> columns and rows of its weight."""

ENCODER_LAYERS = 24
ROTATED_BYTES = 400e6
DEVICE = torch.device("cuda")
ENGINE = "transformer engine"

Work = Callable[[], object]


def median_ms(make: Callable[[], Work], input_bytes: float) -> float:
    """Milliseconds of one call of what ``make`` makes, over as many sets of inputs as exceed the L2 cache."""
    works = [make() for _ in range(int(ROTATED_BYTES // input_bytes) + 2)]

    def launches() -> int:
        for work in works:
            work()
        return len(works)

    for _ in range(2):
        launches()
    return time_graph(launches)


def attempt(measure: Callable[..., float], *arguments: object) -> float | str:
    """What ``measure`` returns, milliseconds, or why there are none."""
    try:
        return measure(*arguments)
    except Exception as error:  # noqa: BLE001 - one candidate's failure, of whatever kind, must not end the others
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:90]}"


def rate(time_ms: float | str, flops: float) -> str:
    """A cell: milliseconds and TFLOP/s."""
    return time_ms if isinstance(time_ms, str) else f"{time_ms:7.4f} ms {flops / time_ms / 1e9:6.0f} TFLOP/s"


def random(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A (rows, columns) matrix of unit normal numbers."""
    return torch.randn(rows, columns, device=DEVICE).to(dtype)


def fresh_scaling() -> Scaling:
    """The state before a first use."""
    return Scaling(torch.zeros((), device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE))


def in_fp8(x: Tensor, dtype: torch.dtype) -> Fp8Tensor:
    """``x`` and its transpose in FP8."""
    return cast_torch(x, fresh_scaling(), dtype, True)


# --- products of operands that are there


def product_work(name: str, tokens: int, columns: int, rows: int, dtype: torch.dtype, fp8: bool) -> Work:
    """A launch of ``forward``, ``dgrad`` or ``wgrad`` in ``dtype`` or in FP8."""
    x, w, dy = random(tokens, columns, dtype), random(rows, columns, dtype), random(tokens, rows, dtype)
    if not fp8:
        plain: dict[str, Work] = {"forward": lambda: x @ w.t(), "dgrad": lambda: dy @ w, "wgrad": lambda: dy.t() @ x}
        return plain[name]
    x8, w8, dy8 = in_fp8(x, E4M3), in_fp8(w, E4M3), in_fp8(dy, E5M2)
    left, right, transposed = {
        "forward": (x8, w8, (False, False)),
        "dgrad": (dy8, w8, (False, True)),
        "wgrad": (dy8, x8, (True, True)),
    }[name]
    a, b = (t.transposed if turn else t.data for t, turn in zip((left, right), transposed, strict=True))
    assert a is not None
    assert b is not None
    return lambda: multiply(a, b, left.scale_inverse, right.scale_inverse, dtype)


def print_products(tokens: int, dtype: torch.dtype) -> None:
    """Each product of each layer, and their sum."""
    print(f"\n{'products alone':<28}{str(dtype).removeprefix('torch.'):<32}FP8, operands already cast")
    sums = [0.0, 0.0]
    for layer, (columns, rows) in LAYERS.items():
        for name in ("forward", "dgrad", "wgrad"):
            cells = []
            for fp8 in (False, True):
                make = functools.partial(product_work, name, tokens, columns, rows, dtype, fp8)
                time_ms = attempt(median_ms, make, tokens * (columns + rows))
                sums[fp8] += time_ms if isinstance(time_ms, float) else float("nan")
                cells.append(rate(time_ms, 2.0 * tokens * columns * rows))
            print(f"{layer:<10}{name:<18}{cells[0]:<32}{cells[1]}", flush=True)
    print(f"{'sum of an encoder layer':<28}{f'{sums[0]:7.4f} ms':<32}{sums[1]:7.4f} ms", flush=True)


# --- casts


def cast_shapes(tokens: int) -> dict[str, tuple[int, int, torch.dtype]]:
    """What is cast in one encoder layer -> rows, columns and format; one entry for equal ones."""
    shapes: dict[str, tuple[int, int, torch.dtype]] = {}
    for columns, rows in LAYERS.values():
        shapes[f"x {columns}"] = (tokens, columns, E4M3)
        shapes[f"w {rows} x {columns}"] = (rows, columns, E4M3)
        shapes[f"dy {rows}"] = (tokens, rows, E5M2)
    return shapes


def cast_work(function: Callable[..., Fp8Tensor], shape: tuple[int, int, torch.dtype], dtype: torch.dtype) -> Work:
    """A launch of one cast with its transpose."""
    rows, columns, to = shape
    x, scaling = random(rows, columns, dtype), fresh_scaling()
    return lambda: function(x, scaling, to, True)


def print_casts(tokens: int, dtype: torch.dtype, peak: float) -> None:
    """Each cast in each implementation."""
    print(f"\n{'cast and transpose':<28}" + "".join(f"{name:<44}" for name in fp8_cast.IMPLEMENTATIONS))
    for what, shape in cast_shapes(tokens).items():
        elements = shape[0] * shape[1]
        cells = []
        for implementation in fp8_cast.IMPLEMENTATIONS.values():
            make = functools.partial(cast_work, implementation.function, shape, dtype)
            time_ms = attempt(median_ms, make, 2.0 * elements)
            if isinstance(time_ms, float):
                speed = 4 * elements / (time_ms * 1e-3)
                cells.append(f"{time_ms:7.4f} ms {speed / 1e9:6.0f} GB/s, {speed / peak:.0%} of copy")
            else:
                cells.append(time_ms)
        print(f"{what:<28}" + "".join(f"{cell:<44}" for cell in cells), flush=True)


def print_sweep(tokens: int, dtype: torch.dtype) -> None:
    """The best tiles of the Triton cast."""
    from common.ops.fp8_cast import triton as fp8_cast_triton

    used = fp8_cast_triton.TILE
    sizes = ((64, 64), (64, 128), (128, 64), (128, 128), (64, 256))
    for columns, to in ((1024, E4M3), (4096, E4M3), (3072, E5M2)):
        make = functools.partial(cast_work, fp8_cast_triton.cast, (tokens, columns, to), dtype)
        found: list[tuple[float, fp8_cast_triton.Tile]] = []
        for size, warps, stages, programs in itertools.product(sizes, (4, 8), (1, 2, 3), (1, 2, 3, 4, 6)):
            tile = fp8_cast_triton.TILE = fp8_cast_triton.Tile(*size, warps, programs, stages)
            time_ms = attempt(median_ms, make, 2.0 * tokens * columns)
            if isinstance(time_ms, float):
                found.append((time_ms, tile))
        print(f"\ntiles for {tokens} x {columns} to {to}")
        for time_ms, tile in sorted(found)[:6]:
            print(f"  {time_ms:7.4f} ms {4e-6 * tokens * columns / time_ms:6.0f} GB/s  {tile}", flush=True)
    fp8_cast_triton.TILE = used


# --- forward and backward of whole layers


def forward_backward(
    forward: Callable[[Tensor], Tensor], weights: Sequence[Tensor], tokens: int, columns: int, rows: int
) -> Callable[[], Work]:
    """What makes one set of inputs and returns the launch of both passes, without the sum into ``.grad``."""
    dtype = weights[0].dtype

    def make() -> Work:
        x, dy = random(tokens, columns, dtype).requires_grad_(), random(tokens, rows, dtype)
        return lambda: torch.autograd.grad(forward(x), [x, *weights], dy)

    return make


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Weights of the size of BERT's initial ones."""
    return nn.Parameter(torch.randn(shape, device=DEVICE).mul(0.02).to(dtype))


def product_of(kind: str, weight: Tensor) -> Callable[..., Tensor]:
    """``product(x, weight, bias)`` of the implementation ``torch`` or ``fp8``."""
    return Fp8Product(weight) if kind == "fp8" else F.linear


def linear(tokens: int, columns: int, rows: int, dtype: torch.dtype, kind: str) -> Callable[[], Work]:
    """One linear layer without its bias."""
    if kind == ENGINE:
        module = transformer_engine().Linear(columns, rows, bias=False, params_dtype=dtype, device="cuda")
        return forward_backward(under_recipe(module), list(module.parameters()), tokens, columns, rows)
    weight = parameter(rows, columns, dtype=dtype)
    product = product_of(kind, weight)
    return forward_backward(lambda x: product(x, weight, None), [weight], tokens, columns, rows)


def mlp(tokens: int, hidden: int, width: int, dtype: torch.dtype, kind: str) -> Callable[[], Work]:
    """LayerNorm, FC1, GELU and FC2 with biases: what Transformer Engine has as one module."""
    if kind == ENGINE:
        module = transformer_engine().LayerNormMLP(hidden, width, params_dtype=dtype, device="cuda")
        return forward_backward(under_recipe(module), list(module.parameters()), tokens, hidden, hidden)
    norm_weight, norm_bias = parameter(hidden, dtype=dtype), parameter(hidden, dtype=dtype)
    up, up_bias = parameter(width, hidden, dtype=dtype), parameter(width, dtype=dtype)
    down, down_bias = parameter(hidden, width, dtype=dtype), parameter(hidden, dtype=dtype)
    norm = select(dropout_add_norm.IMPLEMENTATIONS, AUTO, OperationRequest(DEVICE, dtype)).function
    gelu = select(bias_gelu.IMPLEMENTATIONS, AUTO, OperationRequest(DEVICE, dtype)).function
    up_product, down_product = product_of(kind, up), product_of(kind, down)
    seed = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def forward(x: Tensor) -> Tensor:
        h = norm(x, None, None, norm_weight, norm_bias, 1e-12, DropoutMask(0.0, seed, 0))
        return down_product(gelu(up_product(h, up, None), up_bias), down, down_bias)

    return forward_backward(forward, [norm_weight, norm_bias, up, up_bias, down, down_bias], tokens, hidden, hidden)


def transformer_engine() -> Any:
    """``transformer_engine.pytorch``, having forgotten earlier modules: it updates the scales of all that it knows."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    return te


def under_recipe(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A module of Transformer Engine in FP8 as here: e4m3 and e5m2, the scale of the previous use, no reduction."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    delayed = recipe.DelayedScaling(
        fp8_format=recipe.Format.HYBRID, amax_history_len=1, amax_compute_algo="most_recent", reduce_amax=False
    )

    def forward(x: Tensor) -> Tensor:
        with te.autocast(enabled=True, recipe=delayed):
            result: Tensor = module(x)
        return result

    return forward


def layer_ms(
    build: Callable[..., Callable[[], Work]], tokens: int, columns: int, rows: int, dtype: torch.dtype, kind: str
) -> float:
    """Milliseconds of both passes of one layer, over several sets of inputs."""
    return median_ms(build(tokens, columns, rows, dtype, kind), 2.0 * tokens * columns)


def print_layers(tokens: int, dtype: torch.dtype) -> None:
    """Forward and backward of each layer with their casts, and of the MLP."""
    kinds = ("torch", "fp8", ENGINE)
    hidden, width = LAYERS["FC1"]
    print(f"\n{'forward and backward':<28}" + "".join(f"{kind:<32}" for kind in kinds))
    sums = dict.fromkeys(kinds, 0.0)
    for name, (columns, rows) in {**LAYERS, "norm, FC1, GELU, FC2": (hidden, width)}.items():
        build, products = (linear, 3) if name in LAYERS else (mlp, 6)
        cells = []
        for kind in kinds:
            time_ms = attempt(layer_ms, build, tokens, columns, rows, dtype, kind)
            cells.append(rate(time_ms, products * 2.0 * tokens * columns * rows))
            if name in LAYERS:
                sums[kind] += time_ms if isinstance(time_ms, float) else float("nan")
        print(f"{name:<28}" + "".join(f"{cell:<32}" for cell in cells), flush=True)
    for name, count in (("sum of 4 linear layers", 1), (f"in {ENCODER_LAYERS} encoder layers", ENCODER_LAYERS)):
        print(f"{name:<28}" + "".join(f"{f'{count * total:7.4f} ms':<32}" for total in sums.values()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=24576, help="of a micro-batch; a multiple of 16")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--sweep", action="store_true", help="also try other tiles for the cast")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure")
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    peak = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.tokens} tokens, {dtype}")
    print(f"copy {peak / 1e9:.0f} GB/s", flush=True)
    print_products(arguments.tokens, dtype)
    print_casts(arguments.tokens, dtype, peak)
    print_layers(arguments.tokens, dtype)
    if arguments.sweep:
        print_sweep(arguments.tokens, dtype)


if __name__ == "__main__":
    main()
