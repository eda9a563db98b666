"""Context that gives a network, possibly the one in training, the weights to evaluate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common.contract.evaluation import Weights
from common.nn.frozen import frozen_names


@contextlib.contextmanager
def evaluating(model: nn.Module, weights: Weights | None = None) -> Iterator[None]:
    """Set ``model`` to evaluation mode, without gradients and with ``weights``; restore it afterwards.

    Weights that share memory with the network are used directly. Others are copied into the network's tensors, so
    that graphs stay valid, and the old values are restored bit for bit, even after an error.

    Args:
        weights: all parameters (frozen ones are optional) and any of the buffers; None for the current values.

    Raises:
        KeyError: the weights lack a parameter, or have a tensor that the network does not have.
    """
    foreign = [] if weights is None else _foreign(model, weights)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _replaced(foreign):
            yield
    finally:
        model.train(training)


@contextlib.contextmanager
def _replaced(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Set the first tensor of each pair to the values of the second; restore the old values even if the block fails."""
    if not pairs:
        yield
        return
    own, given = (list(tensors) for tensors in zip(*pairs, strict=True))
    kept = [tensor.clone() for tensor in own]
    torch._foreach_copy_(own, given)
    try:
        yield
    finally:
        torch._foreach_copy_(own, kept)


def _foreign(model: nn.Module, weights: Weights) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of tensors of ``model`` and of ``weights`` that do not share memory."""
    parameters = dict(model.named_parameters())
    own: dict[str, Tensor] = {**dict(model.named_buffers()), **parameters}
    names = (parameters.keys() - frozen_names(model)) | weights.tensors.keys()
    pairs = [(own[name], weights.tensors[name]) for name in sorted(names)]
    return [(mine, given) for mine, given in pairs if mine.data_ptr() != given.data_ptr()]
