"""Token transfers that overlap with products, through memory that the GPUs of a node map from each other.

A product is cut into one part per rank. For a gather, a rank multiplies its own rows while copy engines fetch the
rows of the others. For a scatter, it multiplies the rows of the others first and sends them while it multiplies its
own rows. Cutting slows down small products, so each call decides by size; between nodes, and on CPUs, collectives are
used.

Every rank has two slots, used in turn. A slot is reused two products later; the barrier of the product in between
ensures that all ranks have read it by then, and ``begin`` adds a barrier between two passes. A barrier is enqueued on a
high-priority stream before the product that it overlaps with, which would otherwise occupy all multiprocessors.

Shapes: see :mod:`common.distributed.tensor_parallel.ranks`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from common.distributed.symmetric_memory import PeerMemory, attempt
from common.distributed.tensor_parallel.ranks import (
    SCALE_STRIDE,
    CollectiveProducts,
    RowProduct,
    TensorParallel,
    TokenProducts,
    Underway,
)
from common.errors import UnsupportedImplementation
from common.ops.operation import AUTO

LEAST_OPERATIONS = 2e11
"""Minimum operations (2 T K N on one rank) of a cut product: 1/3 ms, several times the cost of copies and barriers."""

SLOTS = 2
"""Number of slots per rank; each can hold the largest transferred tensor, all tokens of the residual stream."""

FIRST_CAPACITY = 1 << 20
"""Initial capacity of a slot in bytes, allocated to test whether symmetric memory works."""

HEADER = 256
"""Bytes before the rows of a slot, which store the inverse of their scale."""


class Slot:
    """Part of every rank's memory that all ranks can read and write. The constructor is collective.

    Args:
        capacity: capacity for rows, in bytes.
    """

    def __init__(self, parallel: TensorParallel, capacity: int, device: torch.device, channel: int) -> None:
        assert parallel.group is not None
        self.capacity = capacity
        self._channel = channel
        self._memory = PeerMemory.allocate(HEADER + capacity, parallel.group, device)

    def rows(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a view of the rows in the slot of ``rank``."""
        return self._memory.tensor(rank, shape, dtype, HEADER)

    def scale(self, rank: int) -> Tensor:
        """Return a view of the inverse scale in the slot of ``rank``, 0-d fp32."""
        return self._memory.tensor(rank, (), torch.float32)

    def barrier(self) -> None:
        """Wait, on the current stream, until all ranks have reached this barrier."""
        self._memory.barrier(self._channel)


