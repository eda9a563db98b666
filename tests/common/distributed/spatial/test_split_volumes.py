"""Slabs of a volume on two, four and eight gloo ranks: together they give what one rank gives for the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slab_ranks import CASES, HALO_DTYPES, MEMORY_FORMATS, gradient, run_rank, squash, volumes

from common.distributed.layout import Layout
from common.distributed.spatial.convolution import SpatialConv3d
from common.distributed.spatial.split import VolumeSplit
from tests.gloo_ranks import on_ranks

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
