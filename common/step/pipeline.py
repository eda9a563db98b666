"""One stage of a pipeline: forward and backward passes over a step's micro-batches, or forward passes alone.

This module orders the passes and transfers tensors between stages. The passes run in :mod:`common.step.passes` eagerly
or in :mod:`common.step.chunk_graphs` as graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.pipeline.links import Handed, Links, SyntheticLinks
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
from common.step.passes import Chunk, ChunkPasses, EagerPasses
from common.step.train_step import SAMPLES, Arm, ForwardBackward

Result = TypeVar("Result")


class Pipeline:
    """This rank's stage on the axis ``pp``. Building it is collective.

    All ranks of ``pp`` read the same micro-batches; each uses the tensors that its parts of the model need.

    Args:
        chunks: number of model parts on every stage.
        handed: returns shape and dtype of the tensor that each part sends to the next for a micro-batch.

    Attributes:
        first, last: whether this stage has the first or last part of the model.

    Raises:
        ConfigError: see :func:`common.distributed.pipeline.order.check_numbers`.
    """

    def __init__(self, layout: Layout, chunks: int, micro_batches: int, handed: Callable[[Batch], Handed]) -> None:
        self._stages, self._stage, self._chunks = layout.size("pp"), layout.coordinate("pp"), chunks
        check_numbers(self._stages, chunks, micro_batches)
        self._handed, self._device, self._micro_batches = handed, layout.device, micro_batches
        self.first, self.last = self._stage == 0, self._stage == self._stages - 1
        self._links: Links | SyntheticLinks = Links(layout, chunks)
        self._forward_rehearsed = False

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside the context, passes start from random inputs and send nothing, so they never wait for other stages.

        This compiles and loads all kernels before the first receive is posted, on all stages at the same time. Loading
        a kernel may wait for all work on the device (CUDA C++ Programming Guide, Lazy Loading). Without a rehearsal,
        that includes receives whose messages depend on the kernel: a deadlock. The real links are restored even if the
        block fails.
        """
        links = self._links
        assert isinstance(links, Links)
        self._links = SyntheticLinks(links, self._device)
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
        """Return the passes over a step's micro-batches, instead of ``accumulate``.

        They arm a chunk's parameters before its last backward pass, and call ``collect`` after each backward pass of
        the first chunk, which is the stage's last one for a micro-batch.

        Args:
            metrics: names of the metrics that the losses report; only the last stage computes them.
            graphs: records and replays the passes; None runs them eagerly.

        Raises:
            ValueError: the number of chunks differs from the pipeline's.
        """
        if len(chunks) != self._chunks:
            raise ValueError(f"{len(chunks)} chunks where the pipeline has {self._chunks} on every stage")
        if graphs is not None:  # this number fills the pipeline, in whole rounds, and has passes between first and last
            graphs.enough = min(self._micro_batches, 2 * self._stages + (self._stages == 1))
        run = _Step(self, tuple(chunks), tuple(metrics), loss_scale, graphs)
        return run.forward_backward

    def plans(self, chunks: Sequence[Chunk], example: Batch) -> list[ChunkPlan]:
        """Return the capture plan of each chunk. All micro-batches of a step have the example's shapes."""
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
        """Run only forward passes, over any number of micro-batches. Collective over ``pp``.

        The first call also rehearses them (:meth:`rehearsing`).

        Args:
            functions: forward function of each chunk of this stage, as :attr:`Chunk.forward`.
            micro_batches: the same on all stages.

        Returns:
            The results of the last part of the model, one per micro-batch; an empty list on other stages.
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
        """Return the passes of this stage in a step, in order."""
        return order(self._stage, self._stages, self._chunks, micro_batches)

    def begin(self, units: Sequence[Unit], micro_batches: Sequence[Batch]) -> None:
        """Post the first receives for ``units``."""
        for direction, inbox in self._links.inboxes.items():
            wanted = [unit.micro_batch for unit in units if unit.direction == direction and self.receives(unit)]
            inbox.begin([self._handed(micro_batches[number]) for number in wanted])

    def receives(self, unit: Unit) -> bool:
        """Return whether the input of ``unit`` comes from another stage."""
        return receives(self._stage, self._stages, self._chunks, unit)

    def ends(self, unit: Unit) -> bool:
        """Return whether ``unit`` is in the last part of the model in its direction."""
        return follower(self._stage, self._stages, self._chunks, unit) is None

    def take(self, unit: Unit) -> Tensor | None:
        """Return the received input of ``unit``; None in the first part of the model in its direction."""
        return self._links.inboxes[unit.direction].take() if self.receives(unit) else None

    def send(self, unit: Unit, tensor: Tensor, batch: Batch) -> None:
        """Send the result of ``unit`` to the next stage.

        Raises:
            ValueError: shape or dtype differ from the announced ones.
        """
        found, wanted = Handed(tuple(tensor.shape), tensor.dtype), self._handed(batch)
        if found != (tuple(wanted.shape), wanted.dtype):
            raise ValueError(f"chunk {unit.chunk} of stage {self._stage} hands on {found}, {wanted} was announced")
        self._links.outboxes[unit.direction].send(tensor.detach().contiguous())

    def finish(self) -> None:
        """Make the current stream wait until all outgoing messages are sent. On a GPU the host does not wait."""
        self._links.finish()

    def report(self, metrics: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Return metrics whose mean over all stages is the last stage's value: the other stages contribute 0."""
        if self.last:
            return {name: metrics[name] * self._stages for name in names}
        return {name: torch.zeros((), device=self._device) for name in names}


class _Step:
    """The passes of one stage in a training step."""

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
        """Run all passes of a step; return the metrics; see :data:`common.step.train_step.ForwardBackward`."""
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

    def _passes(self, micro_batches: Sequence[Batch]) -> ChunkPasses:
        """Return recorded graphs that fit these micro-batches, or eager passes. Record graphs first if requested."""
        if self._graphs is None:
            return self._eager
        if self._graphs.wanted:
            example = micro_batches[0]
            self._graphs.record(self._pipeline.plans(self._chunks, example), example, self._loss_scale)
        return self._graphs if self._graphs.serves([batch.key for batch in micro_batches]) else self._eager

    def _forward(self, passes: ChunkPasses, unit: Unit, batch: Batch) -> None:
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
