"""Flat buffers: all parameters of one dtype in one allocation, their gradients in another.

One fill zeroes every gradient, one slice is a communication bucket, and a multi-tensor kernel needs one pointer
and a table instead of hundreds of pointers. Parameters and ``.grad`` become views that keep their own strides, so a
channels_last weight stays channels_last. All flat buffers of one dtype (parameters, gradients, FP32 masters, optimizer
state) share the same element offsets, hence an update is elementwise on slices whatever the strides of the views are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT_BYTES = 256
"""Every tensor starts on a multiple of this, so that kernels use their widest loads and matrix products stay fast."""

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Segment:
    """Where one parameter lies in the flat buffers of its dtype.

    Attributes:
        name: name of the parameter.
        parameter: the parameter, a view of the flat parameter buffer.
        group: index of its parameter group.
        start: offset of its first element.
        numel: its elements.
        stop: offset of the next segment; elements from ``start + numel`` to ``stop`` are padding and stay zero.
    """

    name: str
    parameter: nn.Parameter
    group: int
    start: int
    numel: int
    stop: int


class FlatBuffer:
    """The parameters of one dtype, their gradients and their FP32 masters in flat tensors.

    Building it moves the parameters: ``parameter.data`` and ``parameter.grad`` become views of the flat buffers.

    Args:
        groups: per parameter group its parameters of one dtype and one device, by name, in the order of the model.

    Attributes:
        dtype, device: of the parameters.
        segments: the parameters in the order of the buffer: group after group.
        parameters: 1-d, ``dtype``.
        gradients: 1-d, ``dtype``.
        masters: 1-d float32; ``parameters`` itself when that is float32 or float64.
        starts, numels: int64 device tensors with one entry for each segment.

    Raises:
        ValueError: no or several dtypes or devices, an empty parameter, or one that is not dense.
    """

    def __init__(self, groups: Sequence[Mapping[str, nn.Parameter]]) -> None:
        named = [(index, name, p) for index, group in enumerate(groups) for name, p in group.items()]
        kinds = {(p.dtype, p.device) for _, _, p in named}
        if len(kinds) != 1:
            raise ValueError(f"a flat buffer holds one dtype on one device, not {sorted(map(str, kinds))}")
        self.dtype, self.device = kinds.pop()
        self.segments = self._plan(named)
        size = self.segments[-1].stop
        self.parameters = torch.zeros(size, dtype=self.dtype, device=self.device)
        self.gradients = torch.zeros_like(self.parameters)
        for segment in self.segments:
            view = self.view(self.parameters, segment)
            view.copy_(segment.parameter.detach())
            segment.parameter.data = view
            segment.parameter.grad = self.view(self.gradients, segment)
        self.masters = self.parameters.float() if self.dtype in HALF_DTYPES else self.parameters
        self.starts = torch.tensor([s.start for s in self.segments], dtype=torch.int64, device=self.device)
        self.numels = torch.tensor([s.numel for s in self.segments], dtype=torch.int64, device=self.device)
        self._pointers = [(s, s.parameter.data_ptr(), s.parameter.grad.data_ptr()) for s in self.segments]  # type: ignore[union-attr]

    @property
    def has_masters(self) -> bool:
        """Whether the masters are tensors of their own."""
        return self.masters is not self.parameters

    def view(self, buffer: Tensor, segment: Segment) -> Tensor:
        """The part of ``buffer`` (any flat tensor of this layout) for ``segment``, with the parameter's strides."""
        return buffer.as_strided(segment.parameter.shape, segment.parameter.stride(), segment.start)

    def new_state(self) -> Tensor:
        """A flat tensor of zeros with the masters' dtype and offsets: one kind of optimizer state."""
        return torch.zeros_like(self.masters)

    def zero_gradients(self) -> None:
        """Zero all gradients with one fill; the views stay attached."""
        self.gradients.zero_()

    def reset_masters(self) -> None:
        """Set the masters to the values of the parameters, after these were loaded from elsewhere."""
        if self.has_masters:
            self.masters.copy_(self.parameters)

    def check(self) -> None:
        """Make sure that parameters and gradients still are views of the buffers; compares pointers on the host.

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

    def _plan(self, named: Sequence[tuple[int, str, nn.Parameter]]) -> list[Segment]:
        align = ALIGNMENT_BYTES // self.dtype.itemsize
        segments, start = [], 0
        for group, name, parameter in named:
            if parameter.numel() == 0:
                raise ValueError(f"parameter {name!r} has no elements")
            if not _is_dense(parameter):
                raise ValueError(f"parameter {name!r} with strides {parameter.stride()} is not dense in memory")
            stop = start + -(-parameter.numel() // align) * align
            segments.append(Segment(name, parameter, group, start, parameter.numel(), stop))
            start = stop
        return segments


def build_flat_buffers(groups: Sequence[Mapping[str, nn.Parameter]]) -> list[FlatBuffer]:
    """One FlatBuffer for each dtype, in the order in which the dtypes first appear in ``groups``.

    Raises:
        ValueError: no parameter at all, a dtype that is not floating point, or what FlatBuffer raises.
    """
    dtypes = list(dict.fromkeys(p.dtype for group in groups for p in group.values()))
    if not dtypes:
        raise ValueError("there is no parameter to optimize")
    for dtype in dtypes:
        if dtype not in (torch.float32, torch.float64, *HALF_DTYPES):
            raise ValueError(f"parameters of {dtype} cannot be optimized: use float32, float16 or bfloat16")
    return [FlatBuffer([{n: p for n, p in group.items() if p.dtype == dtype} for group in groups]) for dtype in dtypes]


def _is_dense(tensor: Tensor) -> bool:
    """Whether the strides enumerate numel consecutive elements, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride != expected:
            return False
        expected *= size
    return True
