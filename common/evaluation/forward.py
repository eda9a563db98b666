"""Forward pass of an evaluation over inputs of fixed shapes: captured once as a CUDA graph, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from common.contract.evaluation import Weights
from common.evaluation.model_weights import evaluating
from common.step.capture import capturing

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
        """Return a context in which passes use ``weights`` (:func:`common.evaluation.model_weights.evaluating`)."""
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
