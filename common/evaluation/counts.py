"""What an evaluation counts on the device, summed over the ranks that share the evaluation set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.layout import Layout


class Counts:
    """Numbers that batches add to, all in one float64 tensor, which counts exactly up to 2**53.

    Args:
        layout: of the ranks that evaluate.
        counted: names of whole numbers.
        added: names of the others.
        axes: of ``layout``, whose ranks have other samples or other parts of the same samples: over them numbers are
            summed. Along the others all ranks must add the same, and get the same.
    """

    def __init__(
        self, layout: Layout, counted: Sequence[str], added: Sequence[str] = (), axes: Sequence[str] = ("dp",)
    ) -> None:
        self._counted, self._added = tuple(counted), tuple(added)
        self._sums = torch.zeros(len(counted) + len(added), dtype=torch.float64, device=layout.device)
        self._group = layout.group(*axes)

    def warm_up(self) -> None:
        """Sum over the ranks once, and forget what was added. Collective."""
        self._sum_over_ranks()
        self.clear()

    def clear(self) -> None:
        """Begin an evaluation."""
        self._sums.zero_()

    def add(self, *values: Tensor) -> None:
        """Add 0-d tensors, in the order of the names; capturable."""
        self._sums += torch.stack(values)

    def totals(self) -> dict[str, int | float]:
        """The sums over all ranks; waits for the device. Collective, once an evaluation."""
        self._sum_over_ranks()
        sums = self._sums.tolist()
        whole = len(self._counted)
        return {
            **{name: round(value) for name, value in zip(self._counted, sums[:whole], strict=True)},
            **dict(zip(self._added, sums[whole:], strict=True)),
        }

    def _sum_over_ranks(self) -> None:
        if self._group is not None:
            dist.all_reduce(self._sums, group=self._group)


def check_whole_set(evaluated: int, expected: int, samples: str) -> None:
    """An evaluation counts only if all of the set was evaluated, and nothing twice.

    Args:
        evaluated, expected: so many were, and so many are in the set.
        samples: what they are called: the set's samples, or parts of one.

    Raises:
        RuntimeError: it was not.
    """
    if evaluated != expected:
        raise RuntimeError(f"{evaluated} of {expected} {samples} were evaluated")
