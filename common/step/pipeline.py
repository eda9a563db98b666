"""The passes of a pipeline stage: forward and backward over the micro-batches of a step, or forward alone.

A chunk's result is sent and then only its place in the autograd graph is kept, so that its memory is free as soon as it
has been sent, unless the chunk itself keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.pipeline.links import Handed, Links
from common.distributed.pipeline.order import (
    Unit,
    check_numbers,
    follower,
    forward_order,
    order,
    receives,
)
from common.optim.precision import LossScale
from common.step.train_step import SAMPLES, Arm, ForwardBackward, Losses

Result = TypeVar("Result")


@dataclass(frozen=True)
class Chunk:
    """What a stage runs at once.

    Attributes:
        module: has the chunk's parameters, and no others: their gradients are final after its last backward pass.
        forward: the chunk on what the part of the model before it has handed on, None for the first part of all, and a
            micro-batch; what is handed on to the next part, or the losses if there is none.
    """

    module: nn.Module
    forward: Callable[[Tensor | None, Batch], Tensor | Losses]


@dataclass(frozen=True)
class _Passed:
    """What a backward pass begins and ends with: the chunk's input, and its result's place in the graph or the loss."""

    source: Tensor | None
    result: GradientEdge | Tensor


class Pipeline:
    """This rank's stage among those of the axis ``pp``. Collective to build.

    All ranks of ``pp`` read the same micro-batches; each uses of them what its parts of the model need.

    Args:
        layout: the ranks.
        chunks: parts of the model on every stage.
        micro_batches: of a training step.
        handed: what a part of the model hands on to the next for a micro-batch, the same between all parts.

    Attributes:
        first, last: whether the first part of the model, or the last one, is on this stage.

    Raises:
        ConfigError: see :func:`common.distributed.pipeline.order.check_numbers`.
    """

    def __init__(self, layout: Layout, chunks: int, micro_batches: int, handed: Callable[[Batch], Handed]) -> None:
        self._stages, self._stage, self._chunks = layout.size("pp"), layout.coordinate("pp"), chunks
        check_numbers(self._stages, chunks, micro_batches)
        self._handed, self._device = handed, layout.device
        self.first, self.last = self._stage == 0, self._stage == self._stages - 1
        self._links = Links(layout, chunks)

    def forward_backward(
        self, chunks: Sequence[Chunk], metrics: Sequence[str], loss_scale: LossScale | None = None
    ) -> ForwardBackward:
        """Forward and backward over the micro-batches of a step, in the place of ``accumulate``.

        A chunk's parameters are armed before its last backward pass. ``collect`` is called after each backward pass of
        the first chunk, which is the stage's last one of a micro-batch.

        Args:
            chunks: of this stage.
            metrics: names of what the losses report, which other stages cannot see.
            loss_scale: what the loss is multiplied with before the backward pass.

        Raises:
            ValueError: not as many chunks as the pipeline was built for.
        """
        if len(chunks) != self._chunks:
            raise ValueError(f"{len(chunks)} chunks where the pipeline has {self._chunks} on every stage")
        run = _Step(self, tuple(chunks), tuple(metrics), loss_scale)
        return run.forward_backward

    @torch.no_grad()
    def forward(
        self, functions: Sequence[Callable[[Tensor | None, Batch], Tensor | Result]], micro_batches: Sequence[Batch]
    ) -> list[Result]:
        """The forward pass alone, of any number of micro-batches; collective over ``pp``.

        Args:
            functions: for each chunk of this stage what it does, as :attr:`Chunk.forward`.
            micro_batches: the same on all stages.

        Returns:
            What the last part of the model returns, for every micro-batch; nothing on other stages.
        """
        units = forward_order(self._stages, self._chunks, len(micro_batches))
        self.begin(units, micro_batches)
        results: list[Result] = []
        for unit in units:
            batch = micro_batches[unit.micro_batch]
            result = functions[unit.chunk](self.take(unit), batch)
            if self.ends(unit):
                results.append(result)  # type: ignore[arg-type]
            else:
                assert isinstance(result, Tensor)
                self.send(unit, result, batch)
        self.finish()
        return results

    def order(self, micro_batches: int) -> list[Unit]:
        """The units of this stage in a step."""
        return order(self._stage, self._stages, self._chunks, micro_batches)

    def begin(self, units: Sequence[Unit], micro_batches: Sequence[Batch]) -> None:
        """Post the first receives of ``units``."""
        for direction, inbox in self._links.inboxes.items():
            wanted = [unit.micro_batch for unit in units if unit.direction == direction and self.receives(unit)]
            inbox.begin([self._handed(micro_batches[number]) for number in wanted])

    def receives(self, unit: Unit) -> bool:
        """Whether ``unit`` begins from what another stage hands on."""
        return receives(self._stage, self._stages, self._chunks, unit)

    def ends(self, unit: Unit) -> bool:
        """Whether no part of the model follows in the direction of ``unit``."""
        return follower(self._stage, self._stages, self._chunks, unit) is None

    def take(self, unit: Unit) -> Tensor | None:
        """What ``unit`` begins from; None at either end of the model."""
        return self._links.inboxes[unit.direction].take() if self.receives(unit) else None

    def send(self, unit: Unit, tensor: Tensor, batch: Batch) -> None:
        """Hand on what ``unit`` has made.

        Raises:
            ValueError: it has another shape or dtype than was said.
        """
        found, wanted = Handed(tuple(tensor.shape), tensor.dtype), self._handed(batch)
        if found != (tuple(wanted.shape), wanted.dtype):
            raise ValueError(f"chunk {unit.chunk} of stage {self._stage} hands on {found}, {wanted} was announced")
        self._links.outboxes[unit.direction].send(tensor.detach().contiguous())

    def finish(self) -> None:
        """Wait until all is sent."""
        self._links.finish()

    def report(self, metrics: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Metrics of the last stage so that their mean over all stages, to which the others add 0, is their value."""
        if self.last:
            return {name: metrics[name] * self._stages for name in names}
        return {name: torch.zeros((), device=self._device) for name in names}


