"""Two chunks of a pipeline stage, and the results of all units of its order for random inputs."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.batches import Batch
from common.distributed.pipeline.links import Handed
from common.distributed.pipeline.order import Unit, order, slots_of_chunks
from common.step.chunk_graphs import ChunkGraphs, ChunkPlan
from common.step.passes import Chunk, ChunkPasses, EagerPasses

B, E, CHUNKS = 48, 64, 2
HANDED = Handed((B, E), torch.float64)
STAGE, STAGES, MICRO_BATCHES = 0, 4, 12
"""A stage with many micro-batches of both chunks in flight, in slots that change."""


class Layers(nn.Module):
    """Layers of different widths, so that one can reuse memory that another has freed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        widths = [E, 3 * E, 5 * E, 2 * E, E]
        self.layers = nn.ModuleList(nn.Linear(a, b).double() for a, b in itertools.pairwise(widths))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)
        self.to(device)

    def forward(self, x_BE: Tensor, shift_E: Tensor) -> Tensor:
        """Return a residual branch with many short-lived tensors."""
        y = F.layer_norm(x_BE + shift_E, (E,))
        for layer in self.layers:
            y = torch.tanh(layer(y) * 0.5).sin() * 1.5
        return x_BE + y


class Stage:
    """The chunks of a stage, and the units that run them eagerly, or with ``graphs``."""

    def __init__(self, device: torch.device, graphs: ChunkGraphs | None = None) -> None:
        self._device = device
        self.models = [Layers(seed, device) for seed in range(CHUNKS)]
        self.chunks = [
            Chunk(model, lambda x, batch, model=model: model(x, batch.tensors["shift"])) for model in self.models
        ]
        for model in self.models:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.units = order(STAGE, STAGES, CHUNKS, MICRO_BATCHES)
        self.graphs = graphs
        self.passes: ChunkPasses = EagerPasses(self.chunks, [False] * CHUNKS, None) if graphs is None else graphs

    def record(self) -> None:
        """Record the passes, and zero the gradients afterwards."""
        assert self.graphs is not None
        counts = slots_of_chunks(self.units)
        plans = [ChunkPlan(chunk, counts[number], HANDED, HANDED) for number, chunk in enumerate(self.chunks)]
        self.graphs.record(plans, self._batch(0), None)
        for model in self.models:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()

    def run(self) -> dict[Unit, Tensor]:
        """Run all units, and return the result of each."""
        self.passes.begin(self.units)
        made: dict[Unit, Tensor] = {}
        for unit in self.units:
            given = self._drawn(unit)
            if unit.direction == "forward":
                found = self.passes.forward(unit, given, self._batch(unit.micro_batch))
            else:
                found = self.passes.backward(unit, given, unit.micro_batch == MICRO_BATCHES - 1)
            assert isinstance(found, Tensor)
            made[unit] = found.detach()
        return made

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters."""
        every = [parameter.grad for model in self.models for parameter in model.parameters()]
        return [gradient for gradient in every if gradient is not None]

    def _drawn(self, unit: Unit) -> Tensor:
        seed = 1000 * (unit.direction == "backward") + 100 * unit.chunk + unit.micro_batch
        drawn = torch.randn(HANDED.shape, generator=torch.Generator().manual_seed(seed), dtype=HANDED.dtype)
        return drawn.to(self._device)

    def _batch(self, micro_batch: int) -> Batch:
        return Batch({"shift": torch.full((E,), 0.1 * micro_batch, dtype=HANDED.dtype, device=self._device)}, B)
