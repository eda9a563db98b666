"""Cases of an operation: sizes, inputs, and what a pass has to move, stated once.

The ``cases`` module of an operation's package has its ``CASES``. From them follow the tests against the reference, on a
CPU through Triton's interpreter and on a GPU, the bench and the sweep over tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from common.ops.fp8_cast.reference import Scaling
from common.ops.operation import Operation, OperationRequest

T = TypeVar("T")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-11}
"""Dtype of a result to its largest relative error, as a norm, against the reference in float64.

Twice the error of the reference in the same dtype counts where that is larger, up to the value for the dtype of the
activations.
"""

TF32_TOLERANCE = 1e-3
"""That of products of fp32 values on a GPU."""

ROTATED_BYTES, MOST_ROTATED = 400e6, 256
"""Of inputs that are read in turn: more than an L2 cache holds, and at most so many sets."""


class Draw:
    """Makes inputs. The same calls give the same values, whichever implementation they are for.

    Args:
        device: of the tensors.
        dtype: of the activations.
        wide: return floating-point values in float64 after they were rounded to their dtype.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, wide: bool = False) -> None:
        self.device = device
        self.dtype = dtype
        self.wide = wide
        self._generator = torch.Generator(device).manual_seed(0)

    def rounded(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``x`` in a dtype, by default that of the activations; in float64 after that where ``wide``."""
        x = x.to(dtype or self.dtype)
        return x.double() if self.wide else x

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal values with the standard deviation ``scale``."""
        return self.rounded(torch.randn(shape, device=self.device, generator=self._generator) * scale, dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Values between ``low`` and ``high``."""
        values = torch.rand(shape, device=self.device, generator=self._generator)
        return self.rounded(low + (high - low) * values, dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers from ``low`` to ``high - 1``."""
        return torch.randint(low, high, shape, device=self.device, generator=self._generator).to(dtype)

    def permutation(self, count: int) -> Tensor:
        """The integers below ``count`` in random order."""
        return torch.randperm(count, device=self.device, generator=self._generator)

    def seed(self) -> Tensor:
        """A seed of dropout."""
        return torch.tensor(-0x0123456789ABCDEF, device=self.device)

    def scaling(self, scale: float = 0.0) -> Scaling:
        """The state of an FP8 scale; 0 before its first use."""
        return Scaling(torch.full((), scale, device=self.device), torch.zeros(2, dtype=torch.int32, device=self.device))


class Pass(NamedTuple):
    """One direction of an operation.

    Attributes:
        name: ``forward``, or another.
        run: enqueues it, and returns everything that tests compare: tensors, FP8 tensors, the states of scales and
            None, in tuples of any depth. It can run any number of times.
        bytes: that it must move: each input read once, each output written once.
        flops: where arithmetic counts.
        after: an earlier pass that ``run`` repeats first and whose time is subtracted.
    """

    name: str
    run: Callable[[], Any]
    bytes: float
    flops: float = 0.0
    after: str | None = None


@dataclass(frozen=True)
class Case:
    """An operation at the sizes of a recipe, and the smaller ones of its tests.

    Attributes:
        name: what is special about it; the recipe that has its sizes, where there are several.
        build: makes the passes of (function of an implementation, :class:`Draw`, \\*\\*sizes).
        sizes: of the recipe, which the bench measures. The request to the operation has those that are integers.
        tests: sizes of the tests, of which each replaces some of ``sizes``. Choose them so that tiles have edges.
        gpu: sizes of a test on a GPU beside those; None for no other.
        dtypes: that the activations can have; the bench takes the last. An interpreter runs the first and the last.
        only: names of the implementations; empty for all.
        tolerance: factor on :data:`TOLERANCE`.
        exact: whether results equal those of the reference in the same dtype, bit for bit.
        wide: whether the reference computes the expected values in float64; else in the dtype of the activations.
        tf32: whether kernels multiply matrices in fp32, for which a GPU takes TF32.
    """

    name: str
    build: Callable[..., list[Pass]]
    sizes: Mapping[str, Any]
    tests: Sequence[Mapping[str, Any]] = ()
    gpu: Mapping[str, Any] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    only: tuple[str, ...] = ()
    tolerance: float = 1.0
    exact: bool = False
    wide: bool = True
    tf32: bool = False

    def passes(self, function: Any, draw: Draw, **sizes: Any) -> list[Pass]:
        """The passes of an implementation's ``function`` at ``sizes``, the rest of them a recipe's."""
        return self.build(function, draw, **{**self.sizes, **sizes})

    def request(self, device: torch.device, dtype: torch.dtype, **sizes: Any) -> OperationRequest:
        """What a model with these sizes would ask for."""
        integers = {name: size for name, size in {**self.sizes, **sizes}.items() if isinstance(size, int)}
        return OperationRequest(device, dtype, integers)

    def implementations(self, operation: Operation) -> tuple[str, ...]:
        """Names of the faster implementations that it is a case of."""
        return tuple(name for name in operation.fast if not self.only or name in self.only)


def size_of(*tensors: Tensor | None) -> float:
    """Bytes of tensors together."""
    return float(sum(x.numel() * x.element_size() for x in tensors if x is not None))


def with_gradients(
    inputs: list[Tensor], gradients: Sequence[Tensor], function: Callable[[], Tensor | tuple[Tensor, ...]]
) -> Callable[[], Any]:
    """Forward and backward of a function with autograd."""
    return lambda: torch.autograd.grad(function(), inputs, gradients)


def both_ways(
    function: Callable[[], Tensor | tuple[Tensor, ...]],
    inputs: list[Tensor],
    gradients: Sequence[Tensor],
    *,
    moved: tuple[float, float],
    flops: tuple[float, float] = (0.0, 0.0),
) -> list[Pass]:
    """Forward and backward of a function with autograd.

    Args:
        function: enqueues forward; it has one result, or as many as there are gradients.
        inputs: what gets a gradient.
        gradients: of the results.
        moved: bytes of forward and of backward.
        flops: of forward and of backward.
    """
    for x in inputs:
        x.requires_grad_()
    return [
        Pass("forward", function, moved[0], flops[0]),
        Pass("backward", with_gradients(inputs, gradients, function), moved[1], flops[1], after="forward"),
    ]


def rotating(make: Callable[[], T], input_bytes: float) -> Iterator[T]:
    """As many sets of inputs, in turn and without end, as exceed the L2 cache together, but not many thousands.

    Args:
        make: function that makes one set.
        input_bytes: bytes of a set.
    """
    return itertools.cycle([make() for _ in range(min(int(ROTATED_BYTES // input_bytes) + 1, MOST_ROTATED))])


def together(cases: Sequence[list[Pass]]) -> list[Pass]:
    """Several operations with the same passes, one after another, as one."""
    return [
        Pass(
            same[0].name,
            lambda same=same: [each.run() for each in same],  # type: ignore[misc]
            sum(each.bytes for each in same),
            sum(each.flops for each in same),
            same[0].after,
        )
        for same in zip(*cases, strict=True)
    ]
