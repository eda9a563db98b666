"""Clip the gradient of each micro-batch by its own norm before the reduction, which sums the clipped gradients.

The MLPerf BERT reference does this, and the training rules allow it (benchmark-specific rules). Where ranks split
samples or layers, each may have a part of a micro-batch's gradient; these parts are summed first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.ops.triton_support import no_triton
from common.optim.buffers import FlatBuffer
from common.optim.communication import sum_in_order
from common.optim.precision import gradient_dtype


class MicroBatchClipper:
    """Clips the gradient of each micro-batch in the flat buffers. Several micro-batches are added up in fp32.

    A norm that is not finite turns the gradients into NaN, which the reduction carries to all ranks.

    Args:
        factor: maps the norm of a micro-batch's mean gradient to the factor for the gradient (0-d tensors).
        mean_factors: for each parameter group, the factor that turns the gradient of a micro-batch, summed over
            ``sharing``, into its mean.
        norm_shares: for each parameter group, 1 / (number of ranks that hold it redundantly).
        micro_batches: micro-batches of one iteration. The fp32 sums exist only if there are several.
        other_ranks: ranks that hold the other parameters of this replica; None if it is this rank alone.
        sharing: for each parameter group, the ranks that each have a part of a micro-batch's gradient. The clipper
            sums gradients over them.
        in_place: False only returns the factors, for one micro-batch per iteration.

    Attributes:
        sends: False disables the sum over ``sharing``; for measurements only.
    """

    def __init__(
        self,
        factor: Callable[[Tensor], Tensor],
        buffers: Sequence[FlatBuffer],
        mean_factors: Sequence[float],
        norm_shares: Sequence[float],
        micro_batches: int,
        other_ranks: dist.ProcessGroup | None,
        sharing: Sequence[dist.ProcessGroup | None],
        in_place: bool = True,
    ) -> None:
        self._factor = factor
        self._in_place = in_place
        self._buffers = buffers
        self._weights = [factor**2 * share for factor, share in zip(mean_factors, norm_shares, strict=True)]
        self._other_ranks = other_ranks
        self._sharing = [_runs_to_sum(buffer, sharing) for buffer in buffers]
        self._sums: list[Tensor] = []
        if micro_batches > 1:
            dtypes = [gradient_dtype(buffer.dtype, "fp32") for buffer in buffers]
            self._sums = [torch.zeros_like(b.gradients, dtype=t) for b, t in zip(buffers, dtypes, strict=True)]
        self._collected = 0
        self.sends = True

    def begin(self) -> None:
        """Start an iteration."""
        self._collected = 0

    def collect(self, last: bool, loss_scale: Tensor | None) -> Tensor:
        """Clip the gradient of one micro-batch after its backward pass, and return its factor (0-d).

        After the last micro-batch the gradients hold the sum of all clipped gradients; after the others they are zero.
        With ``in_place=False`` they remain as they are.

        Raises:
            RuntimeError: there are several micro-batches, but the optimizer was built for one.
        """
        if not self._sums and not (last and self._collected == 0):
            raise RuntimeError("clipping before the reduction: build the optimizer with micro_batches of an iteration")
        for run in itertools.chain.from_iterable(self._sharing) if self.sends else ():
            dist.all_reduce(run.gradients, group=run.group)
        factor = self._factor(self.norm(loss_scale))
        for index, buffer in enumerate(self._buffers if self._in_place else ()):
            self._add(buffer, factor, index, last)
        self._collected += 1
        return factor

    def _add(self, buffer: FlatBuffer, factor: Tensor, index: int, last: bool) -> None:
        if last and self._collected == 0:
            _scale(buffer.gradients, factor, buffer.gradients, add=False)
            return
        sums = self._sums[index]
        _scale(buffer.gradients, factor, sums, add=self._collected > 0)
        if last:
            buffer.gradients.copy_(sums)
        else:
            buffer.zero_gradients()

    def norm(self, loss_scale: Tensor | None) -> Tensor:
        """Return the norm of this micro-batch's mean gradient: 0-d fp32, or fp64 with fp64 parameters."""
        squares: list[Tensor] = []
        for buffer in self._buffers:
            dtype = torch.promote_types(buffer.dtype, torch.float32)
            for group, weight in enumerate(self._weights):
                inside = [bucket for bucket in buffer.buckets if bucket.group == group]
                if inside:
                    part = buffer.gradients[inside[0].start : inside[-1].stop]
                    squares.append(torch.linalg.vector_norm(part, dtype=dtype).square() * weight)
        total = torch.stack([square.to(_widest(squares)) for square in squares]).sum()
        sum_in_order(total, self._other_ranks)
        norm = total.sqrt()
        return norm if loss_scale is None else norm / loss_scale


def _scale(x: Tensor, factor: Tensor, result: Tensor, add: bool) -> None:
    """Compute ``result = factor * x``, or ``result += factor * x`` with ``add``. The factor is 0-d."""
    if x.is_cuda and factor.dtype == torch.float32 and no_triton(x.device) is None:
        from common.optim import update_triton  # triton is imported only where it is used

        update_triton.scale(x, factor, result, add)
    elif add:
        result.addcmul_(x, factor.to(result.dtype))
    elif x is result:
        result.mul_(factor)
    else:
        result.copy_(x).mul_(factor)


class _Run(NamedTuple):
    """Neighbouring gradients of a flat buffer that are summed over the same ranks."""

    gradients: Tensor
    group: dist.ProcessGroup


def _runs_to_sum(buffer: FlatBuffer, sharing: Sequence[dist.ProcessGroup | None]) -> list[_Run]:
    """Return the runs of ``buffer`` to sum, in buffer order; ``sharing`` has the ranks of each parameter group."""
    runs = []
    for group, buckets in itertools.groupby(buffer.buckets, key=lambda bucket: sharing[bucket.group]):
        if group is not None:
            together = list(buckets)
            runs.append(_Run(buffer.gradients[together[0].start : together[-1].stop], group))
    return runs


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
