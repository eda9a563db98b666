"""Whole safetensors files, written and read with no second copy of the tensors in memory.

The library's own writer copies every tensor into a string of bytes first; a checkpoint of gigabytes is written here
straight from the memory that it lies in (https://github.com/huggingface/safetensors, "Format").
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
    """Write ``tensors``, contiguous and in host memory, to ``path``; on the disk when this returns.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
        KeyError: the format has no name for a dtype.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name, tensor in tensors.items():
        end = place + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
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
    """The tensors of ``path`` on ``device``, by name.

    Raises:
        CheckpointError: it is missing, cut off, or no file of the format.
    """
    try:
        read_header(path)  # the library reads headers of any size that the format allows
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
