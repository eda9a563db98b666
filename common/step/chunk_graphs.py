"""Separate CUDA graphs for each chunk's passes, for steps with so many micro-batches that one graph would be too large.

Each chunk has one graph for its forward pass and one for its backward pass; the pipeline order replays them. Messages,
the optimizer and work that happens once per step run eagerly: weights are awaited and cast before a chunk's first
forward pass, and its gradients go to the reduction after its last backward pass.

A backward graph reads the activations at the addresses where the forward graph wrote them. A chunk therefore has a pair
of graphs, a *slot*, for each micro-batch in flight (:func:`common.distributed.pipeline.order.slots`), with its own
input buffers. Outputs are copied, because they may still be in transfer when the graph is replayed again.

Micro-batches with different keys have slots of their own. A number of a slot stands for memory that all keys share,
because one micro-batch at a time is in flight there.

Collectives inside a pass, such as those of tensor parallelism, are in its graph. NCCL runs captured and eager
collectives of one group in launch order, which is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from common.data.batches import Batch
from common.distributed.pipeline.links import Handed
from common.distributed.pipeline.order import Unit, slots
from common.nn.main_gradient import finish
from common.optim.precision import LossScale
from common.step.capture import Recorded, Recorder
from common.step.passes import Chunk, Made, Passed, backward_pass, forward_pass


@dataclass(frozen=True)
class ChunkPlan:
    """Data needed to capture the passes of a chunk.

    Attributes:
        slots: number of micro-batches that the chunk has in flight at once.
        source: shape and dtype of the input from the previous part of the model; None for the first part.
        result: shape and dtype of the output to the next part of the model; None for the last part.
    """

    chunk: Chunk
    slots: int
    source: Handed | None
    result: Handed | None


@dataclass
class _Slot:
    """Graphs of a chunk's two passes for one micro-batch in flight, with their static inputs and outputs.

    Attributes:
        source, batch, gradient: static inputs; None where the chunk has no such input.
        passed: state that the forward pass keeps for the backward pass.
        made: output of the forward pass.
        source_gradient: output of the backward pass; None in the first part of the model.
        finished: parameters whose gradients the backward pass completes, in order of completion.
    """

    number: int
    chunk: Chunk
    source: Tensor | None
    batch: Batch
    gradient: Tensor | None
    passed: Passed | None = None
    made: Made = field(default_factory=dict)
    source_gradient: Tensor | None = None
    finished: tuple[nn.Parameter, ...] = ()
    forward: Recorded | None = None
    backward: Recorded | None = None

    def run_forward(self, loss_scale: LossScale | None) -> Made:
        """Run the forward pass on the static inputs."""
        self.passed, made = forward_pass(
            self.number, self.chunk, self.source, self.batch, self.gradient is None, loss_scale
        )  # fmt: skip
        return made.detach() if isinstance(made, Tensor) else made

    def run_backward(self) -> Tensor | None:
        """Run the backward pass on the static inputs; return the gradient of its input, None in the first part."""
        self.chunk.begin_backward()
        assert self.passed is not None
        passed, self.passed = self.passed, None
        return backward_pass(self.number, passed, self.gradient)


class ChunkGraphs:
    """Graphs of the passes of a stage's chunks; once recorded, they implement :class:`common.step.passes.ChunkPasses`.

    They run iterations with any number of micro-batches that the pipeline allows and that needs no further slots.

    Attributes:
        enough: micro-batches of a short iteration that still replays every kind of graph, at most as many as in
            training; set by the pipeline.
    """

    def __init__(self) -> None:
        self.enough = 1
        self._slots: dict[Hashable, dict[tuple[int, int], _Slot]] = {}
        self._slot_of: dict[tuple[int, int], int] = {}
        self._in_flight: dict[tuple[int, int], _Slot] = {}
        self._recorder: Recorder | None = None

    @contextlib.contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Make the iteration inside the context record its passes before it replays them. Updaters must not write."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    @property
    def wanted(self) -> bool:
        """Whether the current iteration must record its passes."""
        return self._recorder is not None

    @property
    def count(self) -> int:
        """Number of graphs."""
        return 2 * sum(map(len, self._slots.values()))

    def serves(self, keys: Sequence[Hashable]) -> bool:
        """Return whether the recorded graphs can run micro-batches with these batch keys."""
        return all(key in self._slots for key in keys)

    def record(self, plans: Sequence[ChunkPlan], example: Batch, loss_scale: LossScale | None) -> None:
        """Record all passes over micro-batches with the key of ``example``.

        Args:
            plans: one per chunk, with the same number of slots for every key.
            example: a micro-batch with the shapes of all others of its key.

        Raises:
            CaptureError: an operation cannot be captured.
        """
        assert self._recorder is not None
        recorded: dict[tuple[int, int], _Slot] = {}
        device = next(iter(example.tensors.values())).device
        for number, plan in enumerate(plans):
            plan.chunk.prepare()
            for index in range(plan.slots):
                recorded[number, index] = _new_slot(number, plan, example, device)
        # Recordings of a pool reuse memory that is free when the previous one ends. Activations must survive until
        # their backward pass, so each forward graph has a pool. Backward graphs keep nothing and share one pool. They
        # are captured last: what they free then goes to pools from which only the next key's graphs allocate.
        for (number, index), slot in recorded.items():
            what, work = f"the forward pass of chunk {number}", functools.partial(slot.run_forward, loss_scale)
            slot.forward, slot.made = self._recorder.record(work, what, ("forward", number, index))
        for (number, _), slot in recorded.items():
            what = f"the backward pass of chunk {number}"
            with _noted(slot.chunk.module) as finished:
                slot.backward, slot.source_gradient = self._recorder.record(slot.run_backward, what, "backward")
            slot.finished = tuple(finished)
        self._slots[example.key] = recorded

    def begin(self, units: Sequence[Unit]) -> None:
        """Assign a slot to each micro-batch of these passes; see :class:`common.step.passes.ChunkPasses`.

        Raises:
            ValueError: more micro-batches of a chunk are in flight than it has slots.
        """
        self._slot_of, self._in_flight = slots(units), {}
        recorded = next(iter(self._slots.values()))  # all keys have equally many slots
        for (number, micro_batch), index in self._slot_of.items():
            if (number, index) not in recorded:
                raise ValueError(f"chunk {number} has no graphs for so many micro-batches as come with {micro_batch}")

    def forward(self, unit: Unit, source: Tensor | None, batch: Batch) -> Made:
        """Replay a forward pass; return a copy of its output or metrics.

        See :class:`common.step.passes.ChunkPasses`.
        """
        at = unit.chunk, unit.micro_batch
        slot = self._in_flight[at] = self._slots[batch.key][unit.chunk, self._slot_of[at]]
        if unit.micro_batch == 0:
            slot.chunk.prepare()
        static = list(slot.batch.tensors.values())
        torch._foreach_copy_(static, [batch.tensors[name] for name in slot.batch.tensors], non_blocking=True)
        if slot.source is not None:
            assert source is not None
            with torch.no_grad():
                slot.source.copy_(source)
        assert slot.forward is not None
        slot.forward.replay()
        if isinstance(slot.made, Tensor):
            return slot.made.clone(memory_format=torch.contiguous_format)
        return {name: value.clone() for name, value in slot.made.items()}

    def backward(self, unit: Unit, gradient: Tensor | None, final: bool) -> Tensor | None:
        """Replay a backward pass; return a copy of the gradient of its input, or None.

        See :class:`common.step.passes.ChunkPasses`.
        """
        slot = self._in_flight.pop((unit.chunk, unit.micro_batch))
        if slot.gradient is not None:
            assert gradient is not None
            slot.gradient.copy_(gradient)
        assert slot.backward is not None
        slot.backward.replay()
        handed_back = slot.source_gradient
        if handed_back is not None:
            handed_back = handed_back.clone(memory_format=torch.contiguous_format)
        if final:
            for parameter in slot.finished:
                finish(parameter)
        return handed_back

    def close(self) -> None:
        """Free the graphs."""
        for recorded in self._slots.values():
            for slot in recorded.values():
                for graph in (slot.forward, slot.backward):
                    if graph is not None:
                        graph.reset()
        self._slots.clear()


def _new_slot(number: int, plan: ChunkPlan, example: Batch, device: torch.device) -> _Slot:
    batch = Batch({name: tensor.clone() for name, tensor in example.tensors.items()}, example.samples, example.key)
    source = gradient = None
    if plan.source is not None:
        source = torch.zeros(plan.source.shape, dtype=plan.source.dtype, device=device, requires_grad=True)
    if plan.result is not None:
        gradient = torch.zeros(plan.result.shape, dtype=plan.result.dtype, device=device)
    return _Slot(number, plan.chunk, source, batch, gradient)


@contextlib.contextmanager
def _noted(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield a list that fills with the parameters of ``module`` whose gradients complete in the context, in order.

    The hooks are removed even if the context fails.
    """
    noted: list[nn.Parameter] = []
    seen: set[int] = set()

    def note(parameter: Tensor) -> None:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            noted.append(own[id(parameter)])

    own = {id(parameter): parameter for parameter in module.parameters() if parameter.requires_grad}
    hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in own.values()]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()
