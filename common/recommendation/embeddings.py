"""Embeddings of many tables whose rows are sharded over the data-parallel ranks.

The tables are neither parameters nor buffers nor part of a workload's weights, so nothing copies them.
:class:`common.recommendation.embedding_updater.EmbeddingUpdater` trains them: while it is attached and gradients are
enabled, the forward pass passes ids and gradients to it.

Shapes: see :mod:`common.recommendation.exchange`; X = (1 + F) W.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from common.distributed.layout import Layout
from common.errors import ConfigError
from common.ops.embedding_bags import EMBEDDING_BAGS, Bag, Bags, EmbeddingBags
from common.ops.operation import OPTION, OperationRequest, asked_for
from common.recommendation import exchange_over_nodes
from common.recommendation.exchange import Collectives, Exchange, VectorExchange
from common.recommendation.exchange_over_nodes import ExchangeOverNodes
from common.recommendation.peer_transport import build_peer_transport
from common.recommendation.placement import Placement, TableShard, row_wise
from common.recommendation.rare_rows import RareRequest, RareRows
from common.recommendation.row_store import RowStore


@dataclass(frozen=True)
class Lookup:
    """Ids and result of the lookup for a micro-batch.

    Attributes:
        ids_BL: ids of this rank's samples.
        own_NL: ids of all ranks' samples, for the tables of this rank's shards.
        x0_BX: the result; its first W columns are reserved for the bottom's vector.
        local_BL: ids of this rank's samples; for hybrid tables the indices of frequent rows.
        request: the rare rows of hybrid tables; None without such tables.
    """

    ids_BL: Tensor
    own_NL: Tensor
    x0_BX: Tensor
    local_BL: Tensor
    request: RareRequest | None = None


class LookupRecorder(Protocol):
    """Receiver of ids and gradients, which trains the rows."""

    def looked_up(self, lookup: Lookup) -> None:
        """Receive the ids of a micro-batch; called in its forward pass."""

    def differentiated(self, gradient_BX: Tensor) -> None:
        """Receive the gradient of x0; called in the backward pass of the micro-batch."""


class ShardedEmbeddings:
    """Sums of rows for every sample and table, concatenated with the bottom MLP's vector.

    Args:
        plan: placement of the tables over the ranks of the layout's ``dp`` axis.
        layout: the ranks; all other axes have size 1.
        rows_dtype: dtype of the rows: fp32, or fp16, or fp64 for checks.
        implementation: name of an implementation of :mod:`common.ops.embedding_bags`, or ``auto``.
        ranks_per_node: if given, and tables have several shards on one of several nodes, ranks exchange in two steps
            (:mod:`common.recommendation.exchange_over_nodes`).
        overlap: on a GPU, look up, sort and exchange gradients on a side stream.
        peer_batch: if given, the ranks exchange training micro-batches of this number of samples through memory that
            they map from each other (:mod:`common.recommendation.peer_transport`).

    Attributes:
        plan: the placement; on one rank nothing is replicated.
        ops: the chosen implementation.
        choices: text about the implementation and the placement, for the log.
        exchange: exchange with the other ranks in training.
        peer_bytes: bytes of memory that other ranks map.
        store: rows of this rank's shards.
        replicated: rows that all ranks have: the replicated tables, then the frequent rows of hybrid tables.
        bags: bags of ``store``, over the ids of :attr:`Lookup.own_NL`; None if it is empty.
        replicated_bags: bags of ``replicated``, over the ids of :attr:`Lookup.local_BL`; None if it is empty.
        replicated_D: int64, on the device, table numbers of ``replicated_bags``.
        rare: the other rows of hybrid tables; None without such tables.

    Raises:
        ConfigError: plan and layout differ in ranks, the device lacks the memory, or ranks with ``peer_batch`` cannot
            map each other's memory.
        UnsupportedImplementation: the implementation does not exist or does not support these tables.
    """

    def __init__(
        self,
        plan: Placement,
        layout: Layout,
        *,
        dtype: torch.dtype,
        rows_dtype: torch.dtype = torch.float32,
        implementation: str = "auto",
        ranks_per_node: int | None = None,
        overlap: bool = True,
        peer_batch: int | None = None,
    ) -> None:
        if plan.ranks != layout.world_size or layout.size("dp") != layout.world_size:
            raise ConfigError(f"plan: of {plan.ranks} ranks, for a layout of {dict(layout.sizes)}")
        self.plan = plan = plan if plan.ranks > 1 else row_wise(plan.tables, 1)
        self.layout, self.dtype, self._device = layout, dtype, layout.device
        tables = plan.tables
        request = OperationRequest(layout.device, rows_dtype, {"width": tables.width})
        with asked_for(f"{OPTION}.embedding_bags", implementation):
            chosen = EMBEDDING_BAGS.select(implementation, request)
        self.ops: EmbeddingBags = chosen.function
        rank, group, device = layout.rank, layout.group("dp"), layout.device
        steps = ""
        if ranks_per_node is not None and exchange_over_nodes.pays(plan, ranks_per_node):
            self.exchange: VectorExchange = ExchangeOverNodes(plan, layout, ranks_per_node, self.ops, dtype)
            steps = f", exchanged in nodes of {ranks_per_node} first"
        else:
            transport = Collectives(plan, rank, group, torch.empty(0, dtype=dtype, device=device))
            self.exchange = Exchange(plan, rank, transport, self.ops, device)
        self._evaluation_exchange, self.peer_bytes = self.exchange, 0
        if peer_batch is not None and group is not None:
            peers = build_peer_transport(plan, group, peer_batch, dtype, device)
            self.exchange, self.peer_bytes = Exchange(plan, rank, peers, self.ops, device), peers.size
            steps = ", exchanged through peer memory"
        split = sum(len(ranks) > 1 for ranks in plan.holders)
        kinds = f"{split} split, {len(plan.replicated)} replicated"
        if plan.hybrids:
            kinds += f", {len(plan.hybrids)} hybrid"
        where = f"{len(tables)} tables, {kinds} over {plan.ranks} ranks{steps}"
        self.choices = {"embedding_bags": chosen.name, "embeddings": where}
        seed = layout.shared_generator("embedding tables").initial_seed()
        self.store = RowStore(tables, self.exchange.shards, seed, rows_dtype, layout.device)
        whole = [TableShard(table, 0, 1) for table in plan.replicated]
        self.replicated = RowStore(tables, whole, seed, rows_dtype, layout.device, plan.with_frequent)
        self.bags = self.exchange.bags
        rows = [tables.tables[number].rows for number in plan.replicated]
        rows += [len(hybrid.frequent) for hybrid in plan.with_frequent]
        bags = [
            Bag(tables.columns[number], tables.tables[number].hotness, base, size)
            for number, base, size in zip(plan.everywhere, self.replicated.bases, rows, strict=True)
        ]
        self.replicated_bags = Bags(bags, layout.device) if bags else None
        self.replicated_D = torch.tensor(plan.everywhere, dtype=torch.int64, device=layout.device)
        self.rare: RareRows | None = None
        if plan.hybrids:
            self.rare = RareRows(plan, rank, group, self.ops, seed, rows_dtype, device)
        self._recorder: LookupRecorder | None = None
        self._started: Lookup | None = None
        self._stream = torch.cuda.Stream(layout.device) if overlap and layout.device.type == "cuda" else None

    def attach(self, recorder: LookupRecorder) -> None:
        """Pass ids and gradients of forward and backward passes to ``recorder`` from now on."""
        self._recorder = recorder

    def start(self, ids_BL: Tensor) -> None:
        """Start the lookup concurrently with other computations; call :meth:`forward` with the same ids afterwards."""
        training = self._training
        with self.side_stream():
            self._started = self._look_up(ids_BL, training)

    def forward(self, bottom_BW: Tensor, ids_BL: Tensor) -> Tensor:
        """Return one buffer with the bottom's vector and the sums of all tables, in their order: (B, X), contiguous.

        Args:
            bottom_BW: the bottom's vector, in the vectors' dtype; it receives its gradient.
            ids_BL: int32; ids outside of their table are ignored.

        Raises:
            ValueError: the rows are to be trained, but the bottom's vector does not require a gradient.
        """
        lookup, self._started = self._started, None
        if lookup is None or lookup.ids_BL is not ids_BL:
            lookup = self._look_up(ids_BL, self._training)
        else:
            self.join()
        if self._recorder is None or not torch.is_grad_enabled():
            if self.rare is not None and lookup.request is not None:
                self.rare.count(lookup.request)
            lookup.x0_BX[:, : self.plan.tables.width] = bottom_BW
            return lookup.x0_BX
        if not bottom_BW.requires_grad:
            raise ValueError("bottom_BW has no gradient, without which the backward pass never comes to the tables")
        self._recorder.looked_up(lookup)
        x0_BX: Tensor = _JoinedVectors.apply(bottom_BW, lookup.x0_BX, self._recorder)
        return x0_BX

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Check that lookups without training inside this context have enough slots for their rare rows. Collective.

        A context that fails is not checked.

        Raises:
            ConfigError: at the end, on every rank: a hybrid table has too few slots. The message names the table.
        """
        if self.rare is None:
            yield
            return
        self.rare.reset_counts()
        yield
        self.rare.check()

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Run the block on a side stream that first waits for the current stream; :meth:`join` waits for it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for the side stream of :meth:`side_stream`."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @property
    def _training(self) -> bool:
        return self._recorder is not None and torch.is_grad_enabled()

    @torch.no_grad()
    def _look_up(self, ids_BL: Tensor, training: bool) -> Lookup:
        tables, batch = self.plan.tables, len(ids_BL)
        if self.plan.ranks == 1:
            x0_BX = torch.empty(batch, (1 + len(tables)) * tables.width, dtype=self.dtype, device=self._device)
            vectors_BFW = x0_BX.view(batch, 1 + len(tables), tables.width)[:, 1:]
            assert self.bags is not None  # one rank holds all tables
            self.ops.pool(self.store.rows_RW, ids_BL, self.bags, vectors_BFW)
            return Lookup(ids_BL, ids_BL, x0_BX, ids_BL)
        exchange = self.exchange if training else self._evaluation_exchange
        targets, own_NL = exchange.targets(batch), exchange.ids(ids_BL)
        if self.bags is not None:
            self.ops.pool(self.store.rows_RW, own_NL, self.bags, targets.own)
        local_BL, request = ids_BL, None
        if self.rare is not None:
            request = self.rare.request_rows(ids_BL)
            local_BL = request.found.local_BL
            self.rare.sums(request, targets.rare_BHW)
        if self.replicated_bags is not None:
            self.ops.pool(self.replicated.rows_RW, local_BL, self.replicated_bags, targets.everywhere)
        exchange.vectors(targets)
        return Lookup(ids_BL, own_NL, targets.x0_BX, local_BL, request)


class _JoinedVectors(torch.autograd.Function):
    """Writes the bottom's vector into x0, before the vectors of the tables."""

    @staticmethod
    def forward(ctx: Any, bottom_BW: Tensor, x0_BX: Tensor, recorder: LookupRecorder) -> Tensor:
        """Return the complete x0."""
        ctx.recorder, ctx.width = recorder, bottom_BW.shape[1]
        ctx.mark_dirty(x0_BX)
        x0_BX[:, : ctx.width] = bottom_BW
        return x0_BX

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the bottom's gradient, and pass the gradient of x0 to the recorder."""
        gradient_BX = gradients[0].contiguous()
        ctx.recorder.differentiated(gradient_BX)
        return gradient_BX[:, : ctx.width], None, None