class SymmetricMemoryProducts(TokenProducts):
    """Products that are cut if they are large, and use collectives otherwise. The constructor is collective.

    Slots grow with the largest transferred tensor. They cannot grow during graph capture, so run every shape once
    before.

    Args:
        parallel: two or more ranks on one machine.
        least_operations: minimum of 2 T K N on one rank at which a product is cut.

    Raises:
        RuntimeError: the GPUs cannot map each other's memory.
    """

    name = "symmetric_memory"

    def __init__(
        self, parallel: TensorParallel, device: torch.device, least_operations: float = LEAST_OPERATIONS
    ) -> None:
        self._parallel, self._device = parallel, device
        self._least_operations = least_operations
        self._collective = CollectiveProducts(parallel)
        self._moving = torch.cuda.Stream(device, priority=-1)
        self._slots: list[Slot] = []
        self._outgrown: list[Slot] = []  # previously captured graphs still use these slots
        self._turn = 0
        self._reserve(FIRST_CAPACITY)

    def begin(self) -> None:
        self._turn = 0
        self._slots[0].barrier()

    def gather_product(
        self,
        x_sK: Tensor,
        scale_inverse: Tensor | None,
        product: RowProduct,
        y_TN: Tensor,
        x_TK: Tensor | None = None,
        scales_R4: Tensor | None = None,
    ) -> None:
        s, K = x_sK.shape
        if not self._cuts(self._parallel.size * s, K, y_TN.shape[1]):
            self._collective.gather_product(x_sK, scale_inverse, product, y_TN, x_TK, scales_R4)
            return
        slot, own = self._next_slot(x_sK.nbytes), self._parallel.index
        slot.rows(own, (s, K), x_sK.dtype).copy_(x_sK)
        if scale_inverse is not None:
            slot.scale(own).copy_(scale_inverse)
        wanted = x_TK is not None
        x_TK = x_sK.new_empty(self._parallel.size * s, K) if x_TK is None else x_TK
        if scales_R4 is None:
            scales_R4 = torch.empty(self._parallel.size, SCALE_STRIDE, dtype=torch.float32, device=self._device)
        scales = scales_R4[:, 0]
        computing, arrived = torch.cuda.current_stream(self._device), {}
        self._moving.wait_stream(computing)
        with torch.cuda.stream(self._moving):
            slot.barrier()
            for rank in self._others():
                self._part(x_TK, rank).copy_(slot.rows(rank, (s, K), x_sK.dtype))
                if scale_inverse is not None:
                    scales[rank].copy_(slot.scale(rank))
                arrived[rank] = self._moving.record_event()
        product(x_sK, scale_inverse, self._part(y_TN, own))
        for rank, event in arrived.items():
            computing.wait_event(event)
            scale = None if scale_inverse is None else scales[rank]
            product(self._part(x_TK, rank), scale, self._part(y_TN, rank))
        if wanted:
            self._part(x_TK, own).copy_(x_sK)
            if scale_inverse is not None:
                scales[own].copy_(scale_inverse)

    def product_scatter(self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor) -> None:
        s, N = self._parallel.own_count(len(x_TK)), y_sN.shape[1]
        if not self._cuts(len(x_TK), x_TK.shape[1], N):
            self._collective.product_scatter(x_TK, scale_inverse, product, y_sN)
            return
        own, shape = self._parallel.index, (self._parallel.size, s, N)
        slot = self._next_slot(self._parallel.size * y_sN.nbytes)
        computing, leaving = torch.cuda.current_stream(self._device), []
        for rank in self._others():
            part_sN = torch.empty_like(y_sN)
            product(self._part(x_TK, rank), scale_inverse, part_sN)
            leaving.append(part_sN)  # keeps the memory alive until the copy has finished
            self._moving.wait_stream(computing)
            with torch.cuda.stream(self._moving):
                slot.rows(rank, shape, y_sN.dtype)[own].copy_(part_sN)
        with torch.cuda.stream(self._moving):
            slot.barrier()
        parts = slot.rows(own, shape, y_sN.dtype)
        product(self._part(x_TK, own), scale_inverse, parts[own])
        computing.wait_stream(self._moving)
        torch.sum(parts, 0, out=y_sN)  # one pass over the parts, with one rounding

    def start_product_scatter(
        self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor
    ) -> Underway:
        """See :class:`TokenProducts`. A cut product is enqueued as a whole, so it does not overlap with later work."""
        if not self._cuts(len(x_TK), x_TK.shape[1], y_sN.shape[1]):
            return self._collective.start_product_scatter(x_TK, scale_inverse, product, y_sN)
        self.product_scatter(x_TK, scale_inverse, product, y_sN)
        return Underway(x_TK, y_sN, None)

    def _others(self) -> Iterator[int]:
        """Yield the other ranks, starting after this rank, so that each rank starts with a different one."""
        for step in range(1, self._parallel.size):
            yield (self._parallel.index + step) % self._parallel.size

    def _part(self, of_all: Tensor, rank: int) -> Tensor:
        """Return the rows of one rank."""
        return of_all.chunk(self._parallel.size)[rank]

    def _next_slot(self, size: int) -> Slot:
        if size > self._slots[0].capacity:
            self._reserve(size)
        self._turn = (self._turn + 1) % SLOTS
        return self._slots[self._turn]

    def _reserve(self, size: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"products that move {size} bytes meet a capture: run their shapes once before it")
        self._outgrown += self._slots
        self._slots = [Slot(self._parallel, size, self._device, channel) for channel in range(SLOTS)]

    def _cuts(self, tokens: int, inputs: int, outputs: int) -> bool:
        return 2.0 * tokens * inputs * outputs >= self._least_operations


PRODUCTS = (SymmetricMemoryProducts.name, CollectiveProducts.name)
"""Implementations that a user can choose, in addition to ``auto``."""


def build_products(parallel: TensorParallel, device: torch.device, requested: str = AUTO) -> TokenProducts:
    """Return the implementation of products with token transfers. Collective; all ranks get the same.

    Args:
        requested: one of ``PRODUCTS``, or ``auto``: symmetric memory if all ranks are on one machine and can map each
            other's memory, else collectives.

    Raises:
        UnsupportedImplementation: the name is unknown, or these ranks cannot use it.
    """
    if requested not in (AUTO, *PRODUCTS):
        names = ", ".join((AUTO, *PRODUCTS))
        raise UnsupportedImplementation(f"unknown movement of tokens {requested!r}; choose one of {names}")
    if requested != CollectiveProducts.name:
        products, reason = _try_symmetric_memory(parallel, device)
        if products is not None:
            return products
        if requested != AUTO:
            raise UnsupportedImplementation(f"movement of tokens by {requested!r} cannot be used: {reason}")
    return CollectiveProducts(parallel)


def _try_symmetric_memory(
    parallel: TensorParallel, device: torch.device
) -> tuple[SymmetricMemoryProducts | None, str | None]:
    """Return the symmetric-memory implementation if every rank can use it, else None and the reason."""
    if parallel.group is None:
        return None, "one rank moves nothing"
    return attempt(lambda: SymmetricMemoryProducts(parallel, device), parallel.group, device)
