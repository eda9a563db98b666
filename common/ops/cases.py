"""Cases of an operation: its sizes, its inputs, and the bytes that each pass must move.

The ``cases`` module of an operation's package defines ``CASES``. Three users share them: the tests against the
reference (on a CPU through Triton's interpreter, and on a GPU), the bench, and the sweep over tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from common.ops.fp8_cast.reference import Scaling
from common.ops.operation import Operation, OperationRequest

T = TypeVar("T")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-11}
"""Largest relative error, as a norm, against the reference in float64, by the dtype of the result.

If twice the error of the reference in the same dtype is larger, that is the limit, up to the value for the dtype of the
activations.
"""

TF32_TOLERANCE = 1e-3
"""Largest relative error on a GPU for fp32 activations where matrix products may use TF32."""

ROTATED_BYTES, MOST_ROTATED = 400e6, 20
"""Bytes of all sets of inputs in :func:`rotating`, more than an L2 cache holds, and the largest number of sets.

A CUDA graph of the bench calls a pass at most 20 times.
"""


class Draw:
    """Makes random inputs. The same calls give the same values, so that all implementations get the same inputs.

    Args:
        fp64: round floating-point values to their dtype, but return them in float64.
        strided: numbers, in the order of drawing, of the tensors whose elements are two apart in memory.

    Attributes:
        drawn: number of tensors drawn so far.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, fp64: bool = False, strided: Container[int] = ()
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.fp64 = fp64
        self.strided = strided
        self.drawn = 0
        self._generator = torch.Generator(device).manual_seed(0)

    def rounded(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Round ``x`` to ``dtype``, by default that of the activations. If ``fp64``, return it in float64."""
        x = x.to(dtype or self.dtype)
        return self._laid_out(x.double() if self.fp64 else x)

    def _laid_out(self, x: Tensor) -> Tensor:
        self.drawn += 1
        if self.drawn - 1 not in self.strided or x.dim() == 0:
            return x
        between = torch.full_like(x, torch.nan) if x.is_floating_point() else (x == 0).to(x.dtype)
        return torch.stack((x, between), -1)[..., 0]

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed values with the standard deviation ``scale``."""
        return self.rounded(torch.randn(shape, device=self.device, generator=self._generator) * scale, dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return uniformly distributed values between ``low`` and ``high``."""
        values = torch.rand(shape, device=self.device, generator=self._generator)
        return self.rounded(low + (high - low) * values, dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return integers from ``low`` to ``high - 1``."""
        return self._laid_out(torch.randint(low, high, shape, device=self.device, generator=self._generator).to(dtype))

    def permutation(self, count: int) -> Tensor:
        """Return the integers below ``count`` in random order."""
        return self._laid_out(torch.randperm(count, device=self.device, generator=self._generator))

    def seed(self) -> Tensor:
        """Return a seed for dropout."""
        return torch.tensor(-0x0123456789ABCDEF, device=self.device)

    def scaling(self, scale: float = 0.0) -> Scaling:
        """Return the state of an FP8 scale; ``scale`` is 0 before the first use."""
        return Scaling(torch.full((), scale, device=self.device), torch.zeros(2, dtype=torch.int32, device=self.device))


class Pass(NamedTuple):
    """One direction of an operation.

    Attributes:
        name: name of the pass, such as ``forward``.
        run: function that enqueues the pass and returns everything that tests compare: tensors, FP8 tensors, states of
            scales and None, in tuples of any depth. It can run any number of times.
        bytes: bytes that the pass must move: each input is read once, each output is written once.
        flops: floating-point operations; 0 where only memory traffic matters.
        after: name of an earlier pass that ``run`` repeats first; the bench subtracts its time.
        facts: function that returns more values for the tests to compare, after ``run``. It may wait for the device.
    """

    name: str
    run: Callable[[], Any]
    bytes: float
    flops: float = 0.0
    after: str | None = None
    facts: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Case:
    """An operation at the sizes of a recipe, and at the smaller sizes of its tests.

    Attributes:
        name: recipe that the sizes come from, or the feature that distinguishes the case from the others.
        build: function that makes the passes; it is called with the function of an implementation, a :class:`Draw` and
            the sizes as keyword arguments.
        sizes: sizes of the recipe, which the bench measures. The request to the operation contains the integers.
        tests: sizes of the tests; each replaces some of ``sizes``. Choose them so that some tiles are not full.
        gpu: sizes of one more test, which runs only on a GPU; None for no such test.
        dtypes: dtypes of the activations. The bench uses the last one. Tests use the first and the last in Triton's
            interpreter. On a GPU they use all of them for the first sizes, and the last one for ``gpu``.
        only: names of the implementations that the case applies to; empty for all.
        tolerance: factor on :data:`TOLERANCE`.
        library_tolerance: factor on the error that is always allowed to implementations from other libraries.
        exact: whether results must equal those of the reference in the same dtype, bit for bit.
        fp64: whether the reference computes the expected values in float64. Otherwise it uses the dtype of the
            activations.
        tf32: whether kernels multiply matrices in fp32, for which a GPU uses TF32.
    """

    name: str
    build: Callable[..., list[Pass]]
    sizes: Mapping[str, Any]
    tests: Sequence[Mapping[str, Any]] = ()
    gpu: Mapping[str, Any] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    only: tuple[str, ...] = ()
    tolerance: float = 1.0
    library_tolerance: float = 1.0
    exact: bool = False
    fp64: bool = True
    tf32: bool = False

    def passes(self, function: Any, draw: Draw, **sizes: Any) -> list[Pass]:
        """Make the passes of an implementation's ``function``; ``sizes`` replace some of the recipe's sizes."""
        return self.build(function, draw, **{**self.sizes, **sizes})

    def request(self, device: torch.device, dtype: torch.dtype, **sizes: Any) -> OperationRequest:
        """Return the request of a model with the recipe's sizes; ``sizes`` replace some of them."""
        integers = {name: size for name, size in {**self.sizes, **sizes}.items() if isinstance(size, int)}
        return OperationRequest(device, dtype, integers)

    def implementations(self, operation: Operation) -> tuple[str, ...]:
        """Return the names of the faster implementations that the case applies to."""
        return tuple(name for name in operation.fast if not self.only or name in self.only)


def size_of(*tensors: Tensor | None) -> float:
    """Return the total number of bytes of tensors."""
    return float(sum(x.numel() * x.element_size() for x in tensors if x is not None))


def with_gradients(
    inputs: list[Tensor], gradients: Sequence[Tensor], function: Callable[[], Tensor | tuple[Tensor, ...]]
) -> Callable[[], Any]:
    """Return a function that runs ``function`` and its backward pass with autograd, and returns the gradients."""
    return lambda: torch.autograd.grad(function(), inputs, gradients)


def both_ways(
    function: Callable[[], Tensor | tuple[Tensor, ...]],
    inputs: list[Tensor],
    gradients: Sequence[Tensor],
    *,
    moved: tuple[float, float],
    flops: tuple[float, float] = (0.0, 0.0),
) -> list[Pass]:
    """Make the forward and backward passes of a function with autograd.

    Args:
        function: function that enqueues the forward pass; it has one result, or as many as there are gradients.
        inputs: tensors that get a gradient.
        gradients: gradients of the results.
        moved: bytes moved by the forward pass and by the backward pass.
        flops: floating-point operations of the forward pass and of the backward pass.
    """
    for x in inputs:
        x.requires_grad_()
    return [
        Pass("forward", function, moved[0], flops[0]),
        Pass("backward", with_gradients(inputs, gradients, function), moved[1], flops[1], after="forward"),
    ]


def rotating(make: Callable[[], T], input_bytes: float) -> Iterator[T]:
    """Cycle through sets of inputs that together exceed the L2 cache, at most ``MOST_ROTATED`` of them.

    Args:
        make: function that makes one set.
        input_bytes: bytes of one set.
    """
    return itertools.cycle([make() for _ in range(min(int(ROTATED_BYTES // input_bytes) + 1, MOST_ROTATED))])
