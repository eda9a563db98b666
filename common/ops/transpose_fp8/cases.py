"""Cases of transposes of FP8 matrices: weights of a decoder layer, and inputs and gradients of encoder and decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass
from common.ops.fp8_cast.reference import E4M3, E5M2
from common.ops.operation import OperationRequest
from common.ops.sizes import decoder, gpt3, transformer

SPARE = 5
"""Elements of the scratch buffer after the matrix, which must not change."""

NAN = 0x7F
"""NaN in both formats."""


class Fp8Case(Case):
    """A case whose request has the dtype of the matrices instead of that of the activations."""

    def request(self, device: torch.device, dtype: torch.dtype, **sizes: Any) -> OperationRequest:
        """Return the request with the matrices' dtype; see :meth:`Case.request`."""
        return super().request(device, E4M3, **sizes)


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    matrices: tuple[tuple[int, int], ...],
    e5m2: bool = False,
    runs: int = 0,
) -> list[Pass]:
    """Make the pass, which transposes several matrices; together they exceed the L2 cache. Each contains a NaN.

    Args:
        matrices: rows and columns of each matrix.
        e5m2: whether the format is E5M2 instead of E4M3.
        runs: number of runs of rows, each of which has its own factor; 0 for no factors.
    """
    dtype = E5M2 if e5m2 else E4M3
    inputs = []
    for rows, columns in matrices:
        matrix = draw.normal(rows, columns, scale=30.0, dtype=torch.float32).to(dtype)
        matrix.view(torch.uint8)[-1, -1] = NAN
        scratch = torch.full((rows * columns + SPARE,), 0x55, dtype=torch.uint8, device=draw.device).view(dtype)
        inputs.append((matrix, scratch, draw.uniform(runs, dtype=torch.float32) if runs else None))

    def run() -> list[tuple[Tensor, Tensor]]:
        return [(function(*each), each[1]) for each in inputs]

    return [Pass("forward", run, 2.0 * sum(rows * columns for rows, columns in matrices))]


TOKENS = transformer.PACKS * transformer.LENGTH
BERT = tuple((TOKENS, columns) for columns in (transformer.HIDDEN, 3 * transformer.HIDDEN))
GPT3 = (
    *((gpt3.TOKENS, columns) for columns in (3072, 9216, 12288)),
    *((rows, gpt3.HIDDEN) for rows in (9216, 12288)),
)

CASES = (
    Fp8Case(
        "Llama-2-70B weights",
        passes,
        {"matrices": tuple(decoder.LINEAR.values())},
        tests=[
            {"matrices": ((1, 1), (128, 256), (130, 257))},
            {"matrices": ((257, 130),), "e5m2": True},
            {"matrices": ((260, 130),), "runs": 4},
            {"matrices": ((1040, 272),), "runs": 8},
            {"matrices": ((130, 257),), "runs": 5, "e5m2": True},
        ],
        gpu={},
        dtypes=(torch.bfloat16,),
        fp64=False,
    ),
    Fp8Case("BERT inputs", passes, {"matrices": BERT}, dtypes=(torch.bfloat16,)),
    Fp8Case("GPT-3", passes, {"matrices": GPT3}, dtypes=(torch.bfloat16,)),
)
