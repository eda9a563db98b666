"""Trains the rows of sharded embeddings, beside the optimizer of the dense network.

Legend: see :mod:`common.recommendation.exchange`; M micro-batches, R rows of a store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import CheckpointError
from common.ops.embedding_bags import AdagradRows, Bags, Rule, SortedKeys
from common.optim.precision import LossScale
from common.recommendation import row_files
from common.recommendation.embeddings import ShardedEmbeddings
from common.recommendation.replicated_update import update_all
from common.recommendation.row_store import RowStore, require_memory


class EmbeddingUpdater:
    """An :class:`common.optim.updater.StreamingUpdater` of all tables.

    The gradient of a row is the sum over all its ids in the global batch, of all ranks and micro-batches; then row and
    state are read and written once. Ids are sorted beside the forward pass that follows the last lookup.

    Args:
        embeddings: the rows. The updater attaches itself.
        rule: of the update.
        schedule: learning rate (0-d float32) from the step counter (0-d int64), on the device.
        grad_divisor: the gradients, summed over all micro-batches and ranks, divided by this are the mean over the
            global batch; as the :class:`common.optim.optimizer.Optimizer`'s.
        micro_batches: of an iteration.
        loss_scale: what the loss was multiplied with; the Optimizer's.
        stochastic_rounding: round rows in fp16 up or down by chance, so that small updates are not lost.

    Attributes:
        loss_scale: as given.

    Raises:
        ValueError: a number without sense.
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
        device, self._wide = rows.device, torch.float64 if rows.dtype == torch.float64 else torch.float32
        self._states = [_state(store, rule, self._wide) for store in (embeddings.store, embeddings.replicated)]
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._learning_rate = torch.zeros((), dtype=torch.float32, device=device)
        self._factor = torch.ones((), dtype=self._wide, device=device)
        by_chance = stochastic_rounding and rows.dtype == torch.float16
        self._rounding = torch.zeros((), dtype=torch.int64, device=device) if by_chance else None
        # Replicated rows are rounded alike everywhere: their bits are those of no rank.
        self._rounding_seed = embeddings.layout.shared_generator("rounding of rows").initial_seed() >> 8
        self._ids: list[tuple[Tensor, Tensor]] = []
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._sorting: tuple[Tensor, ...] = ()
        self._exchanging: Tensor | None = None
        self._keys: tuple[SortedKeys | None, SortedKeys | None] = (None, None)
        self._measured: tuple[Tensor, Tensor, Tensor] | None = None
        embeddings.attach(self)

    def begin(self) -> None:
        """Forget what an earlier iteration left."""
        self._forget()

    def arm(self) -> None:
        """Nothing: gradients are exchanged as they come."""

    def collect(self) -> None:
        """Nothing: every backward pass has left its gradients."""

    @torch.no_grad()
    def looked_up(self, ids_BL: Tensor, own_NL: Tensor) -> None:
        """Keep the ids of a micro-batch; after the last, sort those of all."""
        self._ids.append((ids_BL, own_NL))
        if len(self._ids) == self._micro_batches:
            # Kept until the update: another stream reads them meanwhile.
            self._sorting = tuple(_joined(parts) for parts in zip(*self._ids, strict=True))
            every_NL, every_own_NL = self._sorting
            with self._embeddings.beside():
                own = self._sorted(every_own_NL, self._embeddings.bags)
                replicated = self._sorted(every_NL, self._embeddings.replicated_bags)
            self._keys = (own, replicated)

    @torch.no_grad()
    def differentiated(self, gradient_BX: Tensor) -> None:
        """Bring the gradients of a micro-batch to the ranks that have the rows."""
        embeddings = self._embeddings
        every_BFW = gradient_BX.view(len(gradient_BX), -1, embeddings.plan.tables.width)[:, 1:]
        replicated_BDW = every_BFW.index_select(1, embeddings.replicated_D)
        if embeddings.plan.ranks == 1:
            own_NKW = every_BFW
        elif len(self._gradients) + 1 < self._micro_batches:
            own_NKW = embeddings.exchange.gradients(gradient_BX)
        else:  # beside what is left of the last backward pass
            self._exchanging = gradient_BX  # kept until the update: another stream reads it meanwhile
            with embeddings.beside():
                own_NKW = embeddings.exchange.gradients(gradient_BX)
        self._gradients.append((own_NKW, replicated_BDW))

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Add up the gradients of replicated rows; returns whether a gradient is not finite on any rank: 0-d bool.

        Raises:
            RuntimeError: the iteration had another number of forward or backward passes than micro-batches.
        """
        if not len(self._ids) == len(self._gradients) == self._micro_batches:
            raise RuntimeError(
                f"{len(self._ids)} forward and {len(self._gradients)} backward passes came to the embeddings, "
                f"{self._micro_batches} micro-batches were announced"
            )
        self._embeddings.join()
        self._learning_rate.copy_(self._schedule(self._step))
        self._factor.fill_(1.0 / self._divisor)
        if self.loss_scale is not None:
            self._factor.div_(self.loss_scale.value)
        own_NKW, replicated_NDW = (_joined(parts) for parts in zip(*self._gradients, strict=True))
        rows_RW = self._embeddings.replicated.rows_RW
        # One buffer, and so one reduction: the sums, and behind them how many ranks have a gradient that is not finite.
        sums = torch.zeros(rows_RW.numel() + 1, dtype=self._wide, device=rows_RW.device)
        sum_RW = sums[:-1].view_as(rows_RW)
        if self._keys[1] is not None:
            self._embeddings.ops.dense_gradient(self._keys[1], replicated_NDW, sum_RW)
        sums[-1] = not_finite(own_NKW) | not_finite(replicated_NDW)
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        self._measured = own_NKW, sum_RW, sums[-1] != 0
        return self._measured[2]

    @torch.no_grad()
    def write(self, allowed: Tensor) -> None:
        """Update all rows that had ids; nothing changes where ``allowed`` (0-d bool) is false."""
        assert self._measured is not None, "measure comes before write"
        own_NKW, sum_RW, _ = self._measured
        embeddings, rate, factor = self._embeddings, self._learning_rate, self._factor
        ranks = embeddings.plan.ranks
        if self._keys[0] is not None:
            rows_RW, seed = embeddings.store.rows_RW, self._next_seed(embeddings.layout.rank, ranks)
            embeddings.ops.update(
                self._keys[0], own_NKW, rows_RW, self._states[0], self._rule, rate, factor, allowed, seed
            )
        if len(sum_RW):
            rows_RW, seed = embeddings.replicated.rows_RW, self._next_seed(ranks, ranks)
            update_all(rows_RW, self._states[1], sum_RW, self._rule, rate, factor, allowed, seed)
        self._step.add_(allowed)
        self._forget()

    def materialize(self) -> None:
        """Nothing: rows are where they are looked up."""

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """Rows, their state, and the step counter."""
        stores = (("rows", self._embeddings.store), ("replicated_rows", self._embeddings.replicated))
        named = [("step", self._step)]
        for (name, store), state in zip(stores, self._states, strict=True):
            named += [(name, store.rows_RW)] + ([] if state is None else [(f"{name}.state", state)])
        return named

    def state_dict(self) -> dict[str, Any]:
        """The step counter, and what the tables are; rows and state are streamed."""
        return {"step": self._step.cpu().clone(), "tables": row_files.description(self._embeddings.plan.tables)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the step counter.

        Raises:
            CheckpointError: the checkpoint has other tables.
        """
        row_files.check_tables(state.get("tables"), self._embeddings.plan.tables)
        if not isinstance(state.get("step"), Tensor):
            raise CheckpointError("the checkpoint is of another model: it has no step counter of embeddings")
        self._step.copy_(state["step"])

    def save_shards(self, folder: Path) -> None:
        """Write this rank's rows and their state into files of its own in ``folder``; rank 0 the replicated ones too.

        Raises:
            OSError: they cannot be written.
        """
        stores = [(self._embeddings.store, self._states[0])]
        if self._embeddings.layout.rank == 0:
            stores.append((self._embeddings.replicated, self._states[1]))
        names = [table.name for table in self._embeddings.plan.tables.tables]
        row_files.write(folder, names, self._embeddings.layout.rank, stores)

    def load_shards(self, folder: Path) -> None:
        """Read this rank's rows and their state from the files of all ranks that wrote into ``folder``.

        Raises:
            CheckpointError: a file is missing or damaged, or of other tables, dtypes or another rule.
        """
        stores = [(self._embeddings.store, self._states[0]), (self._embeddings.replicated, self._states[1])]
        row_files.read(folder, self._embeddings.plan.tables, stores)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """``learning_rate`` of the last update."""
        return {"learning_rate": self._learning_rate}

    def _sorted(self, ids_NL: Tensor, bags: Bags | None) -> SortedKeys | None:
        return None if bags is None else self._embeddings.ops.sort(ids_NL, bags)

    def _next_seed(self, place: int, places: int) -> Tensor | None:
        """A seed of the ``places`` + 1 ones of this step."""
        if self._rounding is None:
            return None
        return self._rounding.copy_(self._step).mul_(places + 1).add_(self._rounding_seed + place)

    def _forget(self) -> None:
        self._ids, self._gradients, self._measured = [], [], None
        self._sorting, self._exchanging, self._keys = (), None, (None, None)


def _state(store: RowStore, rule: Rule, dtype: torch.dtype) -> Tensor | None:
    """What Adagrad has added up so far: nothing yet."""
    if not isinstance(rule, AdagradRows):
        return None
    require_memory(store.rows_RW.numel() * dtype.itemsize, "Adagrad's state", store.rows_RW.device)
    return torch.zeros_like(store.rows_RW, dtype=dtype)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def not_finite(values: Tensor) -> Tensor:
    """Whether a number is infinite or none at all: 0-d bool, found in one pass."""
    if not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    return ~torch.linalg.vector_norm(values, ord=math.inf).isfinite()
