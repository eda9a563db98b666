"""The forward pass of an evaluation over inputs of one shape: captured once on a GPU, and replayed."""

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
"""Passes in which plans are chosen and memory is found, before one is recorded."""

Output = TypeVar("Output")


class ForwardPass(Generic[Output]):
    """What an evaluation does with one batch after another.

    Args:
        model: the network; the one in training is left as it was.
        function: called with the inputs, the network being in evaluation mode; capturable.
        inputs: name to tensor on the device, made up: every batch is copied into these.
        capture: record ``function`` as a CUDA graph; without a GPU it runs eagerly.
        pool: memory pool that the graph shares with those of other passes, whose outputs end with this one's replay;
            None for one of its own.

    Attributes:
        inputs: where a batch is read from.
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
        """Run on the inputs as they are, and record on a GPU; what the last of the passes returned."""
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
        """Within it passes use ``weights`` (see :func:`common.evaluation.model_weights.evaluating`)."""
        return evaluating(self.model, weights)

    def __call__(self, batch: Mapping[str, Tensor] | None = None) -> Output:
        """Run on ``batch``, or on what the inputs hold; the output is valid until the next pass."""
        if batch is not None:
            torch._foreach_copy_(list(self.inputs.values()), [batch[name] for name in self.inputs], non_blocking=True)
        if self._recorded is None:
            return self._function(self.inputs)
        graph, output = self._recorded
        graph.replay()
        return output

    def close(self) -> None:
        """Free the graph."""
        if self._recorded is not None:
            self._recorded[0].reset()
            self._recorded = None
