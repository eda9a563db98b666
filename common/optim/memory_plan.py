"""Estimated GPU memory of training, before anything is allocated, and how many layers have to recompute activations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from common.config.schema import RunConfig
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.optim.groups import shard_ranks
from common.optim.peer_exchange import COPY_ENGINES
from common.optim.precision import gradient_dtype

RESERVED = 4_000_000_000
"""Bytes for CUDA's context (0.4 GB), library workspaces and allocator fragmentation, measured on an H200."""

COMMUNICATORS = 1_000_000_000
"""Bytes of NCCL's buffers outside PyTorch's allocator; 0.8 GB were measured for data parallelism on two GPUs."""

STATE = "weights, gradients and optimizer"
KEPT = "kept for the backward pass"
TRANSPOSED = "transposed weights"


def reserved(alone: bool) -> int:
    """Return the bytes outside PyTorch's allocator; without communicators if the rank is ``alone``."""
    return RESERVED + (0 if alone else COMMUNICATORS)


@dataclass(frozen=True)
class MemoryPlan:
    """Planned bytes on one GPU.

    Attributes:
        parts: bytes by category, named for people.
        recomputed: number of layers that recompute something, or of other steps of recomputation; ``parts`` exclude
            the bytes that this saves.
        transposed: number of layers that also keep their FP8 weights transposed.
        recomputation: description for people of what is recomputed; empty if nothing is.
        capacity: bytes of the GPU's memory; None if the plan is an estimate without scratch buffers.
    """

    parts: Mapping[str, float]
    recomputed: int
    transposed: int
    recomputation: str
    capacity: int | None

    @property
    def total(self) -> float:
        """Sum of all categories in bytes."""
        return sum(self.parts.values())

    def in_words(self) -> str:
        """Return a description for people, in GB."""
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in self.parts.items() if size)
        listed += f"; {self.recomputation}" if self.recomputation else ""
        listed += f"; {self.transposed} layers keep their weights transposed, too" if self.transposed else ""
        of = " and some of scratch" if self.capacity is None else f" of {self.capacity / 1e9:.1f}"
        return f"{self.total / 1e9:.1f} GB{of} ({listed})"


@dataclass(frozen=True, kw_only=True)
class TrainedWeights:
    """Sizes that determine the memory of a trained weight with AdamW.

    Attributes:
        itemsize: bytes of an element of weights and activations.
        master_bytes: bytes of a weight's master; 0 without separate masters.
        shards: number of ranks over which masters, moments and the update are sharded.
        staged: number of gradient shards of other ranks that a rank has memory for; 1 for the sum of its own shard.
        gradient_bytes: bytes of an element of a gradient.
    """

    itemsize: int
    master_bytes: int
    shards: int
    staged: int = 1
    gradient_bytes: int = 2

    def weight_bytes(self) -> float:
        """Return the bytes of a weight, its gradient, master and moments.

        Sharding adds a copy of the shard's weights, and ``staged`` of its gradients.
        """
        both, moments = self.itemsize + self.gradient_bytes, 2 * max(4, self.itemsize)
        copies = self.itemsize + self.staged * self.gradient_bytes if self.shards > 1 else 0
        return both + (self.master_bytes + moments + copies) / self.shards

    def state(self, parameters: int, trains: bool) -> int:
        """Return the bytes of weights and, on a rank that trains, of gradients, masters and moments."""
        return round(parameters * (self.weight_bytes() if trains else self.itemsize))


def trained_weights(cfg: RunConfig, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of :class:`TrainedWeights` for weights of ``dtype`` on the ranks of ``layout``."""
    optimizer, half = cfg.optimizer, dtype.itemsize == 2
    remainders = optimizer.masters == "remainder" and dtype == torch.bfloat16
    shards = shard_ranks(optimizer.shard, layout, cfg.ranks_per_node) if layout.role == "train" else 1
    return {
        "itemsize": dtype.itemsize,
        "master_bytes": (2 if remainders else 4) if half else 0,
        "shards": shards,
        "staged": max(shards - 1, 1) if optimizer.exchange == COPY_ENGINES else 1,
        "gradient_bytes": gradient_dtype(dtype, optimizer.gradients).itemsize,
    }


class PlannedMemory(ABC):
    """Memory of one rank that :func:`plan` fits into a GPU."""

    recomputes: ClassVar[str]
    """What a layer can recompute."""
    remedies: ClassVar[str]
    """Options that save memory."""
    fewer: ClassVar[str] = "model.layers"
    """Option for the number of layers."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """Number of layers that keep anything, or of other steps by which recomputation can save memory."""

    def recomputation(self, recomputed: int) -> str:
        """Return a description for people of what ``recomputed`` layers recompute; empty if there are none."""
        return f"{recomputed} layers recompute {self.recomputes}" if recomputed else ""

    def transposed(self) -> int:
        """Return the bytes of one layer's transposed weights. Default: 0, no layer keeps them."""
        return 0

    @abstractmethod
    def parts(self, recomputed: int, transposed: int) -> dict[str, float]:
        """Return the bytes by category, given how many layers recompute, and keep their weights transposed."""


def capacity_of(device: torch.device) -> int:
    """Return the bytes of a GPU's memory."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def plan(workspace: PlannedMemory, capacity: int, recomputed: int | None, transposed: int | None) -> MemoryPlan:
    """Fit the memory of a rank into ``capacity`` bytes.

    Args:
        capacity: bytes of the GPU's memory.
        recomputed: number of layers that recompute; None for as few as possible.
        transposed: number of layers that also keep their FP8 weights transposed; None for as many as fit into the
            remaining memory.

    Raises:
        ConfigError: the work does not fit. The message gives sizes and remedies.
    """
    layers = workspace.layers
    kept_transposed = min(transposed or 0, layers) if workspace.transposed() else 0

    def planned(count: int) -> MemoryPlan:
        return MemoryPlan(
            workspace.parts(count, kept_transposed), count, kept_transposed, workspace.recomputation(count), capacity
        )

    if recomputed is None:
        recomputed = next((count for count in range(layers) if planned(count).total <= capacity), layers)
    recomputed = min(recomputed, layers)
    if transposed is None and workspace.transposed():
        kept_transposed = min(layers, int(max(0, capacity - planned(recomputed).total)) // workspace.transposed())
    found = planned(recomputed)
    if found.total > capacity:
        raise ConfigError(
            f"this layout needs {found.in_words()}: {(found.total - capacity) / 1e9:.1f} GB are missing; "
            f"use {workspace.remedies}, or fewer {workspace.fewer}"
        )
    return found
