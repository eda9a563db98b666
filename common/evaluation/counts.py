"""Counters of an evaluation on the device, summed over the ranks that share the evaluation set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.layout import Layout


class Counts:
    """Accumulators in one float64 tensor, which is exact for integers up to 2**53.

    Args:
        layout: layout of the ranks that evaluate.
        counted: names of the integer totals.
        added: names of the other totals.
        axes: axes of ``layout`` to sum over, whose ranks have different samples or parts of samples. Along other
            axes, all ranks must add the same values.
    """

    def __init__(
        self, layout: Layout, counted: Sequence[str], added: Sequence[str] = (), axes: Sequence[str] = ("dp",)
    ) -> None:
        self._counted, self._added = tuple(counted), tuple(added)
        self._sums = torch.zeros(len(counted) + len(added), dtype=torch.float64, device=layout.device)
        self._group = layout.group(*axes)

    def warm_up(self) -> None:
        """Sum over the ranks once, then reset. Collective."""
        self._sum_over_ranks()
        self.clear()

    def clear(self) -> None:
        """Reset all totals, at the start of an evaluation."""
        self._sums.zero_()

    def add(self, *values: Tensor) -> None:
        """Add one 0-d tensor per name, in the order of the names. Can be captured in a CUDA graph."""
        self._sums += torch.stack(values)

    def totals(self) -> dict[str, int | float]:
        """Return the totals over all ranks; call once per evaluation. Collective; waits for the device."""
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
    """Check that each sample of the set was evaluated exactly once.

    Args:
        evaluated, expected: numbers of evaluated samples and of samples in the set.
        samples: name of the samples in the message.

    Raises:
        RuntimeError: the numbers differ.
    """
    if evaluated != expected:
        raise RuntimeError(f"{evaluated} of {expected} {samples} were evaluated")
