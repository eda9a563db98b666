"""Weight gradients by direct calls of cuBLASLt's product, which adds to its output: ``D = A B + C`` with C = D.

``torch._scaled_mm`` calls the same function without C. The library is the one that PyTorch has loaded; constants and
structures are those of ``cublasLt.h`` and ``library_types.h`` of CUDA 12 and 13. cuBLASLt stores matrices by columns:
its A is our x (T, I), to be transposed, its B our dy (T, O), and its D the gradient (I, O).

A call enqueues one kernel on the current stream, or two if the sum over tokens is split. A CUDA graph can capture it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.triton_support import require_contiguous

Scratch = Callable[[Sequence[int], torch.dtype], Tensor]
"""``scratch(shape, dtype)`` returns uninitialised memory that the operation may use until it returns."""

WORKSPACE = 32 * 1024**2
"""Size of the workspace in bytes; NVIDIA's recommendation for Hopper GPUs."""

ALIGNMENT = 16
"""Alignment of matrices and scales in bytes."""

_TYPES = {
    torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29,
}  # fmt: skip
"""``cudaDataType`` of each dtype."""

_COMPUTE_32F, _R_32F, _TRANSPOSE = 68, 0, 1
_TRANSA, _A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_ACCUM = 3, 17, 18, 25
"""Attributes ``CUBLASLT_MATMUL_DESC_...``."""

_MAX_WORKSPACE_BYTES, _MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
"""Attributes ``CUBLASLT_MATMUL_PREF_...``; the alignments are those of A, B, C and D."""

_MOST_ALIGNED = 256
"""Alignment in bytes above which more makes no difference."""


class _Algorithm(ctypes.Structure):
    """``cublasLtMatmulAlgo_t``."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Shape(NamedTuple):
    """Key of a plan.

    Attributes:
        device: index of the GPU.
        outputs, inputs, tokens: O, I, T.
        alignments: alignment of x, dy and gradient in bytes.
    """

    device: int
    outputs: int
    inputs: int
    tokens: int
    x: torch.dtype
    dy: torch.dtype
    gradient: torch.dtype
    alignments: tuple[int, int, int]


class _ProductPlan(NamedTuple):
    """Plan for products of one shape.

    Attributes:
        x, dy, gradient: ``cublasLtMatrixLayout_t``.
        chosen: algorithm, and its workspace in bytes.
    """

    x: ctypes.c_void_p
    dy: ctypes.c_void_p
    gradient: ctypes.c_void_p
    chosen: _Heuristic


def accumulate(
    dy_OT: Tensor, x_IT: Tensor, dy_inverse: Tensor, x_inverse: Tensor, gradient_OI: Tensor, scratch: Scratch
) -> None:
    """Add ``dy^T x`` to ``gradient_OI``.

    See :func:`common.ops.weight_gradient.accumulate_reference`. ``scratch`` provides cuBLASLt's workspace.

    Raises:
        RuntimeError: cuBLASLt has no kernel for these matrices, or refuses them.
        ValueError: a matrix or scale has a wrong shape, dtype or memory layout.
    """
    require_contiguous(dy=dy_OT, x=x_IT, gradient=gradient_OI)
    if dy_inverse.dtype != torch.float32 or x_inverse.dtype != torch.float32:
        raise ValueError(f"scales are fp32, not {dy_inverse.dtype} and {x_inverse.dtype}")
    given = {"dy": dy_OT, "x": x_IT, "gradient": gradient_OI, "dy_inverse": dy_inverse, "x_inverse": x_inverse}
    for name, tensor in given.items():
        if tensor.data_ptr() % ALIGNMENT:
            raise ValueError(f"{name} must lie on a multiple of {ALIGNMENT} bytes")
    (outputs, tokens), inputs = dy_OT.shape, len(x_IT)
    if x_IT.shape[1] != tokens or gradient_OI.shape != (outputs, inputs):
        raise ValueError(f"{tuple(dy_OT.shape)} times {tuple(x_IT.shape)} transposed isn't {tuple(gradient_OI.shape)}")
    device = dy_OT.device.index
    dtypes = (x_IT.dtype, dy_OT.dtype, gradient_OI.dtype)
    alignments = (_alignment(x_IT), _alignment(dy_OT), _alignment(gradient_OI))
    workspace = scratch((WORKSPACE,), torch.uint8)
    one = ctypes.c_float(1.0)
    with torch.cuda.device(device):
        plan = _plan(_Shape(device, outputs, inputs, tokens, *dtypes, alignments))
        description = _description(x_inverse.data_ptr(), dy_inverse.data_ptr())
        try:
            _call(
                "cublasLtMatmul", _handle(device), description, ctypes.byref(one),
                ctypes.c_void_p(x_IT.data_ptr()), plan.x, ctypes.c_void_p(dy_OT.data_ptr()), plan.dy,
                ctypes.byref(one), ctypes.c_void_p(gradient_OI.data_ptr()), plan.gradient,
                ctypes.c_void_p(gradient_OI.data_ptr()), plan.gradient, ctypes.byref(plan.chosen.algorithm),
                ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(WORKSPACE),
                ctypes.c_void_p(torch.cuda.current_stream(dy_OT.device).cuda_stream),
            )  # fmt: skip
        finally:
            _call("cublasLtMatmulDescDestroy", description)


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library that PyTorch has loaded.

    Raises:
        OSError: there is no library for PyTorch's version of CUDA.
    """
    return ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")


