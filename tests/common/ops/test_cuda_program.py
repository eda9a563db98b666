"""Test the compilation of CUDA C++ by NVRTC, and the arguments of a launch."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch

from common.ops import cuda_program
from common.ops.cuda_program import CudaKernel, compiled, no_compiler

SOURCE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'

with_compiler = pytest.mark.skipif(no_compiler() is not None, reason="NVRTC cannot be loaded")


@with_compiler
def test_a_source_becomes_a_cubin_with_its_kernel():
    cubin = compiled(SOURCE, "twice.cu", "sm_90a")
    assert cubin.startswith(b"\x7fELF")
    assert b"twice" in cubin


@with_compiler
def test_a_compilation_error_has_the_compilers_message():
    with pytest.raises(RuntimeError, match=r"(?s)broken.cu: NVRTC: .*identifier \"y\" is undefined"):
        compiled(SOURCE.replace("2.0f", "y"), "broken.cu", "sm_90a")


@with_compiler
def test_an_unknown_architecture_is_reported():
    with pytest.raises(RuntimeError, match=r"old.cu: NVRTC: "):
        compiled(SOURCE, "old.cu", "sm_13")


def test_without_cuda_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert no_compiler() == "PyTorch is built without CUDA"


class Driver:
    """Reads the structure of a launch in ``cuda.h``: seven words, the stream, and attributes of 72 bytes each."""

    def __init__(self) -> None:
        self.words: tuple[int, ...] = ()
        self.stream = 0
        self.attributes: list[tuple[int, tuple[int, ...]]] = []
        self.arguments: list[int] = []

    def cuLaunchKernelEx(self, configuration: object, function: object, arguments: object, extra: object) -> int:  # noqa: N802
        raw = ctypes.string_at(ctypes.addressof(configuration._obj), 56)  # type: ignore[attr-defined]
        self.words = struct.unpack_from("7I", raw)
        self.stream, pointer, count = struct.unpack_from("QQI", raw, 32)
        for index in range(count):
            attribute = ctypes.string_at(pointer + 72 * index, 72)
            self.attributes.append((struct.unpack_from("i", attribute)[0], struct.unpack_from("3I", attribute, 8)))
        for index, kind in enumerate((ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)):
            self.arguments.append(kind.from_address(arguments[index]).value)  # type: ignore[index]
        return 0


@pytest.mark.parametrize("cluster", [1, 4])
def test_the_driver_receives_grid_memory_cluster_and_arguments(cluster, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda_program, "_driver", lambda: driver)

    class Stream:
        cuda_stream = 77

    class Nothing:
        def __init__(self, device: torch.device) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    kernel = CudaKernel.__new__(CudaKernel)
    kernel.__dict__ |= {
        "_name": "k", "_threads": 256, "_shared_bytes": 1000, "_cluster": cluster, "_device": torch.device("cpu"),
        "_function": None,
    }  # fmt: skip
    x = torch.zeros(3)
    kernel.launch_cooperatively(128, [x, None, 5])
    assert driver.words == (128, 1, 1, 256, 1, 1, 1000)
    assert driver.stream == 77
    assert driver.arguments == [x.data_ptr(), 0, 5]
    attributes = dict(driver.attributes)
    assert attributes[2][0] == 1  # cooperative
    assert attributes.get(4) == ((4, 1, 1) if cluster == 4 else None)
