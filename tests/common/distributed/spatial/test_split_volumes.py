"""Slabs of a volume on two, four and eight gloo ranks: together they give what one rank gives for the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.distributed.layout import Layout
from common.distributed.messages import Message
from common.distributed.spatial.convolution import SpatialConv3d
from common.distributed.spatial.halo import HaloExchange, PointToPoint, build_exchange
from common.distributed.spatial.split import VolumeSplit, gather_slabs, own_slab
from common.errors import UnsupportedImplementation
from common.ops.local_convolution import LOCAL_CONVOLUTION
from common.ops.operation import Implementation
from tests.gloo_ranks import on_ranks

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

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
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


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4, pytest.param(8, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What every rank has found, in the order of the slabs."""
    return on_ranks(run_rank, request.param, tmp_path_factory.mktemp("slabs"))


def whole_convolution(world: int, stride: int) -> dict[str, torch.Tensor]:
    x_NCDHW, weight = (tensor.requires_grad_() for tensor in volumes(world))
    y_NCDHW = F.conv3d(x_NCDHW, weight, stride=stride, padding=1)
    y_NCDHW.backward(gradient(world, stride))
    return {"y": y_NCDHW.detach(), "dx": x_NCDHW.grad, "dweight": weight.grad}


def joined(ranks: Ranks, case: str, name: str) -> torch.Tensor:
    return torch.cat([rank["convolution"][case][name] for rank in ranks], dim=2)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("case", list(CASES))
def test_slabs_convolve_to_the_whole(ranks, case):
    expected = whole_convolution(len(ranks), CASES[case][0])
    assert_equal(joined(ranks, case, "y"), expected["y"])


@pytest.mark.parametrize("case", [name for name, (_, first, _) in CASES.items() if not first])
def test_the_gradients_of_the_slabs_are_those_of_the_whole_input(ranks, case):
    expected = whole_convolution(len(ranks), CASES[case][0])
    assert_equal(joined(ranks, case, "dx"), expected["dx"])


@pytest.mark.parametrize("case", list(CASES))
def test_the_gradients_of_the_weight_sum_to_that_of_the_whole(ranks, case):
    expected = whole_convolution(len(ranks), CASES[case][0])
    assert_equal(sum(rank["convolution"][case]["dweight"] for rank in ranks), expected["dweight"])


@pytest.mark.parametrize("case", list(CASES))
def test_no_plane_is_sent_that_nobody_needs(ranks, case):
    stride, first, _ = CASES[case]
    faces = (
        2 * (len(ranks) - 1) // stride
    )  # with stride 2 only the low halo is needed, and in backward only the high one
    sent = [rank["convolution"][case]["sent"] for rank in ranks]
    assert sum(forward for forward, _ in sent) == faces
    assert sum(backward for _, backward in sent) == (0 if first else faces)


@pytest.mark.parametrize("memory_format", list(MEMORY_FORMATS))
@pytest.mark.parametrize("dtype", HALO_DTYPES)
def test_halos_are_the_neighbours_boundary_planes(ranks, dtype, memory_format):
    x_NCDHW = volumes(len(ranks))[0].to(dtype)
    for index, rank in enumerate(ranks):
        below = x_NCDHW[:, :, 2 * index - 1] if index else None
        above = x_NCDHW[:, :, 2 * index + 2] if index < len(ranks) - 1 else None
        found = rank["halos"][dtype, memory_format]
        for name, (sign, low, high) in {
            "both": (1, below, above),
            "to_next": (1, below, None),
            "to_previous": (1, None, above),
            "first of two": (1, below, above),
            "second of two": (-1, below, above),
        }.items():
            for plane, expected in zip(found[name], (low, high), strict=True):
                if expected is None:
                    assert plane is None, f"rank {index}, {name}: a halo outside the volume"
                else:
                    assert torch.equal(plane, sign * expected), f"rank {index}, {name}"


def test_every_rank_gathers_the_whole_volume(ranks):
    x_NCDHW, _ = volumes(len(ranks))
    for rank in ranks:
        assert torch.equal(rank["gathering"]["gathered"], x_NCDHW)
        assert torch.equal(rank["gathering"]["gathered bf16"], x_NCDHW.bfloat16())


def test_the_redundant_part_gives_all_ranks_the_gradients_of_the_whole(ranks):
    x_NCDHW, weight = (tensor.requires_grad_() for tensor in volumes(len(ranks)))
    y_NCDHW = squash(x_NCDHW, weight)
    y_NCDHW.backward(gradient(len(ranks), 1))
    found = [rank["gathering"] for rank in ranks]
    assert_equal(torch.cat([rank["y"] for rank in found], dim=2), y_NCDHW.detach())
    assert_equal(torch.cat([rank["dx"] for rank in found], dim=2), x_NCDHW.grad)
    for rank in found:
        assert_equal(rank["dweight"], weight.grad)


def test_sums_have_the_same_bits_on_every_rank(ranks):
    expected = sum(0.1 * 3.0**index for index in range(len(ranks)))
    assert all(torch.equal(rank["sum"], ranks[0]["sum"]) for rank in ranks)
    torch.testing.assert_close(ranks[0]["sum"], torch.full((3,), expected))


def test_cpus_send_and_receive_and_say_why_they_share_no_memory(ranks):
    for rank in ranks:
        assert rank["auto"] == "p2p"
        shared, unknown = rank["refusals"]
        assert "needs CUDA devices, not cpu" in shared
        assert "auto, symmetric_memory, p2p" in unknown


def test_a_convolution_without_an_exchange_takes_whole_volumes():
    expected = whole_convolution(4, 2)
    layer = SpatialConv3d(3, 4, 2, dtype=torch.float64)
    x_NCDHW, weight = volumes(4)
    layer.weight.data.copy_(weight)
    x_NCDHW.requires_grad_()
    y_NCDHW = layer(x_NCDHW)
    y_NCDHW.backward(gradient(4, 2))
    assert_equal(y_NCDHW.detach(), expected["y"])
    assert_equal(x_NCDHW.grad, expected["dx"])
    assert_equal(layer.weight.grad, expected["dweight"])


def test_one_rank_has_no_split():
    assert VolumeSplit.from_layout(Layout({"dp": 1})) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, 2), "slab 2 of 2"), ((2, 0), "no group")],
    ids=["outside", "alone"],
)
def test_an_impossible_split_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        VolumeSplit(*arguments)


def test_slabs_that_would_differ_are_refused():
    class Group:
        pass

    split = VolumeSplit(2, 0, group=Group())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="5 planes cannot be sharded over 2 ranks"):
        split.slab(torch.zeros(1, 1, 5, 1, 1))


def test_a_slab_that_cannot_be_halved_is_refused():
    class Exchange:
        pass

    layer = SpatialConv3d(1, 1, 2, exchange=Exchange())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 planes cannot be halved"):
        layer(torch.zeros(1, 1, 3, 2, 2))
