"""A small decoder, and the halves that train it with the references of operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.distributed.context_parallel import ContextSplit
from common.language.architecture import LlamaArchitecture, block_operations, choose_operations
from common.language.decoder import HandwrittenDecoder
from common.language.network import Decoder
from common.ops.operation import REFERENCE

SMALL = LlamaArchitecture(
    vocabulary=96, hidden=32, layers=3, heads=4, kv_heads=2, head_size=8, feed_forward=48,
    norm_epsilon=1e-5, rope_base=100.0, initializer_range=0.15,
)  # fmt: skip
ROWS, LENGTH = 2, 24
CPU = torch.device("cpu")
REFERENCES = dict.fromkeys(block_operations(LlamaArchitecture), REFERENCE)


def trained(model: Decoder, linear: str = "torch", **options: Any) -> HandwrittenDecoder:
    """``model``, of :data:`SMALL`, through its halves, for micro-batches of ``ROWS`` rows of ``LENGTH`` tokens.

    Args:
        model: has the weights.
        linear: of the blocks' products: ``torch`` or ``fp8``.
        options: others of :class:`common.language.decoder.HandwrittenDecoder`.
    """
    operations, _ = choose_operations(REFERENCES, SMALL, ContextSplit(LENGTH), CPU, model.head.weight.dtype)
    return HandwrittenDecoder(model, operations, linear, ROWS * LENGTH, **options)


def error(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, relative."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
