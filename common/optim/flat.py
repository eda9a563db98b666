"""Flat buffers: all parameters of one dtype in one allocation, and their gradients in another.

One fill zeroes every gradient, one slice is a communication bucket, and a multi-tensor kernel needs one pointer and a
table. Parameters and ``.grad`` become views with unchanged strides, so a channels_last weight stays channels_last.
All flat tensors of one dtype (parameters, gradients, fp32 masters, optimizer state) share the same element offsets.
An update therefore works elementwise on slices, independent of the strides of the views.

Gradients may have another dtype than their parameters. With fp32 gradients of half-precision weights, the sum over
micro-batches is not rounded to 8 or 11 bits each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.optim.precision import GradientPrecision, gradient_dtype
from common.optim.shard import FRAGMENT_ALIGNMENT

ALIGNMENT_BYTES = 256
"""Alignment of every tensor in bytes. It allows the widest loads in kernels and fast matrix products."""

HALF_DTYPES = (torch.float16, torch.bfloat16)

WHOLE = 1 << 62  # bucket size in bytes that no group reaches: one bucket per group


@dataclass(frozen=True)
class Segment:
    """Position of one parameter in the flat buffers of its dtype.

    Attributes:
        parameter: the parameter, a view of the flat parameter buffer.
        group: index of its parameter group.
        start: offset of its first element.
        numel: number of its elements.
        stop: offset behind its padding; elements from ``start + numel`` to ``stop`` stay zero.
        parts: number of tensors that it counts as: equal pieces, one after the other.
    """

    name: str
    parameter: nn.Parameter
    group: int
    start: int
    numel: int
    stop: int
    parts: int = 1


@dataclass(frozen=True)
class Bucket:
    """Slice of a flat buffer that is reduced and gathered in one collective.

    Attributes:
        segments: the parameters in it, all of one group.
        group: index of that group.
        start: offset of its first element.
        stop: offset behind its padding; ``stop - start`` divides into aligned pieces, one for each rank of a shard.
        readiness: estimated fraction of its group's parameters whose gradients are complete when the bucket is.
    """

    segments: tuple[Segment, ...]
    group: int
    start: int
    stop: int
    readiness: float


class FlatBuffer:
    """Parameters of one dtype and their gradients in flat tensors.

    Building it moves the parameters: ``parameter.data`` and ``parameter.grad`` become views of the flat buffers.

    Args:
        groups: for each parameter group, its parameters of one dtype and one device, by name, in the order of the
            model.
        parts: parameter name to the number of tensors that it counts as; default 1.
        pieces: number of ranks that share the buffer; every bucket divides into this many aligned pieces.
        bucket_bytes: a bucket is closed when its gradients have at least this many bytes.
        gradient_dtype: dtype of the gradients; None for that of the parameters.

    Attributes:
        dtype, device: dtype and device of the parameters.
        segments: the parameters in the order of the buffer, group after group.
        buckets: the buckets in the order of the buffer.
        parameters: 1-d, ``dtype``.
        gradients: 1-d, the gradients' dtype.

    Raises:
        ValueError: no or several dtypes or devices, an empty parameter, one that is not dense, or one that does not
            divide into its parts.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, nn.Parameter]],
        parts: Mapping[str, int] | None = None,
        pieces: int = 1,
        bucket_bytes: int = WHOLE,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        members = [p for group in groups for p in group.values()]
        kinds = {(p.dtype, p.device) for p in members}
        if len(kinds) != 1:
            raise ValueError(f"a flat buffer holds one dtype on one device, not {sorted(map(str, kinds))}")
        self.dtype, self.device = kinds.pop()
        self._gradient_dtype = gradient_dtype or self.dtype
        self._alignment = max(ALIGNMENT_BYTES // self.dtype.itemsize, FRAGMENT_ALIGNMENT)
        self.buckets = self._plan(groups, parts or {}, pieces, bucket_bytes)
        self.segments = [segment for bucket in self.buckets for segment in bucket.segments]
        self.parameters = torch.zeros(self.buckets[-1].stop, dtype=self.dtype, device=self.device)
        self.gradients = torch.zeros_like(self.parameters, dtype=self._gradient_dtype)
        for segment in self.segments:
            view = self.view(self.parameters, segment)
            view.copy_(segment.parameter.detach())
            segment.parameter.data = view
            self._attach_gradient(segment)
        self._pointers = [(s, s.parameter.data_ptr(), s.parameter.grad.data_ptr()) for s in self.segments]  # type: ignore[union-attr]

    def _attach_gradient(self, segment: Segment) -> None:
        parameter = segment.parameter
        if parameter.grad_dtype != self._gradient_dtype:
            parameter.grad = None  # PyTorch refuses to change grad_dtype while a gradient of another dtype exists
            parameter.grad_dtype = self._gradient_dtype  # autograd casts to it before it adds gradients up
        parameter.grad = self.view(self.gradients, segment)

    def view(self, flat: Tensor, segment: Segment, first: int = 0) -> Tensor:
        """Return the part of ``flat`` for ``segment``, with the parameter's strides.

        Args:
            flat: a flat tensor of this layout, from element ``first`` on.
            first: offset in the layout of the first element of ``flat``.
        """
        return flat.as_strided(segment.parameter.shape, segment.parameter.stride(), segment.start - first)

    def zero_gradients(self) -> None:
        """Zero all gradients with one fill; the views stay attached."""
        self.gradients.zero_()

    def check(self) -> None:
        """Check on the host, by pointers, that parameters and gradients still are views of the buffers.

        Raises:
            RuntimeError: ``.to()``, an assignment to ``.data`` or ``.grad`` or ``zero_grad(set_to_none=True)``
                detached one.
        """
        for segment, data, grad in self._pointers:
            parameter = segment.parameter
            if parameter.data_ptr() != data or parameter.dtype != self.dtype:
                raise RuntimeError(
                    f"parameter {segment.name!r} no longer lies in the optimizer's flat buffer: cast and move the "
                    "model before the optimizer is built, and write into parameters in place"
                )
            if parameter.grad is None or parameter.grad.data_ptr() != grad:
                raise RuntimeError(
                    f"the gradient of {segment.name!r} no longer lies in the optimizer's flat buffer: do not assign "
                    "to .grad and do not call zero_grad(); begin() of the optimizer zeroes the gradients"
                )

    def _plan(
        self, groups: Sequence[Mapping[str, nn.Parameter]], parts: Mapping[str, int], pieces: int, bucket_bytes: int
    ) -> list[Bucket]:
        """Place the groups one after the other, and cut each into buckets from its end."""
        buckets: list[Bucket] = []
        start = 0
        for group, members in enumerate(groups):
            named = list(members.items())
            for first, last in self._cut(named, bucket_bytes):
                segments, stop = [], start
                for name, parameter in named[first:last]:
                    segment = self._place(name, parameter, group, stop, parts.get(name, 1))
                    segments.append(segment)
                    stop = segment.stop
                stop = start + _round_up(stop - start, pieces * self._alignment)
                buckets.append(Bucket(tuple(segments), group, start, stop, 1.0 - first / len(named)))
                start = stop
        return buckets

    def _cut(self, named: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[tuple[int, int]]:
        """Return first and last + 1 of each bucket's members.

        Cuts start at the end, where backward passes begin. The bucket that may be small is then the last one to
        complete.
        """
        cuts, last, held = [], len(named), 0
        for first in range(len(named) - 1, -1, -1):
            held += _round_up(named[first][1].numel(), self._alignment) * self._gradient_dtype.itemsize
            if held >= bucket_bytes or first == 0:
                cuts.append((first, last))
                last, held = first, 0
        return cuts[::-1]

    def _place(self, name: str, parameter: nn.Parameter, group: int, start: int, parts: int) -> Segment:
        if parameter.numel() == 0:
            raise ValueError(f"parameter {name!r} has no elements")
        if not _is_dense(parameter):
            raise ValueError(f"parameter {name!r} with strides {parameter.stride()} is not dense in memory")
        if parts != 1:
            _check_parts(name, parameter, parts)
        stop = start + _round_up(parameter.numel(), self._alignment)
        return Segment(name, parameter, group, start, parameter.numel(), stop, parts)


def build_flat_buffers(
    groups: Sequence[Mapping[str, nn.Parameter]],
    parts: Mapping[str, int] | None = None,
    pieces: int = 1,
    bucket_bytes: int = WHOLE,
    gradients: GradientPrecision = "same",
) -> list[FlatBuffer]:
    """Return one FlatBuffer for each dtype, in the order in which the dtypes first appear in ``groups``.

    Args:
        groups, parts, pieces, bucket_bytes: see :class:`FlatBuffer`.
        gradients: precision in which gradients are added up.

    Raises:
        ValueError: no parameter at all, a dtype that is not floating point, parts of an unknown parameter, or a
            reason of FlatBuffer.
    """
    dtypes = list(dict.fromkeys(p.dtype for group in groups for p in group.values()))
    if not dtypes:
        raise ValueError("there is no parameter to optimize")
    for dtype in dtypes:
        if dtype not in (torch.float32, torch.float64, *HALF_DTYPES):
            raise ValueError(f"parameters of {dtype} cannot be optimized: use float32, float16 or bfloat16")
    unknown = set(parts or {}) - {name for group in groups for name in group}
    if unknown:
        raise ValueError(f"parts names {min(unknown)!r}, which is none of the parameters")
    return [
        FlatBuffer(
            [{n: p for n, p in group.items() if p.dtype == dtype} for group in groups],
            parts,
            pieces,
            bucket_bytes,
            gradient_dtype(dtype, gradients),
        )
        for dtype in dtypes
    ]


def _check_parts(name: str, parameter: nn.Parameter, parts: int) -> None:
    rows = parameter.shape[0] if parameter.ndim else 1
    if parts < 1 or rows % parts:
        raise ValueError(f"parameter {name!r} of {rows} rows does not divide into {parts} equal parts")
    if parameter.stride(0) != parameter.numel() // rows:
        raise ValueError(f"parameter {name!r} with strides {parameter.stride()}: its rows do not follow one another")
    if parameter.numel() // parts % FRAGMENT_ALIGNMENT:
        raise ValueError(
            f"parameter {name!r}: a part of {parameter.numel() // parts} elements does not end on a multiple of "
            f"{FRAGMENT_ALIGNMENT}, where the next one would have to start"
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the strides cover numel consecutive elements, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride != expected:
            return False
        expected *= size
    return True
