"""What each rank of a split volume finds; test_spatial_convolution.py and its neighbours compare it with the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.distributed.layout import Layout
from common.distributed.spatial.convolution import SpatialConv3d
from common.distributed.spatial.halo import HaloExchange, HaloMessage, PointToPoint, build_exchange
from common.distributed.spatial.split import VolumeSplit, gather_slabs, own_slab
from common.errors import UnsupportedImplementation
from common.ops.local_convolution import LOCAL_CONVOLUTION
from common.ops.operation import Implementation

CHANNELS = (3, 4)
CASES = {
    f"stride{stride}-{'first' if first else 'inner'}-{implementation}": (stride, first, implementation)
    for stride, first, implementation in itertools.product((1, 2), (True, False), ("reference", "folded"))
}
"""Convolutions; the input of a first layer needs no gradient."""

HALO_DTYPES = (torch.float64, torch.bfloat16)
MEMORY_FORMATS = {"channels_first": torch.contiguous_format, "channels_last": torch.channels_last_3d}


def volumes(world: int) -> tuple[Tensor, Tensor]:
    """Two samples and a kernel; with stride 1 a slab has two planes, which are its first and last."""
    generator = torch.Generator().manual_seed(5)
    C_in, C_out = CHANNELS
    x_NCDHW = torch.randn(2, C_in, 2 * world, 6, 4, dtype=torch.float64, generator=generator)
    weight = torch.randn(C_out, C_in, 3, 3, 3, dtype=torch.float64, generator=generator)
    return x_NCDHW, weight


def gradient(world: int, stride: int) -> Tensor:
    """Of the whole result."""
    generator = torch.Generator().manual_seed(6)
    shape = (2, CHANNELS[1], 2 * world // stride, 6 // stride, 4 // stride)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


class Counting:
    """A transport that counts what it is asked to move."""

    name = "counting"

    def __init__(self, transport: PointToPoint) -> None:
        self.planes_sent = 0
        self._transport = transport

    def start(self, sends: Sequence[HaloMessage], receives: Sequence[HaloMessage]) -> Callable[[], None]:
        self.planes_sent += len(sends)
        return self._transport.start(sends, receives)


def convolve(split: VolumeSplit, stride: int, first: bool, implementation: str) -> dict[str, Any]:
    """Result, gradients and planes sent of one convolution."""
    assert split.group is not None
    transport = Counting(PointToPoint(split.group))
    exchange = HaloExchange(split, transport, torch.device("cpu"))
    layer = SpatialConv3d(*CHANNELS, stride, exchange=exchange, implementation=implementation, dtype=torch.float64)
    x_NCDHW, weight = volumes(split.ranks)
    with torch.no_grad():
        layer.weight.copy_(weight)
    slab_NCDHW = split.slab(x_NCDHW).clone().requires_grad_(not first)
    y_NCDHW = layer(slab_NCDHW)
    sent_forward = transport.planes_sent
    y_NCDHW.backward(split.slab(gradient(split.ranks, stride)))
    return {
        "y": y_NCDHW.detach(),
        "dx": slab_NCDHW.grad,
        "dweight": layer.weight.grad,
        "sent": (sent_forward, transport.planes_sent - sent_forward),
    }


def exchange_planes(split: VolumeSplit, dtype: torch.dtype, memory_format: torch.memory_format) -> dict[str, Any]:
    """Halos of both directions, of one, and of two exchanges under way at a time."""
    exchange = build_exchange(split, torch.device("cpu"))
    slab_NCDHW = split.slab(volumes(split.ranks)[0].to(dtype)).clone(memory_format=memory_format)
    found = {}
    for name, directions in {"both": {}, "to_next": {"to_previous": False}, "to_previous": {"to_next": False}}.items():
        with exchange.start(slab_NCDHW, **directions).received() as halos:
            found[name] = (halos.low, halos.high)
    first, second = exchange.start(slab_NCDHW), exchange.start(-slab_NCDHW)
    with first.received() as halos:
        found["first of two"] = (halos.low, halos.high)
    with second.received() as halos:
        found["second of two"] = (halos.low, halos.high)
    return found


def squash(x_NCDHW: Tensor, weight: Tensor) -> Tensor:
    """Something that is computed redundantly: it mixes all voxels."""
    return torch.tanh(F.conv3d(x_NCDHW, weight, padding=1)) * x_NCDHW.sum()


def gather_and_deal(split: VolumeSplit) -> dict[str, Tensor]:
    """Through a redundant part and back; this rank's slab of the result and the gradients."""
    x_NCDHW, weight = volumes(split.ranks)
    weight.requires_grad_()
    slab_NCDHW = split.slab(x_NCDHW).clone().requires_grad_()
    gathered_NCDHW = gather_slabs(slab_NCDHW, split)
    half_NCDHW = gather_slabs(slab_NCDHW.detach().bfloat16(), split)
    y_NCDHW = own_slab(squash(gathered_NCDHW, weight), split)
    y_NCDHW.backward(split.slab(gradient(split.ranks, 1)))
    assert slab_NCDHW.grad is not None
    assert weight.grad is not None
    return {
        "gathered": gathered_NCDHW.detach(),
        "gathered bf16": half_NCDHW,
        "y": y_NCDHW.detach(),
        "dx": slab_NCDHW.grad,
        "dweight": weight.grad,
    }


def run_rank(rank: int, world: int, _: str) -> dict[str, Any]:
    split = VolumeSplit.from_layout(Layout({"cp": world}, rank))
    assert split is not None
    LOCAL_CONVOLUTION.fast["folded"] = Implementation(LOCAL_CONVOLUTION.function("folded"))  # not fast here
    uneven = torch.full((3,), 0.1 * 3.0**rank, dtype=torch.float32)
    split.sum_(uneven)
    return {
        "convolution": {name: convolve(split, *case) for name, case in CASES.items()},
        "halos": {
            (dtype, name): exchange_planes(split, dtype, memory_format)
            for dtype in HALO_DTYPES
            for name, memory_format in MEMORY_FORMATS.items()
        },
        "gathering": gather_and_deal(split),
        "sum": uneven,
        "auto": build_exchange(split, torch.device("cpu")).transport.name,
        "refusals": [refusal(split, requested) for requested in ("symmetric_memory", "pigeon")],
    }


def refusal(split: VolumeSplit, requested: str) -> str:
    try:
        build_exchange(split, torch.device("cpu"), requested)
    except UnsupportedImplementation as error:
        return str(error)
    return "none"
