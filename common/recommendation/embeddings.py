"""Embeddings of many tables whose rows the data-parallel ranks hold together.

The tables are no parameters, no buffers, and no part of a workload's weights: nothing copies them. Who trains them is
:class:`common.recommendation.embedding_updater.EmbeddingUpdater`; while one is attached and gradients are on, the
forward pass leaves it what it needs.

Legend: see :mod:`common.recommendation.exchange`; X = (1 + F) W.
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
from common.recommendation.exchange import Exchange, Meeting
from common.recommendation.exchange_over_nodes import ExchangeOverNodes
from common.recommendation.placement import Plan, Shard, row_wise
from common.recommendation.rare_rows import Asked, RareRows
from common.recommendation.row_store import RowStore


@dataclass(frozen=True)
class Lookup:
    """What was looked up for a micro-batch.

    Attributes:
        ids_BL: ids of this rank's samples.
        own_NL: ids of all ranks' samples, of the tables of this rank's shards.
        x0_BX: the result, whose first W columns wait for the bottom's vector.
        local_BL: ids of this rank's samples, of hybrid tables those of their frequent rows.
        asked: the rare rows of hybrid tables; None where there are no such tables.
    """

    ids_BL: Tensor
    own_NL: Tensor
    x0_BX: Tensor
    local_BL: Tensor
    asked: Asked | None = None


class Recorder(Protocol):
    """Who trains the rows."""

    def looked_up(self, lookup: Lookup) -> None:
        """Called in the forward pass of a micro-batch."""

    def differentiated(self, gradient_BX: Tensor) -> None:
        """Called in the backward pass of the micro-batch, with the gradient of x0."""


class ShardedEmbeddings:
    """Sums of rows for every sample and table, beside a vector of the sample's own.

    Args:
        plan: of the tables over the ranks of the layout's ``dp`` axis.
        layout: the ranks; no other axis has several.
        dtype: of the vectors, which ranks send each other.
        rows_dtype: of the rows: fp32, or fp16, or fp64 for checks.
        implementation: of :mod:`common.ops.embedding_bags`: ``auto`` or a name.
        ranks_per_node: with it, ranks on several nodes whose tables have several shards on one exchange in two steps
            (:mod:`common.recommendation.exchange_over_nodes`).
        overlap: on a GPU, look up, sort and exchange gradients on a stream beside the dense network's.

    Attributes:
        plan: as given; of one rank, nothing is replicated.
        layout, dtype: as given.
        ops: the chosen implementation.
        choices: operation to its implementation, in words, for the log.
        exchange: with the other ranks.
        store, replicated: the rows of this rank's shards, and those that all ranks have: the replicated tables, then
            the frequent rows of hybrid ones.
        bags: of the store, over the ids of :attr:`Lookup.own_NL`; None where it is empty.
        replicated_bags: of the other, over the ids of :attr:`Lookup.local_BL`; None where it is empty.
        replicated_D: int64, on the device, the numbers of the tables of these bags.
        rare: the other rows of hybrid tables; None where there are no such tables.

    Raises:
        ConfigError: plan and layout differ in ranks, or the device lacks the memory.
        UnsupportedImplementation: there is no such implementation, or it cannot serve these tables.
    """

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        *,
        dtype: torch.dtype,
        rows_dtype: torch.dtype = torch.float32,
        implementation: str = "auto",
        ranks_per_node: int | None = None,
        overlap: bool = True,
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
        self.exchange: Meeting = Exchange(plan, layout.rank, layout.group("dp"), self.ops, layout.device)
        steps = ""
        if ranks_per_node is not None and exchange_over_nodes.pays(plan, ranks_per_node):
            self.exchange = ExchangeOverNodes(plan, layout, ranks_per_node, self.ops)
            steps = f", exchanged in nodes of {ranks_per_node} first"
        split = sum(len(ranks) > 1 for ranks in plan.holders)
        kinds = f"{split} split, {len(plan.replicated)} replicated"
        if plan.hybrids:
            kinds += f", {len(plan.hybrids)} hybrid"
        where = f"{len(tables)} tables, {kinds} over {plan.ranks} ranks{steps}"
        self.choices = {"embedding_bags": chosen.name, "embeddings": where}
        seed = layout.shared_generator("embedding tables").initial_seed()
        self.store = RowStore(tables, self.exchange.shards, seed, rows_dtype, layout.device)
        whole = [Shard(table, 0, 1) for table in plan.replicated]
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
            group = layout.group("dp")
            self.rare = RareRows(plan, layout.rank, group, self.ops, seed, rows_dtype, layout.device)
        self._recorder: Recorder | None = None
        self._started: Lookup | None = None
        self._side = torch.cuda.Stream(layout.device) if overlap and layout.device.type == "cuda" else None

    def attach(self, recorder: Recorder) -> None:
        """Let ``recorder`` have all that forward and backward passes leave from now on."""
        self._recorder = recorder

    def start(self, ids_BL: Tensor) -> None:
        """Begin to look up beside the computations before :meth:`forward`, which is to be called with the same ids."""
        with self.beside():
            self._started = self._look_up(ids_BL)

    def forward(self, bottom_BW: Tensor, ids_BL: Tensor) -> Tensor:
        """One buffer with the bottom's vector and the sums of all tables, in their order.

        Args:
            bottom_BW: of the vectors' dtype; its gradient is handed on.
            ids_BL: int32; ids outside of their table count for nothing.

        Returns:
            (B, X), contiguous.

        Raises:
            ValueError: the rows are to be trained, but the bottom's vector has no gradient to be asked for.
        """
        lookup, self._started = self._started, None
        if lookup is None or lookup.ids_BL is not ids_BL:
            lookup = self._look_up(ids_BL)
        else:
            self.join()
        if self._recorder is None or not torch.is_grad_enabled():
            if self.rare is not None and lookup.asked is not None:
                self.rare.count(lookup.asked)
            lookup.x0_BX[:, : self.plan.tables.width] = bottom_BW
            return lookup.x0_BX
        if not bottom_BW.requires_grad:
            raise ValueError("bottom_BW has no gradient, without which the backward pass never comes to the tables")
        self._recorder.looked_up(lookup)
        x0_BX: Tensor = _Joined.apply(bottom_BW, lookup.x0_BX, self._recorder)
        return x0_BX

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Lookups inside that nothing is trained from have slots enough for their rare rows. Collective.

        Raises:
            ConfigError: at the end, on every rank: a hybrid table has too few; it names the table.
        """
        if self.rare is None:
            yield
            return
        self.rare.forget()
        yield
        self.rare.check()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """A stream of its own that begins where the current one is; :meth:`join` waits for it."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """Let the current stream wait for what was begun :meth:`beside`."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    @torch.no_grad()
    def _look_up(self, ids_BL: Tensor) -> Lookup:
        tables, batch = self.plan.tables, len(ids_BL)
        x0_BX = torch.empty(batch, (1 + len(tables)) * tables.width, dtype=self.dtype, device=self._device)
        vectors_BFW = x0_BX.view(batch, 1 + len(tables), tables.width)[:, 1:]
        if self.plan.ranks == 1:
            assert self.bags is not None  # one rank holds all tables
            self.ops.pool(self.store.rows_RW, ids_BL, self.bags, vectors_BFW)
            return Lookup(ids_BL, ids_BL, x0_BX, ids_BL)
        own_NL = self.exchange.ids(ids_BL)
        own_NKW = x0_BX.new_empty(len(own_NL), len(self.exchange.shards), tables.width)
        if self.bags is not None:
            self.ops.pool(self.store.rows_RW, own_NL, self.bags, own_NKW)
        here = len(self.plan.everywhere)
        local_BL, asked = ids_BL, None
        replicated_BDW = x0_BX.new_empty(batch, len(self.plan.own_sums), tables.width)
        if self.rare is not None:
            asked = self.rare.ask(ids_BL)
            local_BL = asked.found.local_BL
            self.rare.sums(asked, replicated_BDW[:, here:])
        if self.replicated_bags is not None:
            self.ops.pool(self.replicated.rows_RW, local_BL, self.replicated_bags, replicated_BDW[:, :here])
        self.exchange.vectors(own_NKW, replicated_BDW, vectors_BFW)
        return Lookup(ids_BL, own_NL, x0_BX, local_BL, asked)


class _Joined(torch.autograd.Function):
    """Puts the bottom's vector before those of the tables."""

    @staticmethod
    def forward(ctx: Any, bottom_BW: Tensor, x0_BX: Tensor, recorder: Recorder) -> Tensor:
        """x0, complete."""
        ctx.recorder, ctx.width = recorder, bottom_BW.shape[1]
        ctx.mark_dirty(x0_BX)
        x0_BX[:, : ctx.width] = bottom_BW
        return x0_BX

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The bottom's gradient; the recorder gets that of the tables."""
        gradient_BX = gradients[0].contiguous()
        ctx.recorder.differentiated(gradient_BX)
        return gradient_BX[:, : ctx.width], None, None