class _Step:
    """Forward and backward passes of one stage."""

    def __init__(
        self, pipeline: Pipeline, chunks: tuple[Chunk, ...], metrics: tuple[str, ...], loss_scale: LossScale | None
    ) -> None:
        self._pipeline, self._chunks, self._metrics, self._loss_scale = pipeline, chunks, metrics, loss_scale
        self._passed: dict[tuple[int, int], _Passed] = {}
        self._sums: dict[str, Tensor] = {}

    def forward_backward(
        self, micro_batches: Sequence[Batch], arm: Arm, collect: Callable[[], None]
    ) -> dict[str, Tensor]:
        """See :data:`common.step.train_step.ForwardBackward`."""
        self._passed, self._sums = {}, {}
        count = len(micro_batches)
        units = self._pipeline.order(count)
        self._pipeline.begin(units, micro_batches)
        for unit in units:
            batch = micro_batches[unit.micro_batch]
            if unit.direction == "forward":
                self._forward(unit, batch)
                continue
            if unit.micro_batch == count - 1:
                arm(None if unit.chunk == 0 else self._chunks[unit.chunk].module)
            self._backward(unit, batch)
            if unit.chunk == 0:
                collect()
        self._pipeline.finish()
        means = {name: total if name == SAMPLES else total / count for name, total in self._sums.items()}
        self._sums = {}
        return self._pipeline.report(means, self._metrics)

    def _forward(self, unit: Unit, batch: Batch) -> None:
        source = self._pipeline.take(unit)
        if source is not None:
            source.requires_grad_()
        made = self._chunks[unit.chunk].forward(source, batch)
        ends = self._pipeline.ends(unit)
        if isinstance(made, Losses) != ends:
            raise ValueError(
                f"chunk {unit.chunk} {'is the last part of the model and has' if ends else 'is not the last part and'} "
                f"{'no losses' if ends else 'has losses'}"
            )
        if isinstance(made, Losses):
            self._add(made.metrics)
            total = made.total if self._loss_scale is None else self._loss_scale.scale(made.total)
            self._passed[unit.chunk, unit.micro_batch] = _Passed(source, total)
        else:
            self._passed[unit.chunk, unit.micro_batch] = _Passed(source, get_gradient_edge(made))
            self._pipeline.send(unit, made, batch)

    def _backward(self, unit: Unit, batch: Batch) -> None:
        passed = self._passed.pop((unit.chunk, unit.micro_batch))
        gradient = self._pipeline.take(unit)
        result: Any = passed.result  # PyTorch's type stubs know no list that may hold either
        torch.autograd.backward([result], [gradient])
        if passed.source is not None:
            if passed.source.grad is None:
                raise ValueError(f"chunk {unit.chunk} does not depend on what the part of the model before it hands on")
            self._pipeline.send(unit, passed.source.grad, batch)

    def _add(self, metrics: dict[str, Tensor]) -> None:
        if sorted(metrics) != sorted(self._metrics):
            raise ValueError(f"the losses report {sorted(metrics)}, the pipeline was built for {sorted(self._metrics)}")
        for name, value in metrics.items():
            value = value.detach().to(torch.float32)
            self._sums[name] = self._sums[name] + value if name in self._sums else value
