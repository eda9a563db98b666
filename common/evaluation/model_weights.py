"""A network with the weights that are evaluated, which may be the one in training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common.contract.evaluation import Weights
from common.nn.frozen import frozen_names


@contextlib.contextmanager
def evaluating(model: nn.Module, weights: Weights | None = None) -> Iterator[None]:
    """``model`` in evaluation mode, without gradients and with ``weights``; afterwards as it was.

    Weights that are the memory of the network's own are used where they lie. Others are copied into it, and what they
    replaced is put back bit for bit, after an error too: graphs of the network keep their addresses, and training goes
    on as if nothing had been evaluated.

    Args:
        model: the network.
        weights: each of its parameters, but for frozen ones, which may be missing, and any of its buffers; None for
            what it holds.

    Raises:
        KeyError: the weights lack a parameter, or have a tensor that the network has not.
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
    """The first of each pair holds the values of the second."""
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
    """The tensors of ``model`` with those of ``weights`` that are to replace them, where these lie elsewhere."""
    parameters = dict(model.named_parameters())
    own: dict[str, Tensor] = {**dict(model.named_buffers()), **parameters}
    names = (parameters.keys() - frozen_names(model)) | weights.tensors.keys()
    pairs = [(own[name], weights.tensors[name]) for name in sorted(names)]
    return [(mine, given) for mine, given in pairs if mine.data_ptr() != given.data_ptr()]
