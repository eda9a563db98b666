"""A network that is trained and evaluated: its mode, and weights that come from elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from common.evaluation.base import Weights


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``model`` in evaluation mode and without gradients; afterwards in the mode that it had."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@torch.no_grad()
def take_over(model: nn.Module, weights: Weights) -> None:
    """Copy those ``weights`` that are not the memory of the parameters of ``model`` already."""
    for name, parameter in model.named_parameters():
        given = weights.tensors[name]
        if given.data_ptr() != parameter.data_ptr():
            parameter.copy_(given)
