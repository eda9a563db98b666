"""Flat buffers: all parameters of one dtype in one allocation, their gradients in another, and this rank's shard.

One fill zeroes every gradient, one slice is a communication bucket, and a multi-tensor kernel needs one pointer and a
table. Parameters and ``.grad`` become views with unchanged strides, so a channels_last weight stays channels_last.
All flat tensors of one dtype (parameters, gradients, fp32 masters, optimizer state) share the same element offsets.
An update therefore works elementwise on slices, independent of the strides of the views.

Gradients may have another dtype than their parameters. With fp32 gradients of half-precision weights, the sum over
micro-batches is not rounded to 8 or 11 bits each time.

The ranks that share a buffer each update one piece of every bucket: their shard. Without sharding the tensors of a
Shard are the flat buffers. With sharding they are separate tensors with this rank's pieces of all buckets, one after
the other. A reduce-scatter writes into its ``gradients``, and an all-gather reads from its ``parameters``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.optim.precision import GradientPrecision, gradient_dtype

ALIGNMENT_BYTES = 256
"""Alignment of every tensor in bytes. It allows the widest loads in kernels and fast matrix products."""

FRAGMENT_ALIGNMENT = 64
"""Alignment of the start of every fragment, in elements. It allows vector loads for every dtype."""

HALF_DTYPES = (torch.float16, torch.bfloat16)

WHOLE = 1 << 62  # bucket size in bytes that no group reaches: one bucket per group

_AT_ONCE = 1 << 26
"""Masters that are split at a time. Splitting 0.5 billion at once would need gigabytes of additional GPU memory."""


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
        own: this rank's piece, as a slice of the flat buffer.
        in_shard: the same piece, as a slice of the shard's flat tensors.
    """

    segments: tuple[Segment, ...]
    group: int
    start: int
    stop: int
    readiness: float
    own: slice
    in_shard: slice


@dataclass(frozen=True)
class Fragment:
    """The part of one tensor that this rank updates; a rank has at most one fragment of a tensor.

    Attributes:
        tensor: number of the tensor among all tensors of all shards. A parameter is one tensor, or as many as
            ``ParameterGroup.parts`` says.
        group: index of its ParameterGroup.
        start: offset of the first element in the shard's flat tensors, a multiple of ``FRAGMENT_ALIGNMENT``.
        numel: number of its elements, at least one.
        stop: end of its padding. Elements from ``start + numel`` on are zero in all flat tensors.
    """

    tensor: int
    group: int
    start: int
    numel: int
    stop: int


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of the parameters of one dtype. All its flat tensors share the same offsets.

    Attributes:
        parameters: 1-d, the model's dtype. An update writes it, and the other ranks gather it.
        gradients: 1-d, the model's dtype or fp32, summed over the replicas.
        masters: 1-d. fp32 for half precision; ``parameters`` itself for fp32 and fp64 parameters; int16 if masters
            are kept as remainders (:func:`split_masters`).
        fragments: ordered by start; may be empty. Elements between them are padding.

    Raises:
        ValueError: a tensor is not contiguous.
    """

    parameters: Tensor
    gradients: Tensor
    masters: Tensor
    fragments: tuple[Fragment, ...]

    def __post_init__(self) -> None:
        if not all(flat.is_contiguous() for flat in (self.parameters, self.gradients, self.masters)):
            raise ValueError("the tensors of a shard must be contiguous")

    @property
    def has_masters(self) -> bool:
        """Whether the masters are separate tensors."""
        return self.masters is not self.parameters

    @property
    def has_remainders(self) -> bool:
        """Whether masters are kept as int16 remainders of bfloat16 parameters."""
        return self.masters.dtype == torch.int16

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of the masters' values: fp32, or fp64 for fp64 parameters."""
        return torch.float32 if self.has_remainders else self.masters.dtype

    def new_state(self) -> Tensor:
        """Return a flat tensor of zeros with the masters' offsets and the dtype ``master_dtype``: one kind of state."""
        return torch.zeros_like(self.masters, dtype=self.master_dtype)

    def read_masters(self, part: slice) -> Tensor:
        """Return the values of some masters: a view, or with remainders a new tensor."""
        if not self.has_remainders:
            return self.masters[part]
        return joined_masters(self.parameters[part], self.masters[part])

    def write_parameters(self, out: Tensor, values: Tensor) -> None:
        """Write ``values`` of masters, rounded, to ``out``, parameters of the model that any rank may update."""
        if not self.has_remainders:
            out.copy_(values)
            return
        for piece, parameters in zip(values.split(_AT_ONCE), out.split(_AT_ONCE), strict=True):
            parameters.copy_(split_masters(piece)[0])

    def write_masters(self, part: slice, values: Tensor) -> None:
        """Set some masters, and the parameters if these are separate, to values in the dtype ``master_dtype``."""
        if self.has_remainders:
            flats = (values, self.parameters[part], self.masters[part])
            for piece, parameters, remainders in zip(*(flat.split(_AT_ONCE) for flat in flats), strict=True):
                nearest, beyond = split_masters(piece)
                parameters.copy_(nearest)
                remainders.copy_(beyond)
            return
        self.masters[part].copy_(values)
        if self.has_masters:
            self.parameters[part].copy_(values)


