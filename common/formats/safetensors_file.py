"""Complete safetensors files, written and read without a second copy of the tensors in memory.

The library's writer first copies every tensor into a byte string. This module writes a checkpoint of gigabytes
directly from the tensors' memory (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import CheckpointError
from common.untrusted.safetensors_header import read_header

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write ``tensors``, contiguous and in host memory, durably to ``path``.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
        KeyError: the format does not support a dtype.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def read_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of ``path`` on ``device``, by name.

    Raises:
        CheckpointError: the file is missing, truncated, or of another format.
    """
    try:
        read_header(path)  # check first, because the library reads headers of any size that the format allows
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
