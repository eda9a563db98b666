"""Compile and launch CUDA C++ kernels, for features that Triton lacks.

Kernels are compiled at first use by the NVRTC that comes with PyTorch and launched through the driver, so ``nvcc`` is
not needed. A kernel whose blocks wait for one another is launched cooperatively: all of its blocks start together or
none does, even while other kernels run. Launches go to the current stream and can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE_COOPERATIVE, _ATTRIBUTE_CLUSTER = 2, 4
"""Values of ``CU_LAUNCH_ATTRIBUTE_COOPERATIVE`` and ``CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`` in ``cuda.h``."""
_FUNCTION_SHARED_BYTES = 8
"""Value of ``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`` in ``cuda.h``."""


class _Attribute(ctypes.Structure):
    """The struct ``CUlaunchAttribute`` of ``cuda.h``."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_ubyte * 64))


class _Configuration(ctypes.Structure):
    """The struct ``CUlaunchConfig`` of ``cuda.h``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def _compiler() -> ctypes.CDLL:
    """Load NVRTC.

    Raises:
        OSError: there is no NVRTC for the CUDA version of PyTorch.
    """
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        spec = importlib.util.find_spec("nvidia")
        folders = [] if spec is None else spec.submodule_search_locations or []
        for found in (path for folder in folders for path in sorted(Path(folder).glob(f"*/lib/{name}"))):
            return ctypes.CDLL(str(found))
        raise


def no_compiler() -> str | None:
    """Return why this machine cannot compile CUDA C++, or None if it can."""
    if torch.version.cuda is None:
        return "PyTorch is built without CUDA"
    try:
        _compiler()
    except OSError as error:
        return f"NVRTC cannot be loaded: {error}"
    return None


@functools.cache
def compiled(source: str, name: str, architecture: str) -> bytes:
    """Compile CUDA C++ and return the machine code (a cubin).

    Args:
        source: source text without ``#include``.
        name: name of the source in the compiler's messages.
        architecture: GPU architecture, such as ``sm_90a``.

    Raises:
        RuntimeError: the source does not compile.
    """
    nvrtc, program = _compiler(), ctypes.c_void_p()

    def check(status: int) -> None:
        if status:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{name}: NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()}\n{log()}")

    def text(size_of: Any, read: Any) -> bytes:
        size = ctypes.c_size_t()
        if size_of(program, ctypes.byref(size)):
            return b""
        buffer = ctypes.create_string_buffer(size.value)
        read(program, buffer)
        return buffer.raw

    def log() -> str:
        return text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode(errors="replace")

    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        check(nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
        return text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        message = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(message))
        raise RuntimeError(f"{what}: {(message.value or b'unknown error').decode()} (CUDA driver, {status})")


class CudaKernel:
    """A kernel of a cubin on one device.

    Args:
        cubin: result of :func:`compiled`.
        name: name of the function, which is declared ``extern "C"``.
        threads: threads per block.
        shared_bytes: dynamic shared memory per block.
        cluster: number of neighbouring blocks that share memory.

    Raises:
        RuntimeError: the driver rejects the kernel, for example because the GPU has too little shared memory.
    """

    def __init__(
        self, cubin: bytes, name: str, threads: int, shared_bytes: int, cluster: int, device: torch.device
    ) -> None:
        self._name, self._threads, self._shared_bytes, self._cluster = name, threads, shared_bytes, cluster
        self._device = device
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # create the context of the device
            _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), name)
            _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), name)
            _check(_driver().cuFuncSetAttribute(self._function, _FUNCTION_SHARED_BYTES, shared_bytes), name)

    def resident_blocks(self) -> int:
        """Return how many blocks the whole device can run at a time."""
        found, driver = ctypes.c_int(), _driver()
        multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count
        with torch.cuda.device(self._device):
            if self._cluster > 1:
                configuration = self._configuration(self._cluster * multiprocessors, None, cooperative=False)
                _check(
                    driver.cuOccupancyMaxActiveClusters(
                        ctypes.byref(found), self._function, ctypes.byref(configuration)
                    ),
                    self._name,
                )
                return found.value * self._cluster
            _check(
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    ctypes.byref(found), self._function, self._threads, ctypes.c_size_t(self._shared_bytes)
                ),
                self._name,
            )
        return found.value * multiprocessors

    def launch_cooperatively(self, blocks: int, arguments: Sequence[Tensor | int | None]) -> None:
        """Enqueue all blocks, which start together.

        Args:
            blocks: size of the grid; a multiple of ``cluster``, at most :meth:`resident_blocks`.
            arguments: arguments of the kernel: tensors or None for pointers, numbers for ``int``.
        """
        values: list[Any] = [
            ctypes.c_int(argument)
            if isinstance(argument, int)
            else ctypes.c_void_p(None if argument is None else argument.data_ptr())
            for argument in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        with torch.cuda.device(self._device):
            configuration = self._configuration(blocks, torch.cuda.current_stream().cuda_stream, cooperative=True)
            _check(_driver().cuLaunchKernelEx(ctypes.byref(configuration), self._function, pointers, None), self._name)

    def _configuration(self, blocks: int, stream: int | None, cooperative: bool) -> _Configuration:
        chosen = [(_ATTRIBUTE_CLUSTER, struct.pack("3I", self._cluster, 1, 1))] if self._cluster > 1 else []
        if cooperative:
            chosen.append((_ATTRIBUTE_COOPERATIVE, struct.pack("i", 1)))
        attributes = (_Attribute * len(chosen))()
        for attribute, (number, value) in zip(attributes, chosen, strict=True):
            attribute.id = number
            ctypes.memmove(attribute.value, value, len(value))
        return _Configuration(
            (ctypes.c_uint * 3)(blocks, 1, 1), (ctypes.c_uint * 3)(self._threads, 1, 1), self._shared_bytes, stream,
            ctypes.cast(attributes, ctypes.POINTER(_Attribute)), len(chosen),
        )  # fmt: skip
