"""Tokens that move while the product beside them runs, through memory that the GPUs of a node map from each other.

A product is cut by ranks. Gathering, a rank's own rows are multiplied while copy engines bring its neighbours'; to be
scattered, the rows of its neighbours are multiplied first, and travel while its own are. Small products lose by being
cut, so each call decides by its size; between nodes, and on CPUs, collectives remain.

Every rank has two slots, used in turn. The product after the next writes into a slot again, and between the two lies a
barrier that no rank reaches before it has read what the first had left; ``begin`` has one for the seam between two
passes. A barrier is entered on a stream of higher priority before its product is, which would leave it no room.

Shapes: see :mod:`common.distributed.tensor_parallel.products`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from common.distributed.symmetric_memory import PeerMemory, attempt
from common.distributed.tensor_parallel.products import SCALE_STRIDE, CollectiveProducts, RowProduct, TokenProducts
from common.distributed.tensor_parallel.ranks import TensorParallel, Underway
from common.errors import UnsupportedImplementation
from common.ops.operation import AUTO

LEAST_OPERATIONS = 2e11
"""Operations of a rank's product from which on it is cut: at some 600 TFLOP/s a third of a millisecond, several times
what the copies and barriers of a cut cost."""

SLOTS = 2
"""Of a rank, each with room for the largest tensor that is moved: all tokens of the residual stream."""

FIRST_CAPACITY = 1 << 20
"""Bytes of a slot with which it is tried whether there can be any."""

HEADER = 256
"""Bytes before the rows of a slot, for the inverse of their scale."""


class Slot:
    """A piece of every rank's memory that all ranks can read and write. Collective to build.

    Args:
        parallel: the ranks.
        capacity: bytes of rows.
        device: this rank's.
        channel: of its barriers.
    """

    def __init__(self, parallel: TensorParallel, capacity: int, device: torch.device, channel: int) -> None:
        assert parallel.group is not None
        self.capacity = capacity
        self._channel = channel
        self._memory = PeerMemory.allocate(HEADER + capacity, parallel.group, device)

    def rows(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The rows that lie on a rank."""
        return self._memory.tensor(rank, shape, dtype, HEADER)

    def scale(self, rank: int) -> Tensor:
        """The scale that lies on a rank, 0-d fp32."""
        return self._memory.tensor(rank, (), torch.float32)

    def barrier(self) -> None:
        """Wait, on the current stream, until all ranks have come here."""
        self._memory.barrier(self._channel)


class SymmetricMemoryProducts:
    """Cut products for large sizes, collectives for others. Collective to build.

    Slots grow with the largest tensor that is moved; they cannot grow while a graph is captured, so every shape runs
    once before.

    Args:
        parallel: the ranks, two or more, on one machine.
        device: this rank's GPU.
        least_operations: 2 T K N of a rank's product from which on it is cut.

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
        self._outgrown: list[Slot] = []  # graphs that were captured with them go on using them
        self._turn = 0
        self._reserve(FIRST_CAPACITY)

    def begin(self) -> None:
        """See :class:`common.distributed.tensor_parallel.products.TokenProducts`."""
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
        """See :class:`common.distributed.tensor_parallel.products.TokenProducts`."""
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
        """See :class:`common.distributed.tensor_parallel.products.TokenProducts`."""
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
            leaving.append(part_sN)  # until it has left, its memory must not become another tensor's
            self._moving.wait_stream(computing)
            with torch.cuda.stream(self._moving):
                slot.rows(rank, shape, y_sN.dtype)[own].copy_(part_sN)
        with torch.cuda.stream(self._moving):
            slot.barrier()
        parts = slot.rows(own, shape, y_sN.dtype)
        product(self._part(x_TK, own), scale_inverse, parts[own])
        computing.wait_stream(self._moving)
        torch.sum(parts, 0, out=y_sN)  # one pass, rounded once

    def start_product_scatter(
        self, x_TK: Tensor, scale_inverse: Tensor | None, product: RowProduct, y_sN: Tensor
    ) -> Underway:
        """See :class:`common.distributed.tensor_parallel.products.TokenProducts`: what is cut has moved already."""
        if not self._cuts(len(x_TK), x_TK.shape[1], y_sN.shape[1]):
            return self._collective.start_product_scatter(x_TK, scale_inverse, product, y_sN)
        self.product_scatter(x_TK, scale_inverse, product, y_sN)
        return Underway(x_TK, y_sN, None)

    def _others(self) -> Iterator[int]:
        """The other ranks, each rank beginning with another one."""
        for step in range(1, self._parallel.size):
            yield (self._parallel.index + step) % self._parallel.size

    def _part(self, of_all: Tensor, rank: int) -> Tensor:
        """The rows of one rank."""
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
"""What a user may choose between, beside ``auto``."""


def build_products(parallel: TensorParallel, device: torch.device, requested: str = AUTO) -> TokenProducts:
    """How the tokens of split layers move. Collective; all ranks get the same.

    Args:
        parallel: the ranks.
        device: of the layers.
        requested: one of ``PRODUCTS``, or ``auto``: symmetric memory where all ranks are on one machine and can map
            each other's memory, else collectives.

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
    """Build it where every rank can, or say why not."""
    if parallel.group is None:
        return None, "one rank moves nothing"
    return attempt(lambda: SymmetricMemoryProducts(parallel, device), parallel.group, device)
