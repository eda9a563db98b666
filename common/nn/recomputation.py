"""Blocks of a network under autograd that compute activations again in the backward pass instead of keeping them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common.ops.linear.fp8 import same_weights

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default]
"""Operators of matrix products, which take most of the time of a block."""


def recomputed(block: nn.Module, *inputs: object, recompute: bool = True, keep_products: bool = False) -> Any:
    """Run a block and return its results. With gradients, the backward pass runs it again and keeps only its inputs.

    The block draws no random numbers.

    Args:
        recompute: False to run the block as it is.
        keep_products: keep the results of matrix products, too, and compute only the other operations again.
    """
    if not recompute or not torch.is_grad_enabled():
        return block(*inputs)
    contexts = functools.partial(_contexts, block, keep_products)
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _contexts(block: nn.Module, keep_products: bool) -> tuple[Any, AbstractContextManager[None]]:
    """Return the contexts of the forward pass and of its repetition."""
    forward, again = contextlib.nullcontext(), contextlib.nullcontext()
    if keep_products:
        forward, again = create_selective_checkpoint_contexts(PRODUCTS)
    return forward, _repetition(block, again)


@contextlib.contextmanager
def _repetition(block: nn.Module, context: AbstractContextManager[None]) -> Iterator[None]:
    with same_weights(block), context:  # the forward pass has cast the weights of FP8 products
        yield
