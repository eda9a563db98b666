"""Moments on the device: when its stream reaches a point, inside of a captured iteration too.

An event recorded during capture cannot be read between replays without racing the next one; a number in a tensor
travels with the iteration's result instead.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor


def stamp(moment: Tensor) -> None:
    """Write the time at which the current stream comes to this point.

    On a GPU it is the nanosecond counter that all its multiprocessors share (PTX ``%globaltimer``, about 1 us fine);
    on a CPU ``time.perf_counter_ns``. Only differences on one device mean anything.

    Args:
        moment: int64 tensor of one element, nanoseconds.
    """
    if moment.device.type == "cuda":
        from common.ops.device_clock.kernels import launch

        launch(moment)
    else:
        moment.fill_(time.perf_counter_ns())


def milliseconds(before: Tensor, after: Tensor) -> Tensor:
    """Milliseconds between two stamps, 0-d float32 on their device."""
    return (after - before).to(torch.float32).mul(1e-6).squeeze()
