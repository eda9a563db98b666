"""Time stamps on the device: the time at which a stream reaches a point, also in a captured CUDA graph.

An event that was recorded during capture cannot be read between replays without racing the next replay. A number in a
tensor is copied together with the other results of the iteration.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor


def stamp(moment: Tensor) -> None:
    """Write the time at which the current stream reaches this point.

    On a GPU this is the nanosecond counter that its multiprocessors share (PTX ``%globaltimer``, resolution about 1
    us), on a CPU ``time.perf_counter_ns``. Only differences between stamps of one device are meaningful.

    Args:
        moment: int64 tensor with one element, which gets the nanoseconds.
    """
    if moment.device.type == "cuda":
        from common.ops.device_clock.kernels import launch

        launch(moment)
    else:
        moment.fill_(time.perf_counter_ns())


def milliseconds(before: Tensor, after: Tensor) -> Tensor:
    """Return the milliseconds between two stamps, 0-d float32 on their device."""
    return (after - before).to(torch.float32).mul(1e-6).squeeze()
