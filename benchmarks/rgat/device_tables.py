"""Numbers of the host that kernels look up, copied to a device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def device_table(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of (nested) numbers on ``device``; see :func:`to_device`."""
    if device.type == "cuda":
        return to_device(torch.tensor(values, dtype=dtype), device)
    return torch.tensor(values, dtype=dtype, device=device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on ``device``: a GPU copies it from pinned memory when its current stream comes to that.

    Other streams have to wait for that one before they read it.

    Raises:
        RuntimeError: in the capture of a CUDA graph, whose replays would copy from memory that has been given back.
    """
    if device.type != "cuda":
        return host.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a table of the host's numbers has to be made before a CUDA graph is captured")
    return host.pin_memory().to(device, non_blocking=True)
