"""Split of a row of tokens over the ranks of the ``cp`` axis; each rank holds an early and a late chunk.

Under a causal mask later tokens attend to more keys. The row is cut into 2 R equal chunks, and rank r of R holds chunks
r and 2 R - 1 - r, which balances the work. All other operations of a decoder work token by token and do not change.
One collective gathers keys and values instead of a ring, because they are small with few key/value heads.

Each chunk of a rank needs one attention call: its queries attend to the keys from the start of the row to the end of
the chunk. The n queries are the last n of the m positions, so the causal mask is aligned at its bottom right: query i
sees the first m - n + i + 1 keys.

Shapes: B rows, S tokens of a whole row, L = S / R tokens per row on one rank, n queries and m keys of one attention
call, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.distributed.layout import Layout
from common.errors import ConfigError
from common.ops.causal_attention.reference import DROPPED, CausalAttention, Saved

AXIS = "cp"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``attend(q_BnHD, k_BmKD, v_BmKD) -> o_BnHD``: differentiable causal attention, aligned at the bottom right."""


@dataclass(frozen=True)
class ContextSplit:
    """Assignment of a row's chunks to ranks. A single rank holds the whole row and needs no process group.

    Attributes:
        row_length: number of tokens in a whole row, S.
        index: position of this rank in the group.
        group: process group of the ranks; None for a single rank.

    Raises:
        ConfigError: the row cannot be cut into 2 R equal chunks.
    """

    row_length: int
    ranks: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.ranks:
            raise ValueError(f"rank {self.index} of {self.ranks} does not exist")
        if (self.group is None) != (self.ranks == 1):
            raise ValueError(f"{self.ranks} ranks and {'no group' if self.group is None else 'a group'}")
        if self.ranks > 1 and self.row_length % (2 * self.ranks):
            raise ConfigError(
                f"layout.cp={self.ranks} splits a row into {2 * self.ranks} equal chunks, and a row of "
                f"{self.row_length} tokens is not a multiple of them: choose a cp whose double divides the row"
            )

    @classmethod
    def from_layout(cls, layout: Layout, row_length: int) -> ContextSplit:
        """Return the split over the ``cp`` axis of ``layout``. Collective.

        Args:
            row_length: number of tokens in a whole row.

        Raises:
            ConfigError: twice the size of the axis does not divide the row.
        """
        return cls(row_length, layout.size(AXIS), layout.coordinate(AXIS), layout.group(AXIS))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) positions in the row of this rank's chunks, in local order."""
        if self.ranks == 1:
            return ((0, self.row_length),)
        size = self.row_length // (2 * self.ranks)
        return tuple((c * size, (c + 1) * size) for c in (self.index, 2 * self.ranks - 1 - self.index))

    @property
    def local_length(self) -> int:
        """Return L, the number of tokens per row on this rank."""
        return self.row_length // self.ranks

    @property
    def local_chunks(self) -> tuple[slice, ...]:
        """Return the slice of each chunk within this rank's tokens, in the order of :attr:`spans`."""
        size = self.local_length // len(self.spans)
        return tuple(slice(i * size, (i + 1) * size) for i in range(len(self.spans)))

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions in the row of this rank's tokens, in local order: (L,) int64."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.spans])

    def own_tokens(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return a copy of this rank's L tokens along ``dim``.

        Args:
            whole: tensor with the S tokens of whole rows along ``dim``.
        """
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in self.spans], dim)

    def gather_kv(self, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, S, K, D) of whole rows; backward sums over ranks. Both passes are collective."""
        if self.ranks == 1:
            return k_BLKD, v_BLKD
        k_BSKD, v_BSKD = _GatherKeysValues.apply(k_BLKD, v_BLKD, self)
        return k_BSKD, v_BSKD

    def all_gather_kv(self, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of whole rows, (B, S, K, D): :meth:`gather_kv` without autograd. Collective."""
        if self.ranks == 1:
            return k_BLKD, v_BLKD
        B, L, K, D = k_BLKD.shape
        R, C = self.ranks, L // 2
        own = torch.stack((k_BLKD, v_BLKD))
        gathered = own.new_empty(R, 2, B, 2, C, K, D)
        dist.all_gather_into_tensor(gathered.view(R * 2, B, L, K, D), own, group=self.group)
        whole = own.new_empty(2, B, 2 * R, C, K, D)
        for rank in range(R):
            for half, chunk in enumerate((rank, 2 * R - 1 - rank)):
                whole[:, :, chunk] = gathered[rank, :, :, half]
        k_BSKD, v_BSKD = whole.view(2, B, R * L, K, D)
        return k_BSKD, v_BSKD

    def start_reduce_scatter_kv(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
        """Start an asynchronous sum of the key and value gradients over all ranks. Collective.

        Args:
            pieces: pairs of key and value gradients (B, m, K, D), one pair for each of one or two chunks of this rank's
                queries. They cover the first m tokens of a row; m is a multiple of the chunk length.

        Returns:
            Function that waits for the sum and returns the gradients (B, L, K, D) of this rank's keys and values.
        """
        if self.ranks == 1:
            (piece,) = pieces
            return lambda: piece
        B, _, K, D = pieces[0][0].shape
        R, C = self.ranks, self.local_length // 2
        sharded = pieces[0][0].new_empty(R, 2, B, 2, C, K, D)
        for which in range(2):
            for rank in range(R):
                for half, chunk in enumerate((rank, 2 * R - 1 - rank)):
                    span = slice(chunk * C, (chunk + 1) * C)
                    parts = [piece[which][:, span] for piece in pieces if piece[which].shape[1] > chunk * C]
                    _sum_into(sharded[rank, which, :, half], parts)
        own = sharded.new_empty(2, B, 2 * C, K, D)
        work = dist.reduce_scatter_tensor(own, sharded.view(R * 2, B, 2 * C, K, D), group=self.group, async_op=True)

        def wait(given: Tensor = sharded) -> tuple[Tensor, Tensor]:
            """Wait for the reduction. The default of ``given`` keeps the send buffer alive until then."""
            assert work is not None
            work.wait()
            dk_BLKD, dv_BLKD = own
            return dk_BLKD, dv_BLKD

        return wait

    def scored(self, count: Tensor) -> Tensor:
        """Return ``count`` summed over the ranks: the number of scored tokens of whole rows. Collective.

        Args:
            count: integers of any shape, such as one per row. The input is not modified.
        """
        if self.group is None:
            return count
        total = count.clone()
        dist.all_reduce(total, group=self.group)
        return total


def _sum_into(target: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of zero, one or two tensors to ``target``."""
    if len(parts) == 2:
        torch.add(*parts, out=target)
    elif parts:
        target.copy_(parts[0])
    else:
        target.zero_()


class _GatherKeysValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k_BLKD: Tensor, v_BLKD: Tensor, split: ContextSplit) -> tuple[Tensor, Tensor]:
        ctx.split = split
        return split.all_gather_kv(k_BLKD, v_BLKD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk_BSKD: Tensor, dv_BSKD: Tensor) -> tuple[Tensor, Tensor, None]:
        dk_BLKD, dv_BLKD = ctx.split.start_reduce_scatter_kv([(dk_BSKD, dv_BSKD)])()
        return dk_BLKD, dv_BLKD, None


def attention(q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, split: ContextSplit, attend: Attend) -> Tensor:
    """Return the attention output (B, L, H, D) of this rank's tokens. Forward and backward are collective.

    Args:
        q_BLHD, k_BLKD, v_BLKD: this rank's tokens, in the order of ``split.positions()``.
        attend: function that computes the attention of one chunk.
    """
    k_BSKD, v_BSKD = split.gather_kv(k_BLKD, v_BLKD)
    parts = [
        attend(q_BLHD[:, own], k_BSKD[:, :stop], v_BSKD[:, :stop])
        for own, (_, stop) in zip(split.local_chunks, split.spans, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass(frozen=True)
class SplitAttention:
    """Attention with a hand-written backward pass, of this rank's queries to all keys of their rows.

    Each chunk of this rank is one call of ``attention``, with the keys from the start of the row to the end of the
    chunk.

    Attributes:
        attention: implementation for one chunk.
        scale: factor on the scores.
        split: how rows are split over the cp ranks.
    """

    attention: CausalAttention
    scale: float
    split: ContextSplit

    def forward(self, q_BLHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> tuple[Tensor, list[Saved]]:
        """Return the result (B, L, H, D), and what the backward pass needs besides it and the inputs."""
        parts = [
            self.attention.forward(q_BLHD[:, own], k_BSKD[:, :stop], v_BSKD[:, :stop], self.scale)
            for own, (_, stop) in zip(self.split.local_chunks, self.split.spans, strict=True)
        ]
        o_BLHD = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts], 1)
        return o_BLHD, [saved._replace(**DROPPED) for _, saved in parts]

    def backward(
        self,
        do_BLHD: Tensor,
        q_BLHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        o_BLHD: Tensor,
        kept: Sequence[Saved],
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
        """Return dq (B, L, H, D), and a function that waits for dk and dv, (B, L, K, D), summed over ranks. Collective.

        Args:
            into: tensors for the three gradients, used if rows are not split; None to allocate them.
        """
        if into is not None and self.split.ranks == 1:
            (saved,) = kept
            self.attention.backward_into(do_BLHD, saved._replace(q=q_BLHD, k=k_BSKD, v=v_BSKD, o=o_BLHD), into)
            return into[0], lambda: into[1:]
        dq_parts, pieces = [], []
        for own, (_, stop), part in zip(self.split.local_chunks, self.split.spans, kept, strict=True):
            k, v = k_BSKD[:, :stop], v_BSKD[:, :stop]
            saved = part._replace(q=q_BLHD[:, own], k=k, v=v, o=o_BLHD[:, own])
            dq, dk, dv = self.attention.backward(do_BLHD[:, own], saved)
            dq_parts.append(dq)
            pieces.append((dk, dv))
        wait = self.split.start_reduce_scatter_kv(pieces)
        return dq_parts[0] if len(dq_parts) == 1 else torch.cat(dq_parts, 1), wait
