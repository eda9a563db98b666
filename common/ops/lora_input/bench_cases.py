"""Dropout in front of an adapter, of a norm's result too, and the gradient's way back past it."""

from __future__ import annotations

import functools
import itertools

import torch

from common.ops import lora_input
from common.ops.bench import cases, transformer
from common.ops.bench import decoder as size
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import normal, size_of
from common.ops.dropout.reference import DropoutMask
from common.ops.lora_input.reference import LoraInput


def case(function: LoraInput, batch: int, dtype: torch.dtype) -> list[Pass]:
    """As the adapter of a layer has it."""
    x, dx = (normal(dtype, size.TOKENS, size.HIDDEN) for _ in range(2))
    weight, inverse_rms = normal(dtype, size.HIDDEN), torch.ones(size.TOKENS, device=cases.DEVICE)
    du, a = normal(dtype, size.TOKENS, size.RANK), normal(dtype, size.RANK, size.HIDDEN)
    mask = DropoutMask(transformer.PROBABILITY, transformer.seed(), transformer.SITE)
    moved = 2 * size_of(x)
    return [
        Pass("forward", lambda: function.dropped(x, mask), moved),
        Pass("backward", lambda: function.add_input_gradient(dx, du, a, mask), moved),
        Pass("of a norm", lambda: function.dropped_norm(x, inverse_rms, weight, mask), moved),
    ]


def entries() -> list[Entry]:
    """Every implementation."""
    return each("lora_input", lora_input.LORA_INPUT, "triton", {}, case, calls=0)


def sweeps() -> dict[str, Sweep]:
    """Rows, columns and warps of both kernels."""
    from common.ops.lora_input import triton

    choices = {
        "dropped": list(itertools.product((2, 4, 8), (512, 1024, 2048), (4, 8))),
        "gradient": list(itertools.product((32, 64, 128), (64, 128, 256), (4, 8))),
    }
    build = functools.partial(case, lora_input.LORA_INPUT.function("triton"), 1)
    return {
        f"lora_input {key}": Sweep(triton.TILES, key, tiles, build, key == "gradient") for key, tiles in choices.items()
    }
