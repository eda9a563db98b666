"""A row of tokens dealt to the ranks of the ``cp`` axis, each with an early and a late chunk of it.

Under a causal mask later tokens have more to attend to. Of 2 R equal chunks rank r of R has chunks r and 2 R - 1 - r,
which is as much work for every rank. All else in a decoder is done token by token and need not know.

Keys and values are gathered rather than passed around a ring: with few key/value heads they are small, and one
collective moves them.

Shapes: B rows, S tokens of a whole row, L = S / R those of one rank, K key/value heads, D head size.
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

AXIS = "cp"


@dataclass(frozen=True)
class ContextSplit:
    """A row's chunks and the ranks that have them; one rank alone has the whole row, and needs no process group.

    Attributes:
        row_length: S.
        ranks: R.
        index: which of them this is.
        group: the ranks; None where there is one.

    Raises:
        ConfigError: the chunks would not be equal.
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
                f"layout.cp={self.ranks} deals a row in {2 * self.ranks} equal chunks, which a row of "
                f"{self.row_length} tokens does not give: choose a cp whose double divides the row"
            )

    @classmethod
    def from_layout(cls, layout: Layout, row_length: int) -> ContextSplit:
        """The ``cp`` axis of ``layout``. Collective.

        Args:
            layout: of all ranks.
            row_length: tokens of a whole row.

        Raises:
            ConfigError: twice the axis does not divide the row.
        """
        return cls(row_length, layout.size(AXIS), layout.coordinate(AXIS), layout.group(AXIS))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where in the row this rank's chunks start and stop, in the order in which it has them."""
        if self.ranks == 1:
            return ((0, self.row_length),)
        size = self.row_length // (2 * self.ranks)
        return tuple((c * size, (c + 1) * size) for c in (self.index, 2 * self.ranks - 1 - self.index))

    @property
    def local_length(self) -> int:
        """L, tokens of a row that this rank has."""
        return self.row_length // self.ranks

    @property
    def local_chunks(self) -> tuple[slice, ...]:
        """Places of this rank's chunks among its own tokens, in the order of :attr:`spans`."""
        size = self.local_length // len(self.spans)
        return tuple(slice(i * size, (i + 1) * size) for i in range(len(self.spans)))

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Places in the row of this rank's tokens, in the order in which it has them: (L,) int64."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.spans])

    def deal(self, whole: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of whole rows, a copy.

        Args:
            whole: any tensor with S tokens along ``dim``.
            dim: where they are.
        """
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in self.spans], dim)

    def gather_kv(self, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole rows (B, S, K, D); backward sums the gradients. Collective in both passes."""
        if self.ranks == 1:
            return k_BLKD, v_BLKD
        k_BSKD, v_BSKD = _GatherKeysValues.apply(k_BLKD, v_BLKD, self)
        return k_BSKD, v_BSKD

    def all_gather_kv(self, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`gather_kv` without autograd. Collective."""
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
        """Begin to sum gradients of keys and values over all ranks' queries, beside what comes next. Collective.

        Args:
            pieces: of one or two chunks of this rank's queries, the gradients (B, m, K, D) of the keys and of the
                values of a row's first m tokens, m a multiple of a chunk.

        Returns:
            A function that waits, and gives the gradients (B, L, K, D) of this rank's own keys and values.
        """
        if self.ranks == 1:
            (piece,) = pieces
            return lambda: piece
        B, _, K, D = pieces[0][0].shape
        R, C = self.ranks, self.local_length // 2
        dealt = pieces[0][0].new_empty(R, 2, B, 2, C, K, D)
        for which in range(2):
            for rank in range(R):
                for half, chunk in enumerate((rank, 2 * R - 1 - rank)):
                    span = slice(chunk * C, (chunk + 1) * C)
                    parts = [piece[which][:, span] for piece in pieces if piece[which].shape[1] > chunk * C]
                    _sum_into(dealt[rank, which, :, half], parts)
        own = dealt.new_empty(2, B, 2 * C, K, D)
        work = dist.reduce_scatter_tensor(own, dealt.view(R * 2, B, 2 * C, K, D), group=self.group, async_op=True)

        def wait(given: Tensor = dealt) -> tuple[Tensor, Tensor]:
            """``given`` is held as long as it is read."""
            assert work is not None
            work.wait()
            dk_BLKD, dv_BLKD = own
            return dk_BLKD, dv_BLKD

        return wait

    def scored(self, count: Tensor) -> Tensor:
        """How many tokens of whole rows are scored, from those of this rank, on the device. Collective.

        Args:
            count: integers of any shape, such as one for each row; it is left as it is.
        """
        if self.group is None:
            return count
        total = count.clone()
        dist.all_reduce(total, group=self.group)
        return total


def _sum_into(target: Tensor, parts: Sequence[Tensor]) -> None:
    """The sum of none, one or two tensors."""
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
