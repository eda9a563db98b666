"""A stage of a pipeline: forward and backward over the micro-batches of a step, or forward alone.

What its chunks do is in :mod:`common.step.passes`, eagerly, and in :mod:`common.step.chunk_graphs`, in graphs of their
own. Here is what they are given, and where what they make goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.pipeline.links import Handed, Links, StandIns
from common.distributed.pipeline.order import (
    Unit,
    check_numbers,
    follower,
    forward_order,
    order,
    receives,
    slots_of_chunks,
)
from common.optim.precision import LossScale
from common.step.chunk_graphs import ChunkGraphs, ChunkPlan
from common.step.passes import Chunk, EagerPasses, Passes
from common.step.train_step import SAMPLES, Arm, ForwardBackward

Result = TypeVar("Result")


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
        self._handed, self._device, self._micro_batches = handed, layout.device, micro_batches
        self.first, self.last = self._stage == 0, self._stage == self._stages - 1
        self._links: Links | StandIns = Links(layout, chunks)
        self._forward_rehearsed = False

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within it this stage's passes begin from noise, and what they make goes nowhere.

        A kernel is compiled and loaded where it is launched first, and loading may wait for all that runs on the device
        (CUDA C++ Programming Guide, Lazy Loading): for a receive, too, whose message may be made of what that kernel is
        to make. So all kernels are launched once before the first receive is posted. Stages then compile at the same
        time, and not one after the other.
        """
        links = self._links
        assert isinstance(links, Links)
        self._links = StandIns(links, self._device)
        try:
            yield
        finally:
            self._links = links

    def forward_backward(
        self,
        chunks: Sequence[Chunk],
        metrics: Sequence[str],
        loss_scale: LossScale | None = None,
        graphs: ChunkGraphs | None = None,
    ) -> ForwardBackward:
        """Forward and backward over the micro-batches of a step, in the place of ``accumulate``.

        A chunk's parameters are armed before its last backward pass. ``collect`` is called after each backward pass of
        the first chunk, which is the stage's last one of a micro-batch.

        Args:
            chunks: of this stage.
            metrics: names of what the losses report, which other stages cannot see.
            loss_scale: what the loss is multiplied with before the backward pass.
            graphs: where graphs of the passes are recorded, and replayed from then on; None runs them eagerly.

        Raises:
            ValueError: not as many chunks as the pipeline was built for.
        """
        if len(chunks) != self._chunks:
            raise ValueError(f"{len(chunks)} chunks where the pipeline has {self._chunks} on every stage")
        if graphs is not None:  # that fill the pipeline, in whole rounds, and are more than the first and the last
            graphs.enough = min(self._micro_batches, 2 * self._stages + (self._stages == 1))
        run = _Step(self, tuple(chunks), tuple(metrics), loss_scale, graphs)
        return run.forward_backward

    def plans(self, chunks: Sequence[Chunk], example: Batch) -> list[ChunkPlan]:
        """What graphs of chunks need to know, for the micro-batches of a training step, all of which are as this."""
        counts = slots_of_chunks(self.order(self._micro_batches))
        handed, plans = self._handed(example), []
        for number, chunk in enumerate(chunks):
            unit = Unit("forward", number, 0)
            source, result = self.receives(unit), not self.ends(unit)
            plans.append(ChunkPlan(chunk, counts[number], handed if source else None, handed if result else None))
        return plans

    @torch.no_grad()
    def forward(
        self, functions: Sequence[Callable[[Tensor | None, Batch], Tensor | Result]], micro_batches: Sequence[Batch]
    ) -> list[Result]:
        """The forward pass alone, of any number of micro-batches; collective over ``pp``.

        The first time it is rehearsed (:meth:`rehearsing`).

        Args:
            functions: for each chunk of this stage what it does, as :attr:`Chunk.forward`.
            micro_batches: the same on all stages.

        Returns:
            What the last part of the model returns, for every micro-batch; nothing on other stages.
        """
        if self._stages > 1 and not self._forward_rehearsed:
            self._forward_rehearsed = True
            with self.rehearsing():
                self._forward(functions, micro_batches)
        return self._forward(functions, micro_batches)

    def _forward(
        self, functions: Sequence[Callable[[Tensor | None, Batch], Tensor | Result]], micro_batches: Sequence[Batch]
    ) -> list[Result]:
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
        self,
        pipeline: Pipeline,
        chunks: tuple[Chunk, ...],
        metrics: tuple[str, ...],
        loss_scale: LossScale | None,
        graphs: ChunkGraphs | None,
    ) -> None:
        self._pipeline, self._chunks, self._metrics, self._loss_scale = pipeline, chunks, metrics, loss_scale
        ends = [pipeline.ends(Unit("forward", number, 0)) for number in range(len(chunks))]
        self._eager, self._graphs = EagerPasses(chunks, ends, loss_scale), graphs
        self._sums: dict[str, Tensor] = {}

    def forward_backward(
        self, micro_batches: Sequence[Batch], arm: Arm, collect: Callable[[], None]
    ) -> dict[str, Tensor]:
        """See :data:`common.step.train_step.ForwardBackward`."""
        self._sums = {}
        count = len(micro_batches)
        units = self._pipeline.order(count)
        passes = self._passes(micro_batches)
        passes.begin(units)
        self._pipeline.begin(units, micro_batches)
        for unit in units:
            batch = micro_batches[unit.micro_batch]
            if unit.direction == "forward":
                self._forward(passes, unit, batch)
                continue
            final = unit.micro_batch == count - 1
            if final:
                arm(None if unit.chunk == 0 else self._chunks[unit.chunk].module)
            gradient = passes.backward(unit, self._pipeline.take(unit), final)
            if gradient is not None:
                self._pipeline.send(unit, gradient, batch)
            del gradient
            if unit.chunk == 0:
                collect()
        self._pipeline.finish()
        means = {name: total if name == SAMPLES else total / count for name, total in self._sums.items()}
        self._sums = {}
        return self._pipeline.report(means, self._metrics)

    def _passes(self, micro_batches: Sequence[Batch]) -> Passes:
        """Graphs of the passes, if there are any of these micro-batches; those that are wanted are recorded."""
        if self._graphs is None:
            return self._eager
        if self._graphs.wanted:
            example = micro_batches[0]
            self._graphs.record(self._pipeline.plans(self._chunks, example), example, self._loss_scale)
        return self._graphs if self._graphs.serves([batch.key for batch in micro_batches]) else self._eager

    def _forward(self, passes: Passes, unit: Unit, batch: Batch) -> None:
        made = passes.forward(unit, self._pipeline.take(unit), batch)
        if isinstance(made, Tensor):
            self._pipeline.send(unit, made, batch)
        else:
            self._add(made)

    def _add(self, metrics: dict[str, Tensor]) -> None:
        if sorted(metrics) != sorted(self._metrics):
            raise ValueError(f"the losses report {sorted(metrics)}, the pipeline was built for {sorted(self._metrics)}")
        for name, value in metrics.items():
            value = value.detach().to(torch.float32)
            self._sums[name] = self._sums[name] + value if name in self._sums else value


def accumulate_chunk(
    layout: Layout,
    chunk: Chunk,
    metrics: Sequence[str],
    micro_batches: int,
    loss_scale: LossScale | None,
    graphs: ChunkGraphs,
) -> ForwardBackward:
    """What :func:`common.step.train_step.accumulate` does, by graphs of the two passes over one micro-batch.

    Args:
        layout: the ranks, which have the whole model each.
        chunk: the model.
        metrics: names of what the losses report.
        micro_batches: of a training step.
        loss_scale: what the loss is multiplied with before the backward pass.
        graphs: where they are recorded.
    """
    pipeline = Pipeline(layout, 1, micro_batches, lambda batch: Handed((), torch.float32))  # which nobody hands on
    return pipeline.forward_backward([chunk], metrics, loss_scale, graphs)
