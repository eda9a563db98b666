"""The linear layers of an encoder in half precision and in FP8, Transformer Engine's MLP, and the products alone.

Layers take their casts with them; the casts alone are those of :mod:`common.ops.fp8_cast`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.ops import bias_gelu, dropout_add_norm, linear
from common.ops.bench import cases
from common.ops.bench import transformer as size
from common.ops.bench.cases import Entry, Pass, each, rotating, together
from common.ops.bench.sweep import Sweep
from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import E4M3, E5M2, cast_reference
from common.ops.linear import Linear, Product
from common.ops.linear.fp8 import multiply
from common.ops.operation import AUTO, OperationRequest

DIRECTIONS = ("forward", "input gradient", "weight gradient")
ENGINE = "Transformer Engine"

# --- products of operands that are there


def product_case(packs: int, dtype: torch.dtype, *, columns: int, rows: int, fp8: bool) -> list[Pass]:
    """The three products of a layer."""
    tokens = packs * size.LENGTH

    def launches() -> tuple[Callable[[], Tensor], ...]:
        x, w, dy = (size.normal(dtype, *shape) for shape in ((tokens, columns), (rows, columns), (tokens, rows)))
        if not fp8:
            return lambda: x @ w.t(), lambda: dy @ w, lambda: dy.t() @ x
        formats = ((x, E4M3), (w, E4M3), (dy, E5M2))
        x8, w8, dy8 = (cast_reference(tensor, size.fresh_scaling(), to, True) for tensor, to in formats)
        assert x8.transposed is not None
        assert w8.transposed is not None
        assert dy8.transposed is not None
        factors = ((x8.data, w8.data), (dy8.data, w8.transposed), (dy8.transposed, x8.transposed))
        scales = ((x8, w8), (dy8, w8), (dy8, x8))
        return tuple(
            functools.partial(multiply, *pair, left.scale_inverse, right.scale_inverse, dtype)
            for pair, (left, right) in zip(factors, scales, strict=True)
        )

    sets = rotating(launches, tokens * (columns + rows))
    results = (tokens * rows, tokens * columns, rows * columns)
    read = 1 if fp8 else dtype.itemsize
    return [
        Pass(
            direction,
            lambda which=which: next(sets)[which](),  # type: ignore[misc]
            float((sum(results) - results[which]) * read + results[which] * dtype.itemsize),
            2.0 * tokens * columns * rows,
        )
        for which, direction in enumerate(DIRECTIONS)
    ]


# --- forward and backward of whole layers


def both_ways(
    layer: Callable[[Tensor], Tensor], weights: Sequence[Tensor], packs: int, columns: int, rows: int
) -> list[Pass]:
    """Forward and backward of (T, columns) to (T, rows), without the sum into ``.grad``."""
    tokens, dtype = packs * size.LENGTH, weights[0].dtype
    own = sum(weight.numel() for weight in weights)
    products = sum(weight.numel() for weight in weights if weight.dim() == 2)
    given, taken = tokens * columns, tokens * rows
    sets = rotating(lambda: (size.leaf(dtype, tokens, columns), size.normal(dtype, tokens, rows)), given)

    def both() -> tuple[Tensor, ...]:
        x, dy = next(sets)
        return torch.autograd.grad(layer(x), [x, *weights], dy)

    flops, unit = 2.0 * tokens * products, float(dtype.itemsize)
    return [
        Pass("forward", lambda: layer(next(sets)[0]), unit * (given + own + taken), flops),
        Pass("backward", both, unit * (2 * given + 2 * own + taken), 2 * flops, after="forward"),
    ]


def parameter(dtype: torch.dtype, *shape: int) -> Tensor:
    """Weights of the size of BERT's initial ones."""
    return size.normal(dtype, *shape).mul_(0.02).requires_grad_()


def whole_layer(build: Callable[[Tensor], Product], dtype: torch.dtype, columns: int, rows: int) -> Linear:
    """A linear layer with a bias, of the size of BERT's initial ones."""
    layer = Linear(columns, rows, torch.device(cases.DEVICE), dtype)
    for weights in layer.parameters():
        nn.init.normal_(weights, std=0.02)
    layer.product = build(layer.weight)
    return layer


def layer_case(build: Callable[[Tensor], Product], packs: int, dtype: torch.dtype, *, name: str) -> list[Pass]:
    """One linear layer without its bias."""
    columns, rows = size.LINEAR[name]
    weight = parameter(dtype, rows, columns)
    product = build(weight)
    return both_ways(lambda x: product(x, weight, None), [weight], packs, columns, rows)


def encoder_layer_case(build: Callable[[Tensor], Product], packs: int, dtype: torch.dtype) -> list[Pass]:
    """All linear layers of an encoder layer."""
    return together([layer_case(build, packs, dtype, name=name) for name in size.LINEAR])


def mlp_case(build: Callable[[Tensor], Product], packs: int, dtype: torch.dtype) -> list[Pass]:
    """LayerNorm, FC1, GELU and FC2 with biases: what Transformer Engine has as one module."""
    hidden, width = size.LINEAR["FC1"]
    norm_weight, norm_bias = parameter(dtype, hidden), parameter(dtype, hidden)
    up, down = (whole_layer(build, dtype, *sizes) for sizes in ((hidden, width), (width, hidden)))
    request = OperationRequest(torch.device(cases.DEVICE), dtype)
    norm = dropout_add_norm.DROPOUT_ADD_NORM.select(AUTO, request).function
    gelu = bias_gelu.BIAS_GELU.select(AUTO, request).function
    mask = DropoutMask(0.0, size.seed(), 0)

    def layer(x: Tensor) -> Tensor:
        h = norm(x, None, None, norm_weight, norm_bias, 1e-12, mask, fp8=up.input_scaling())
        handover = up.handover()
        z = up(h, add_bias=False, handover=handover)
        result: Tensor = down(gelu(z, up.bias, fp8=down.input_scaling(), handover=handover))
        return result

    return both_ways(layer, [norm_weight, norm_bias, *up.parameters(), *down.parameters()], packs, hidden, hidden)


def engine_mlp_case(packs: int, dtype: torch.dtype) -> list[Pass]:
    """The MLP of Transformer Engine."""
    hidden, width = size.LINEAR["FC1"]
    module = transformer_engine().LayerNormMLP(hidden, width, params_dtype=dtype, device=cases.DEVICE)
    return both_ways(under_recipe(module), list(module.parameters()), packs, hidden, hidden)


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


def entries() -> list[Entry]:
    """Layers and products, one by one, the layers of an encoder layer together, and the MLP; a step has PyTorch's."""
    builders, found = linear.LINEAR, []
    for name, (columns, rows) in size.LINEAR.items():
        sizes, build = {"columns": columns}, functools.partial(layer_case, name=name)
        found += each(f"linear {name}", builders, "reference", sizes, build, calls=size.LAYERS)
        for fp8, what in ((False, "half precision"), (True, "FP8")):
            product = functools.partial(product_case, columns=columns, rows=rows, fp8=fp8)
            found.append(Entry(f"product {name} {what}", 0, product))
    sizes = {"columns": size.HIDDEN}
    return [
        *found,
        *each("linear encoder layer", builders, "reference", sizes, encoder_layer_case, calls=0),
        *each("mlp", builders, "reference", sizes, mlp_case, calls=0),
        Entry(f"mlp {ENGINE}", 0, engine_mlp_case),
    ]


def sweeps() -> dict[str, Sweep]:
    """cuBLAS has no tiles of ours."""
    return {}
