"""Training of the rows of sharded embeddings, in parallel to the optimizer of the dense network.

Shapes: see :mod:`common.recommendation.exchange`; M micro-batches, R rows of a store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import CheckpointError
from common.ops.embedding_bags import AdagradRows, Bags, Rule, SortedKeys
from common.ops.embedding_bags.reference import round_by_chance
from common.optim.precision import LossScale
from common.recommendation import row_files
from common.recommendation.embeddings import Lookup, ShardedEmbeddings
from common.recommendation.row_store import RowStore, require_memory


class EmbeddingUpdater:
    """An :class:`common.optim.updater.StreamingUpdater` for all tables.

    The gradient of a row is the sum over all its ids in the global batch, over all ranks and micro-batches. Row and
    state are then read and written once. Ids are sorted concurrently with the forward pass after the last lookup.

    Args:
        embeddings: the rows. The updater attaches itself.
        schedule: maps the step counter (0-d int64) to the learning rate (0-d float32), on the device.
        grad_divisor: divisor that turns the gradients, summed over all micro-batches and ranks, into the mean over
            the global batch; see :class:`common.optim.optimizer.Optimizer`.
        micro_batches: micro-batches per iteration.
        loss_scale: scale of the loss, shared with the Optimizer.
        stochastic_rounding: round fp16 rows stochastically, so that small updates are not lost.

    Raises:
        ValueError: a number is out of its range.
        ConfigError: the device lacks the memory.
    """

    def __init__(
        self,
        embeddings: ShardedEmbeddings,
        rule: Rule,
        schedule: Callable[[Tensor], Tensor],
        *,
        grad_divisor: float,
        micro_batches: int = 1,
        loss_scale: LossScale | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        if not 0 < grad_divisor < math.inf or micro_batches < 1:
            raise ValueError(f"grad_divisor={grad_divisor}, micro_batches={micro_batches}: they must be positive")
        self._embeddings, self._rule, self._schedule = embeddings, rule, schedule
        self._divisor, self._micro_batches, self.loss_scale = grad_divisor, micro_batches, loss_scale
        self._group, rows = embeddings.layout.group("dp"), embeddings.store.rows_RW
        device, self._sum_dtype = rows.device, torch.float64 if rows.dtype == torch.float64 else torch.float32
        self._stores = [("rows", embeddings.store), ("replicated_rows", embeddings.replicated)]
        if embeddings.rare is not None:
            self._stores.append(("rare_rows", embeddings.rare.store))
        self._states = [_state(store, rule, self._sum_dtype) for _, store in self._stores]
        # Shards with too few slots by hybrid table in the last iteration, summed over lookups and ranks.
        self._overflow_H = torch.zeros(len(embeddings.plan.hybrids), dtype=self._sum_dtype, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._learning_rate = torch.zeros((), dtype=torch.float32, device=device)
        self._factor = torch.ones((), dtype=self._sum_dtype, device=device)
        by_chance = stochastic_rounding and rows.dtype == torch.float16
        self._rounding = torch.zeros((), dtype=torch.int64, device=device) if by_chance else None
        # All ranks round replicated rows with the same random bits, which differ from those of every rank's shards.
        self._rounding_seed = embeddings.layout.shared_generator("rounding of rows").initial_seed() >> 8
        self._lookups: list[Lookup] = []
        self._replicated: list[Tensor] = []
        self._rare_gradients: list[Tensor] = []
        self._sorting: tuple[Tensor, ...] = ()
        self._exchanging: Tensor | None = None
        self._not_finite: list[Tensor] = []
        self._keys: tuple[SortedKeys | None, SortedKeys | None, SortedKeys | None] = (None, None, None)
        self._reduced: tuple[Tensor, Tensor] | None = None
        self._own_NKW: Tensor | None = None
        self._sends = True
        embeddings.attach(self)

    def begin(self) -> None:
        """Discard the data of an earlier iteration."""
        self._reset()

    def arm(self, part: nn.Module | None = None) -> None:
        """Do nothing: every micro-batch exchanges its gradients."""

    def collect(self) -> None:
        """Do nothing: every backward pass has stored its gradients."""

    @torch.no_grad()
    def looked_up(self, lookup: Lookup) -> None:
        """Store the ids of a micro-batch; after the last one, sort the ids of all."""
        self._lookups.append(lookup)
        if len(self._lookups) == self._micro_batches:
            rare = self._embeddings.rare
            # Keep references until the update, because another stream reads them.
            every_NL = _joined([found.local_BL for found in self._lookups])
            every_own_NL = _joined([found.own_NL for found in self._lookups])
            request = [found.request.row_Q1 for found in self._lookups if found.request is not None]
            self._sorting = (every_NL, every_own_NL, *([_joined(request)] if request else []))
            with self._embeddings.side_stream():
                own = self._sorted(every_own_NL, self._embeddings.bags)
                replicated = self._sorted(every_NL, self._embeddings.replicated_bags)
                self._keys = own, replicated, None if rare is None else rare.sort(self._sorting[2])

    @torch.no_grad()
    def differentiated(self, gradient_BX: Tensor) -> None:
        """Send the gradients of a micro-batch to the ranks that have the rows; after the last, sum replicated rows.

        The sums run concurrently with the rest of the last backward pass, that of the bottom MLP.
        """
        embeddings = self._embeddings
        last = len(self._replicated) + 1 == self._micro_batches
        every_BFW = gradient_BX.view(len(gradient_BX), -1, embeddings.plan.tables.width)[:, 1:]
        replicated_BDW = every_BFW.index_select(1, embeddings.replicated_D)
        if embeddings.plan.ranks == 1:
            own_NKW = self._kept(every_BFW)
            with embeddings.side_stream():
                self._not_finite.append(not_finite(own_NKW))
        elif not last:
            self._exchange(gradient_BX, every_BFW)
        else:
            self._exchanging = gradient_BX  # keep a reference until the update, because another stream reads it
            with embeddings.side_stream():
                self._exchange(gradient_BX, every_BFW)
        self._replicated.append(replicated_BDW)
        if last and len(self._lookups) == self._micro_batches:
            with embeddings.side_stream():
                self._reduced = self._reduce_replicated()

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Let the stream wait for sums of replicated rows; return whether any rank's gradient is not finite (0-d bool).

        The result is also true if a rank had too few slots for its rare rows; :meth:`check_limits` reports that case.

        Raises:
            RuntimeError: the iteration had another number of forward or backward passes than micro-batches.
        """
        if not len(self._lookups) == len(self._replicated) == self._micro_batches:
            raise RuntimeError(
                f"{len(self._lookups)} forward and {len(self._replicated)} backward passes came to the embeddings, "
                f"{self._micro_batches} micro-batches were announced"
            )
        self._embeddings.join()
        self._learning_rate.copy_(self._schedule(self._step))
        self._factor.fill_(1.0 / self._divisor)
        if self.loss_scale is not None:
            self._factor.div_(self.loss_scale.applied)
        assert self._reduced is not None, "the last backward pass has left the sums"
        _, counts = self._reduced
        self._overflow_H.copy_(counts[1:])
        return (counts != 0).any()

    def _reduce_replicated(self) -> tuple[Tensor, Tensor]:
        """Sum over all ranks the gradients of replicated rows (R, W), and the counts that :meth:`measure` checks."""
        rows_RW = self._embeddings.replicated.rows_RW
        replicated_NDW = _joined(self._replicated)
        # One buffer, so one reduction: the sums, then how many ranks have a gradient that is not finite, then how many
        # have too few slots for each hybrid table.
        values = rows_RW.numel()
        sums = torch.zeros(values + 1 + len(self._overflow_H), dtype=self._sum_dtype, device=rows_RW.device)
        sum_RW = sums[:values].view_as(rows_RW)
        if self._keys[1] is not None:
            self._embeddings.ops.dense_gradient(self._keys[1], replicated_NDW, sum_RW)
        sums[values] = torch.stack([*self._not_finite, not_finite(replicated_NDW)]).any()
        for lookup in self._lookups:
            if lookup.request is not None:
                sums[values + 1 :].add_(lookup.request.found.overflow_H)
        if self._group is not None:
            dist.all_reduce(sums if self._sends else sums[values:], group=self._group)
        return sum_RW, sums[values:]

    @torch.no_grad()
    def write(self, allowed: Tensor) -> None:
        """Update all rows that had ids; nothing changes where ``allowed`` (0-d bool) is false."""
        assert self._own_NKW is not None, "measure comes before write"
        assert self._reduced is not None
        own_NKW, (sum_RW, _) = self._own_NKW, self._reduced
        embeddings, rate, factor = self._embeddings, self._learning_rate, self._factor
        ranks, rank = embeddings.plan.ranks, embeddings.layout.rank
        if self._keys[0] is not None:
            rows_RW, seed = embeddings.store.rows_RW, self._next_seed(rank)
            embeddings.ops.update(
                self._keys[0], own_NKW, rows_RW, self._states[0], self._rule, rate, factor, allowed, seed
            )
        if embeddings.rare is not None and self._keys[2] is not None:
            rows_RW, seed = embeddings.rare.store.rows_RW, self._next_seed(ranks + 1 + rank)
            gradient_Q1W, state_RW = _joined(self._rare_gradients), self._states[2]
            embeddings.ops.update(
                self._keys[2], gradient_Q1W, rows_RW, state_RW, self._rule, rate, factor, allowed, seed
            )
        if len(sum_RW):
            rows_RW, seed = embeddings.replicated.rows_RW, self._next_seed(ranks)
            update_all(rows_RW, self._states[1], sum_RW, self._rule, rate, factor, allowed, seed)
        self._step.add_(allowed)
        self._reset()

    def stop_sending(self) -> None:
        """Send no gradients of replicated rows from the next iteration on; those of sharded rows are still sent."""
        self._sends = False

    @torch.no_grad()
    def materialize(self) -> None:
        """Copy frequent rows of hybrid tables to their positions in the shards; other rows are always up to date."""
        rare = self._embeddings.rare
        if rare is not None:
            rare.copy_frequent(self._embeddings.replicated.rows_RW, rare.store.rows_RW)
            if self._states[1] is not None and self._states[2] is not None:
                rare.copy_frequent(self._states[1], self._states[2])

    def check_limits(self, metrics: MutableMapping[str, float]) -> None:
        """Remove this updater's counts from the metrics of an iteration.

        Raises:
            ConfigError: a rank had too few slots for its rare rows. The message names the table.
        """
        overflows = [metrics.pop(name) for name in self._limits]
        if self._embeddings.rare is not None:
            self._embeddings.rare.refuse(overflows)

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """Return rows, their state, and the step counter."""
        named = [("step", self._step)]
        for (name, store), state in zip(self._stores, self._states, strict=True):
            named += [(name, store.rows_RW)] + ([] if state is None else [(f"{name}.state", state)])
        return named

    def state_dict(self) -> dict[str, Any]:
        """Return the step counter and a description of the tables; rows and state are streamed."""
        return {"step": self._step.cpu().clone(), "tables": row_files.description(self._embeddings.plan.tables)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the step counter.

        Raises:
            CheckpointError: the checkpoint has other tables.
        """
        row_files.check_tables(state.get("tables"), self._embeddings.plan.tables)
        step = state.get("step")
        if not isinstance(step, Tensor) or step.shape != self._step.shape:
            raise CheckpointError("the checkpoint is of another model: it has no step counter of embeddings")
        self._step.copy_(step)

    def save_shards(self, folder: Path) -> None:
        """Write this rank's rows and their state into separate files in ``folder``; rank 0 adds replicated tables.

        Frequent rows are written with the shards, into which :meth:`materialize` copied them.

        Raises:
            OSError: they cannot be written.
        """
        stores = self._stored()
        if self._embeddings.layout.rank != 0:
            del stores[1]
        names = [table.name for table in self._embeddings.plan.tables.tables]
        row_files.write(folder, names, self._embeddings.layout.rank, stores)

    def load_shards(self, folder: Path) -> None:
        """Read this rank's rows and their state from the files of all ranks in ``folder``.

        Raises:
            CheckpointError: a file is missing or damaged, or has other tables or dtypes, or another rule's state.
        """
        row_files.read(folder, self._embeddings.plan.tables, self._stored())

    @property
    def metrics(self) -> dict[str, Tensor]:
        """``learning_rate`` of the last update, and for every hybrid table the number of shards with too few slots."""
        return {"learning_rate": self._learning_rate, **dict(zip(self._limits, self._overflow_H, strict=True))}

    @property
    def _limits(self) -> list[str]:
        plan = self._embeddings.plan
        return [f"too_few_slots/{plan.tables.tables[hybrid.table].name}" for hybrid in plan.hybrids]

    def _stored(self) -> list[row_files.Stored]:
        return [(store, state) for (_, store), state in zip(self._stores, self._states, strict=True)]

    def _exchange(self, gradient_BX: Tensor, every_BFW: Tensor) -> None:
        """Store the gradients of this rank's shards and of its rare rows."""
        own_NKW = self._kept(self._embeddings.exchange.gradients(gradient_BX))
        self._not_finite.append(not_finite(own_NKW))
        rare, request = self._embeddings.rare, self._lookups[len(self._replicated)].request
        if rare is not None and request is not None:
            gradient_BHW = every_BFW.index_select(1, rare.tables_H)
            gradient_Q1W = rare.gradients(request, gradient_BHW)
            self._rare_gradients.append(gradient_Q1W)
            self._not_finite += [not_finite(gradient_BHW), not_finite(gradient_Q1W)]

    def _kept(self, own_NKW: Tensor) -> Tensor:
        """Keep the gradients of a micro-batch until the update: of several micro-batches a copy, one after the other.

        Returns:
            The gradients that are kept.
        """
        number = len(self._replicated)
        if self._micro_batches == 1:
            self._own_NKW = own_NKW
        elif number < self._micro_batches:  # otherwise measure reports the number
            if self._own_NKW is None:
                self._own_NKW = own_NKW.new_empty(self._micro_batches * len(own_NKW), *own_NKW.shape[1:])
            own_NKW = self._own_NKW[number * len(own_NKW) :][: len(own_NKW)].copy_(own_NKW)
        return own_NKW

    def _sorted(self, ids_NL: Tensor, bags: Bags | None) -> SortedKeys | None:
        return None if bags is None else self._embeddings.ops.sort(ids_NL, bags)

    def _next_seed(self, site: int) -> Tensor | None:
        """Return the seed for this step and for the rows that ``site`` stands for.

        A rank's number is the sequence of its shards, ``ranks`` that of replicated rows, ``ranks + 1 + rank`` that of
        a rank's rare rows.
        """
        if self._rounding is None:
            return None
        plan = self._embeddings.plan
        sites = 2 * plan.ranks if plan.hybrids else plan.ranks
        return self._rounding.copy_(self._step).mul_(sites + 1).add_(self._rounding_seed + site)

    def _reset(self) -> None:
        self._lookups, self._replicated, self._not_finite = [], [], []
        self._reduced, self._own_NKW = None, None
        self._sorting, self._exchanging, self._keys, self._rare_gradients = (), None, (None, None, None), []


def _state(store: RowStore, rule: Rule, dtype: torch.dtype) -> Tensor | None:
    """Return the initial state of Adagrad, zeros; None for other rules."""
    if not isinstance(rule, AdagradRows):
        return None
    require_memory(store.rows_RW.numel() * dtype.itemsize, "Adagrad's state", store.rows_RW.device)
    return torch.zeros_like(store.rows_RW, dtype=dtype)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def not_finite(values: Tensor) -> Tensor:
    """Return whether a value is infinite or NaN: 0-d bool, computed in one pass."""
    if not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    return ~torch.linalg.vector_norm(values, ord=math.inf).isfinite()


@torch.no_grad()
def update_all(
    rows_RW: Tensor,
    state_RW: Tensor | None,
    gradient_RW: Tensor,
    rule: Rule,
    learning_rate: Tensor,
    grad_factor: Tensor,
    write: Tensor,
    rounding_seed: Tensor | None = None,
) -> None:
    """Update all rows that every rank has, by the summed gradients of all ranks. There are few, so all are updated.

    A row with gradient 0 does not change.

    Args:
        rows_RW: updated in place; fp64, fp32 or fp16.
        state_RW: fp32 (fp64 for fp64 rows), updated in place; None for a rule without a state.
        gradient_RW: sums over all ids of each row, in the state's dtype.
        learning_rate: 0-d fp32, on the device.
        grad_factor: 0-d, on the device; factor on the sums.
        write: 0-d bool, on the device; if false, rows and state do not change.
        rounding_seed: 0-d int64, on the device, for stochastic rounding of fp16 rows; None rounds to nearest.
    """
    step_RW = gradient_RW * grad_factor
    if isinstance(rule, AdagradRows):
        assert state_RW is not None, "Adagrad has a state"
        added_RW = state_RW + step_RW * step_RW
        state_RW.copy_(torch.where(write, added_RW, state_RW))
        step_RW = step_RW / (added_RW.sqrt() + rule.epsilon)
    after_RW = rows_RW.to(gradient_RW.dtype) - learning_rate * step_RW
    if rounding_seed is not None and rows_RW.dtype == torch.float16:
        after_RW = round_by_chance(after_RW, rounding_seed, torch.arange(len(rows_RW), device=rows_RW.device))
    rows_RW.copy_(torch.where(write, after_RW.to(rows_RW.dtype), rows_RW))