def _call(name: str, *arguments: object) -> None:
    """Call a function of the library.

    Raises:
        RuntimeError: it failed.
    """
    status = getattr(library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with cuBLAS status {status} ({_status_name(status)})")


def _status_name(status: int) -> str:
    name = library().cublasLtGetStatusName
    name.restype = ctypes.c_char_p
    found: bytes | None = name(ctypes.c_int(status))
    return "unknown" if found is None else found.decode()


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    """Return the handle of this process for the current device, whose index is ``device``."""
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _description(x_inverse: int, dy_inverse: int) -> ctypes.c_void_p:
    """Return a ``cublasLtMatmulDesc_t`` of our product, with the addresses of both scales."""
    description = ctypes.c_void_p()
    _call("cublasLtMatmulDescCreate", ctypes.byref(description), ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_R_32F))
    attributes: tuple[tuple[int, ctypes.c_int32 | ctypes.c_int8 | ctypes.c_void_p], ...] = (
        (_TRANSA, ctypes.c_int32(_TRANSPOSE)),
        (_A_SCALE_POINTER, ctypes.c_void_p(x_inverse)),
        (_B_SCALE_POINTER, ctypes.c_void_p(dy_inverse)),
        (_FAST_ACCUM, ctypes.c_int8(1)),
    )
    for name, value in attributes:
        _call(
            "cublasLtMatmulDescSetAttribute", description, ctypes.c_int(name), ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )  # fmt: skip
    return description


def _alignment(tensor: Tensor) -> int:
    """Return the alignment of a tensor in bytes, a power of two."""
    address = tensor.data_ptr()
    return min(address & -address, _MOST_ALIGNED)


_PLANS: dict[_Shape, _ProductPlan] = {}
_LOCK = threading.Lock()


def _plan(shape: _Shape) -> _ProductPlan:
    """Return the plan for a shape on the current device: cuBLASLt's first proposal, requested once per shape."""
    with _LOCK:
        if shape not in _PLANS:
            _PLANS[shape] = _proposed(shape)
        return _PLANS[shape]


def _proposed(shape: _Shape) -> _ProductPlan:
    x, dy = _layout(shape.x, shape.tokens, shape.inputs), _layout(shape.dy, shape.tokens, shape.outputs)
    gradient = _layout(shape.gradient, shape.inputs, shape.outputs)
    preference, found, count = ctypes.c_void_p(), _Heuristic(), ctypes.c_int()
    # any aligned addresses: the choice depends only on the presence of scales and on their alignment
    description = _description(_MOST_ALIGNED, _MOST_ALIGNED)
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    try:
        _prefer(preference, _MAX_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE))
        for name, alignment in zip(_MIN_ALIGNMENTS, (*shape.alignments, shape.alignments[-1]), strict=True):
            _prefer(preference, name, ctypes.c_uint32(alignment))
        _call(
            "cublasLtMatmulAlgoGetHeuristic", _handle(shape.device), description, x, dy, gradient, gradient,
            preference, ctypes.c_int(1), ctypes.byref(found), ctypes.byref(count),
        )  # fmt: skip
    finally:
        _call("cublasLtMatmulPreferenceDestroy", preference)
        _call("cublasLtMatmulDescDestroy", description)
    if not count.value or found.state:
        raise RuntimeError(f"cuBLASLt has no product that adds, for {shape}")
    return _ProductPlan(x, dy, gradient, found)


def _prefer(preference: ctypes.c_void_p, name: int, value: ctypes.c_uint64 | ctypes.c_uint32) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _call("cublasLtMatmulPreferenceSetAttribute", preference, ctypes.c_int(name), ctypes.byref(value), size)


def _layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    """Return the layout of a matrix whose columns are contiguous and adjacent."""
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate", ctypes.byref(layout), ctypes.c_int(_TYPES[dtype]), ctypes.c_uint64(rows),
        ctypes.c_uint64(columns), ctypes.c_int64(rows),
    )  # fmt: skip
    return layout
