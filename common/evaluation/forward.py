"""Forward pass of an evaluation with given weights, over inputs of fixed shapes: a captured and replayed CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from common.contract.evaluation import Weights
from common.nn.frozen import frozen_names
from common.step.capture import capturing


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


WARM_UP_PASSES = 2
"""Passes before graph capture, in which libraries choose algorithms and allocate memory."""

Output = TypeVar("Output")


class ForwardPass(Generic[Output]):
    """Runs a function of a network on one batch after another.

    Args:
        model: the network; one in training is left unchanged.
        function: called with the inputs while the network is in evaluation mode; must allow CUDA graph capture.
        inputs: name to synthetic tensor on the device; every batch is copied into these tensors.
        capture: whether to record ``function`` as a CUDA graph. Without a GPU it always runs eagerly.
        pool: memory pool shared with graphs of other passes, whose outputs each replay invalidates; None: separate
            pool.

    Attributes:
        inputs: the tensors that ``function`` reads.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable[[dict[str, Tensor]], Output],
        inputs: dict[str, Tensor],
        capture: bool,
        pool: Any = None,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self._function, self._pool = function, pool
        self._capture = capture and all(tensor.device.type == "cuda" for tensor in inputs.values())
        self._recorded: tuple[torch.cuda.CUDAGraph, Output] | None = None

    def warm_up(self) -> Output:
        """Run on the current inputs and capture the graph on a GPU. Return the output of the last eager pass."""
        with evaluating(self.model):
            for _ in range(WARM_UP_PASSES):
                output = self._function(self.inputs)
            if self._capture:
                graph = torch.cuda.CUDAGraph()
                with capturing(graph, torch.cuda.current_stream(), self._pool):
                    recorded = self._function(self.inputs)
                self._recorded = (graph, recorded)
        return output

    def evaluating(self, weights: Weights) -> AbstractContextManager[None]:
        """Return a context in which passes use ``weights`` (:func:`common.evaluation.forward.evaluating`)."""
        return evaluating(self.model, weights)

    def __call__(self, batch: Mapping[str, Tensor] | None = None) -> Output:
        """Run on ``batch``, or on the current inputs. The output is valid until the next pass."""
        if batch is not None:
            torch._foreach_copy_(list(self.inputs.values()), [batch[name] for name in self.inputs], non_blocking=True)
        if self._recorded is None:
            return self._function(self.inputs)
        graph, output = self._recorded
        graph.replay()
        return output

    def close(self) -> None:
        """Release the graph."""
        if self._recorded is not None:
            self._recorded[0].reset()
            self._recorded = None
