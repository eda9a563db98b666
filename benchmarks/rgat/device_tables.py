"""Tables of host numbers for kernels, copied to a device without synchronization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def device_table(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (nested) sequences of numbers as a tensor on ``device``; see :func:`to_device`."""
    if device.type == "cuda":
        return to_device(torch.tensor(values, dtype=dtype), device)
    return torch.tensor(values, dtype=dtype, device=device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on ``device``. A GPU copies it from pinned memory on its current stream.

    Other streams must wait for this stream before they read the result.

    Raises:
        RuntimeError: a CUDA graph is being captured; its replays would copy from freed memory.
    """
    if device.type != "cuda":
        return host.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a table of the host's numbers has to be made before a CUDA graph is captured")
    return host.pin_memory().to(device, non_blocking=True)
