"""Comparison of implementations of operations with the reference, for their cases."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from common.ops.cases import TF32_TOLERANCE, TOLERANCE, Case, Draw
from common.ops.fp8_cast.reference import Fp8Tensor, Scaling
from common.ops.operation import REFERENCE, Operation
from tests.fp8_oracle import assert_same_fp8

NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}

LIBRARIES = frozenset(
    {"apex", "cublaslt", "cudnn", "cudnn_frontend", "flash", "flash_attention_4", "library", "te"}
    | {"transposed_library"}
)
"""Names of implementations that call a library."""

NOISE = 1e-5
"""Fraction of the largest FP8 value. Smaller values are not compared: they may be differences of large terms."""


def parameters(key: str, operation: Operation, cases: tuple[Case, ...], *, gpu: bool) -> Iterator[Any]:
    """Yield the parameters of tests: operation, name of the implementation, case, sizes of the test, and dtype.

    Args:
        key: name of the operation in the catalogue.
        operation: the operation.
        cases: cases of the operation.
        gpu: whether to include every dtype and the sizes for a GPU. Otherwise only the first and the last dtype.

    On a GPU the first sizes are tested in all dtypes, the sizes for a GPU in the last one, and the others in turn. On a
    CPU the first sizes of each case are tested in the first dtype, and the second (or only) sizes of the first case in
    the last; all other combinations are marked slow.
    """
    for case in cases:
        dtypes = case.dtypes if gpu else tuple(dict.fromkeys((case.dtypes[0], case.dtypes[-1])))
        for name in case.implementations(operation):
            for number, sizes in enumerate(case.tests):
                for dtype in dtypes:
                    in_turn = dtype == dtypes[number % len(dtypes)]
                    second = case is cases[0] and number == min(1, len(case.tests) - 1) and dtype == dtypes[-1]
                    quick = second or (number == 0 and in_turn)
                    if not gpu or in_turn or number == 0:
                        identity = f"{key}-{name}-{case.name}-{number}-{NAMES[dtype]}"
                        marks = () if gpu or quick else pytest.mark.slow
                        yield pytest.param(operation, name, case, sizes, dtype, id=identity, marks=marks)
            if gpu and case.gpu is not None:
                identity = f"{key}-{name}-{case.name}-large-{NAMES[dtypes[-1]]}"
                yield pytest.param(operation, name, case, case.gpu, dtypes[-1], id=identity)


def check(
    operation: Operation,
    name: str,
    case: Case,
    sizes: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    strided: Container[int] = (),
) -> None:
    """Check that every pass of an implementation gives the results of the reference.

    Floating-point results are compared with the reference in float64 for the same rounded inputs. FP8 values, the
    states of scales and integers are compared with the reference in the same dtype, and so are all results of an
    ``exact`` case. The tolerance of a library allows sums of 16-bit activations in 16 bits. The implementation gets
    the inputs with the numbers ``strided`` in memory that is not contiguous.
    """
    least = TOLERANCE[dtype] if name in LIBRARIES else 0.0
    if device.type == "cuda" and dtype == torch.float32 and (case.tf32 or name in LIBRARIES):
        least = TF32_TOLERANCE

    def run(name: str, fp64: bool, strided: Container[int] = ()) -> dict[str, Any]:
        draw = Draw(device, dtype, fp64=fp64, strided=strided)
        found = {}
        for each in case.passes(operation.function(name), draw, **sizes):
            found[each.name] = each.run(), None if each.facts is None else each.facts()
        return found

    same = run(REFERENCE, False)
    expected = run(REFERENCE, True) if case.fp64 and not case.exact else same
    found = run(name, False, strided)
    assert found.keys() == same.keys()
    for pass_ in found:
        _assert_same(pass_, found[pass_], expected[pass_], same[pass_], _Limits(case, dtype, least))


class _Limits(NamedTuple):
    """Largest relative errors that results may have.

    Attributes:
        case: the case, for its tolerance.
        dtype: dtype of the activations.
        least: relative error that is always allowed, before the case's factor for libraries.
    """

    case: Case
    dtype: torch.dtype
    least: float

    def of(self, same: Tensor, expected: Tensor) -> float:
        """Return the largest allowed relative error of a result. ``same`` is the reference in the same dtype."""
        own = min(2 * _error(same, expected), TOLERANCE[self.dtype])
        return max(self.case.tolerance * max(TOLERANCE[same.dtype], own), self.case.library_tolerance * self.least)


def _assert_same(path: str, found: Any, expected: Any, same: Any, limits: _Limits) -> None:
    assert (found is None) == (same is None), f"{path}: {type(found)}, not {type(same)}"
    match same:
        case None:
            return
        case Fp8Tensor():
            assert_same_fp8(found, None, same, None, same.source.dtype, NOISE)
        case Scaling():
            torch.testing.assert_close(found.scale, same.scale, rtol=1e-5, atol=0, msg=lambda text: f"{path}: {text}")
            assert torch.equal(found.pending, same.pending), path
        case Tensor():
            _assert_same_tensor(path, found, expected, same, limits)
        case Mapping():
            assert found.keys() == same.keys(), path
            for key in same:
                _assert_same(f"{path}[{key!r}]", found[key], expected[key], same[key], limits)
        case tuple() | list():
            assert len(found) == len(same), path
            for number, parts in enumerate(zip(found, expected, same, strict=True)):
                _assert_same(f"{path}[{number}]", *parts, limits)
        case _:
            assert found == same, path


def _assert_same_tensor(path: str, found: Tensor, expected: Tensor, same: Tensor, limits: _Limits) -> None:
    assert found.shape == same.shape, path
    assert found.dtype == same.dtype, path
    if limits.case.exact or not same.dtype.is_floating_point:
        assert torch.equal(found, same), f"{path}: {(found != same).sum()} of {same.numel()} elements differ"
        return
    if same.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.equal(found.view(torch.uint8), same.view(torch.uint8)), path
        return
    finite = same.isfinite()
    assert torch.equal(found.isfinite(), finite), f"{path}: different elements are finite"
    assert torch.equal(_kinds(found[~finite]), _kinds(same[~finite])), f"{path}: other infinities, or NaN for one"
    limit, error = limits.of(same, expected), _error(found, expected)
    assert error <= limit, f"{path}: relative error {error:.2e} is above {limit:.2e}"


def _kinds(x: Tensor) -> Tensor:
    """Return 0 for NaN, and 1 or -1 for the infinities."""
    return x.sign().nan_to_num(0.0)


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error of the finite elements: norm of differences by norm of expected values."""
    finite = expected.isfinite() & found.isfinite()
    apart, norm = (found.double() - expected.double())[finite].norm(), expected.double()[finite].norm()
    return (apart / norm.clamp(min=torch.finfo(torch.float32).tiny)).item()