class FlatBuffer:
    """Parameters of one dtype and their gradients in flat tensors, and this rank's shard of them.

    Building it moves the parameters: ``parameter.data`` and ``parameter.grad`` become views of the flat buffers.

    Args:
        groups: for each parameter group, its parameters of one dtype and one device, by name, in the order of the
            model.
        parts: parameter name to the number of tensors that it counts as; default 1.
        ranks: number of ranks that share the buffer; every bucket divides into this many aligned pieces.
        index: position of this rank among them.
        bucket_bytes: a bucket is closed when its gradients have at least this many bytes.
        gradient_dtype: dtype of the gradients; None for that of the parameters.
        remainders: keep masters of bfloat16 parameters as int16 remainders (:func:`split_masters`).
        first_tensor: number of the buffer's first tensor among the tensors of all buffers.

    Attributes:
        segments: the parameters in the order of the buffer, group after group.
        buckets: the buckets in the order of the buffer.
        parameters: 1-d, ``dtype``.
        gradients: 1-d, the gradients' dtype.
        shard: this rank's part. With one rank it holds the buffer's tensors, else copies of this rank's pieces.
        tensors: number of tensors that the parameters count as.

    Raises:
        ValueError: no or several dtypes or devices, an empty parameter, one that is not dense, or one that does not
            divide into its parts.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, nn.Parameter]],
        parts: Mapping[str, int] | None = None,
        ranks: int = 1,
        index: int = 0,
        bucket_bytes: int = WHOLE,
        gradient_dtype: torch.dtype | None = None,
        remainders: bool = False,
        first_tensor: int = 0,
    ) -> None:
        members = [p for group in groups for p in group.values()]
        kinds = {(p.dtype, p.device) for p in members}
        if len(kinds) != 1:
            raise ValueError(f"a flat buffer holds one dtype on one device, not {sorted(map(str, kinds))}")
        self.dtype, self.device = kinds.pop()
        self._gradient_dtype = gradient_dtype or self.dtype
        self._alignment = max(ALIGNMENT_BYTES // self.dtype.itemsize, FRAGMENT_ALIGNMENT)
        self.buckets = self._plan(groups, parts or {}, ranks, index, bucket_bytes)
        self.segments = [segment for bucket in self.buckets for segment in bucket.segments]
        self.parameters = torch.zeros(self.buckets[-1].stop, dtype=self.dtype, device=self.device)
        self.gradients = torch.zeros_like(self.parameters, dtype=self._gradient_dtype)
        for segment in self.segments:
            view = self.view(self.parameters, segment)
            view.copy_(segment.parameter.detach())
            segment.parameter.data = view
            self._attach_gradient(segment)
        self._pointers = [(s, s.parameter.data_ptr(), s.parameter.grad.data_ptr()) for s in self.segments]  # type: ignore[union-attr]
        self.tensors = sum(segment.parts for segment in self.segments)
        self.shard = self._build_shard(ranks, remainders, first_tensor)

    @property
    def is_whole(self) -> bool:
        """Whether this rank updates everything. The shard's tensors are then the buffer's tensors."""
        return self.shard.parameters is self.parameters

    def move_shard(self, parameters: Tensor, gradients: Tensor) -> None:
        """Let the shard, which is not the whole buffer, use other tensors, into which the parameters are copied.

        Args:
            gradients: overwritten by the next reduction.
        """
        shard = self.shard
        parameters.copy_(shard.parameters)
        masters = shard.masters if shard.has_masters else parameters
        self.shard = dataclasses.replace(shard, parameters=parameters, gradients=gradients, masters=masters)

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

    def take(self, flat: Tensor, out: Tensor) -> None:
        """Copy this rank's pieces of ``flat``, in the buffer's layout, into ``out``, in the shard's layout."""
        torch._foreach_copy_([out[b.in_shard] for b in self.buckets], [flat[b.own] for b in self.buckets])

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
        self,
        groups: Sequence[Mapping[str, nn.Parameter]],
        parts: Mapping[str, int],
        ranks: int,
        index: int,
        bucket_bytes: int,
    ) -> list[Bucket]:
        """Place the groups one after the other, and cut each into buckets from its end."""
        buckets: list[Bucket] = []
        start = 0
        for group, members in enumerate(groups):
            named = list(members.items())
            for first, last in self._cut(named, bucket_bytes):
                segments, stop = [], start
                for name, parameter in named[first:last]:
                    segment = self._segment(name, parameter, group, stop, parts.get(name, 1))
                    segments.append(segment)
                    stop = segment.stop
                stop = start + _round_up(stop - start, ranks * self._alignment)
                length = (stop - start) // ranks
                own = slice(start + index * length, start + (index + 1) * length)
                in_shard = slice(start // ranks, stop // ranks)
                readiness = 1.0 - first / len(named)
                buckets.append(Bucket(tuple(segments), group, start, stop, readiness, own, in_shard))
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

    def _segment(self, name: str, parameter: nn.Parameter, group: int, start: int, parts: int) -> Segment:
        if parameter.numel() == 0:
            raise ValueError(f"parameter {name!r} has no elements")
        if not _is_dense(parameter):
            raise ValueError(f"parameter {name!r} with strides {parameter.stride()} is not dense in memory")
        if parts != 1:
            _check_parts(name, parameter, parts)
        stop = start + _round_up(parameter.numel(), self._alignment)
        return Segment(name, parameter, group, start, parameter.numel(), stop, parts)

    def _build_shard(self, ranks: int, remainders: bool, first_tensor: int) -> Shard:
        parameters, gradients = self.parameters, self.gradients
        if ranks > 1:
            parameters = torch.cat([parameters[bucket.own] for bucket in self.buckets])
            gradients = torch.zeros_like(parameters, dtype=gradients.dtype)
        if remainders and self.dtype == torch.bfloat16:
            masters = torch.zeros_like(parameters, dtype=torch.int16)
        else:
            masters = parameters.float() if self.dtype in HALF_DTYPES else parameters
        return Shard(parameters, gradients, masters, self._fragments(first_tensor))

    def _fragments(self, first_tensor: int) -> tuple[Fragment, ...]:
        fragments: list[Fragment] = []
        tensor = first_tensor
        for bucket in self.buckets:
            shift = bucket.in_shard.start - bucket.own.start
            for segment in bucket.segments:
                size = segment.numel // segment.parts
                for part in range(segment.parts):
                    start = segment.start + part * size
                    padded = segment.stop if part == segment.parts - 1 else start + size
                    first, end = max(start, bucket.own.start), min(start + size, bucket.own.stop)
                    if first < end:
                        stop = min(padded, bucket.own.stop)
                        fragments.append(Fragment(tensor, segment.group, first + shift, end - first, stop + shift))
                    tensor += 1
        return tuple(fragments)


def build_flat_buffers(
    groups: Sequence[Mapping[str, nn.Parameter]],
    parts: Mapping[str, int] | None = None,
    ranks: int = 1,
    index: int = 0,
    bucket_bytes: int = WHOLE,
    gradients: GradientPrecision = "same",
    remainders: bool = False,
) -> list[FlatBuffer]:
    """Return one FlatBuffer for each dtype, in the order in which the dtypes first appear in ``groups``.

    Tensors are numbered through all buffers.

    Args:
        groups: parameters of each group by name, of any floating-point dtypes.
        parts, ranks, index, bucket_bytes, remainders: see :class:`FlatBuffer`.
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
    buffers: list[FlatBuffer] = []
    for dtype in dtypes:
        members = [{n: p for n, p in group.items() if p.dtype == dtype} for group in groups]
        precision, before = gradient_dtype(dtype, gradients), sum(buffer.tensors for buffer in buffers)
        buffers.append(FlatBuffer(members, parts, ranks, index, bucket_bytes, precision, remainders, before))
    return buffers


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


def split_masters(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bfloat16 and an int16 for every fp32 value, which together give that value bit for bit.

    The bfloat16 is the nearest one, or of two equally near the larger in magnitude. The int16 is the difference of
    the bit patterns.
    """
    bits = values.contiguous().view(torch.int32)
    nearest = (bits + (1 << 15)).bitwise_right_shift_(16)
    return nearest.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def joined_masters(parameters: Tensor, remainders: Tensor) -> Tensor:
    """Return the fp32 values from the two results of :func:`split_masters`."""
    bits = parameters.contiguous().view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(remainders).view(torch.float32)
