"""The Triton norm and loss of 3D U-Net against formulas in float64; run by
tests/test_interpreted_kernels.py. Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import pytest
import torch
import unet3d_ops_oracle as oracle
from torch import Tensor

from benchmarks.unet3d.ops import dice_cross_entropy, instance_norm
from benchmarks.unet3d.ops.dice_cross_entropy import triton as dice_cross_entropy_triton
from benchmarks.unet3d.ops.dice_cross_entropy.reference import dice_cross_entropy_reference
from benchmarks.unet3d.ops.instance_norm import triton as instance_norm_triton
from common.ops.operation import AUTO, OperationRequest
from common.ops.tiling import tiles

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPSILON = 1e-5
SMOOTH = 1e-6
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
DTYPES = list(TOLERANCE)
FORMATS = [torch.contiguous_format, torch.channels_last_3d]
SMALL = instance_norm_triton.SMALL_TILES
SHAPES = [
    (1, 8, 5, 6, 7),
    (3, 48, 3, 5, 4),
    pytest.param((3, 320, 2, 2, 3), marks=pytest.mark.slow),
    pytest.param((1, 32, 16, 16, 16), marks=pytest.mark.slow),
    (2, 16, 9, 10, 11),
    (17, 8, 3, 2, 2),
    (2, 3, 4, 5, 3),
]


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles on a device of several multiprocessors, so that samples are dealt to programs of many tiles."""
    for module in (tiles, dice_cross_entropy_triton):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 5)
    for name, tile in instance_norm_triton.TILES.items():
        monkeypatch.setitem(instance_norm_triton.TILES, name, tile._replace(elements=1024))
    blocks = dice_cross_entropy_triton.TILES
    monkeypatch.setitem(blocks, "forward", blocks["forward"]._replace(voxels=128, programs=1))
    monkeypatch.setitem(blocks, "backward", blocks["backward"]._replace(voxels=128))


@pytest.fixture
def in_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No volume is small."""
    for direction, tile in SMALL.items():
        monkeypatch.setitem(SMALL, direction, tile._replace(voxels=0))


def check_norm(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.channels_last_3d,
    parameters: torch.dtype = torch.float32,
) -> None:
    """Result and gradients against the formula, for the values that the dtype holds."""
    case = oracle.norm_case(shape, dtype)
    case |= {name: case[name].to(parameters) for name in ("weight", "bias")}
    case |= {name: case[name].contiguous(memory_format=memory_format) for name in ("x", "dy")}
    leaves = {name: case[name].clone().requires_grad_() for name in ("x", "weight", "bias")}
    y, _ = instance_norm_triton.instance_norm_relu(*leaves.values(), EPSILON)
    gradients = torch.autograd.grad(y, list(leaves.values()), case["dy"])
    found = {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    assert found["y"].dtype == found["x"].dtype == dtype
    assert found["weight"].dtype == found["bias"].dtype == parameters
    for name, expected in oracle.instance_norm_relu(**case).items():
        error = oracle.relative_error(found[name], expected)
        assert error < max(TOLERANCE[dtype], TOLERANCE[parameters]), f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_in_one_launch_equals_the_formula(shape: tuple[int, ...]) -> None:
    check_norm(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("in_three_launches")
def test_norm_in_three_launches_equals_the_formula(shape: tuple[int, ...]) -> None:
    check_norm(shape)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("parameters", ["fp32", "half"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_norm_in_one_launch(
    dtype: torch.dtype, parameters: str, memory_format: torch.memory_format
) -> None:
    check_norm((2, 16, 5, 6, 7), dtype, memory_format, dtype if parameters == "half" else torch.float32)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("parameters", ["fp32", "half"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("in_three_launches")
def test_half_precision_norm_in_three_launches(
    dtype: torch.dtype, parameters: str, memory_format: torch.memory_format
) -> None:
    check_norm((2, 16, 5, 6, 7), dtype, memory_format, dtype if parameters == "half" else torch.float32)


def test_parameters_of_a_single_sample_have_gradients_of_their_dtype() -> None:
    check_norm((1, 16, 5, 6, 7), torch.bfloat16, parameters=torch.bfloat16)


@pytest.mark.parametrize("small", [True, False])
def test_norm_of_large_means_keeps_the_variance(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 the mean of squares of such values is known to 0.06 only, and their variance is 1.

    The bias keeps every value above the ReLU's corner, which the rounding of x would move a few across.
    """
    if not small:
        for direction, tile in SMALL.items():
            monkeypatch.setitem(SMALL, direction, tile._replace(voxels=0))
    generator = torch.Generator().manual_seed(0)
    x = 1000 + torch.randn((2, 8, 11, 12, 13), generator=generator)
    case = {"x": x, "weight": torch.ones(8), "bias": torch.full((8,), 8.0)}
    dy = torch.randn(x.shape, generator=generator)
    leaves = [value.clone().requires_grad_() for value in case.values()]
    y, _ = instance_norm_triton.instance_norm_relu(*leaves, EPSILON)
    found = dict(zip(("y", *case), (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))
    for name, expected in oracle.instance_norm_relu(**case, dy=dy).items():
        assert oracle.relative_error(found[name], expected) < 1e-4, name


@pytest.mark.usefixtures("in_three_launches")
def test_norm_of_a_constant_volume_is_the_bias() -> None:
    x, weight, bias = torch.full((2, 8, 5, 6, 7), 1000.0), torch.full((8,), 3.0), torch.linspace(-1, 1, 8)
    y, _ = instance_norm_triton.instance_norm_relu(x, weight, bias, EPSILON)
    assert torch.equal(y, bias.clamp(min=0).view(1, 8, 1, 1, 1).expand_as(y))


def test_norm_of_a_single_voxel_is_refused() -> None:
    case = oracle.norm_case((2, 8, 1, 1, 1), torch.float32)
    with pytest.raises(ValueError, match="single voxel"):
        instance_norm_triton.instance_norm_relu(case["x"], case["weight"], case["bias"], EPSILON)


def check_readers(shape: tuple[int, ...], dtype: torch.dtype, first: bool, second: bool) -> None:
    """Gradients of two readers, the second's a part of joined channels."""
    case = oracle.norm_case(shape, dtype)
    leaves = {name: case[name].clone().requires_grad_() for name in ("x", "weight", "bias")}
    y, again = instance_norm_triton.instance_norm_relu(*leaves.values(), EPSILON)
    assert y.data_ptr() == again.data_ptr()
    joined = oracle.normal({"dy": (shape[0], 2 * shape[1], *shape[2:])}, dtype, seed=1)["dy"]
    joined = joined.contiguous(memory_format=torch.channels_last_3d)
    read = [(y, case["dy"])] * first + [(again, joined[:, shape[1] :])] * second
    gradients = torch.autograd.grad([y for y, _ in read], list(leaves.values()), [dy for _, dy in read])
    case["dy"] = torch.stack([dy.double() for _, dy in read]).sum(0)
    expected = oracle.instance_norm_relu(**case)
    for name, found in zip(leaves, gradients, strict=True):
        error = oracle.relative_error(found, expected[name])
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


READERS = pytest.mark.parametrize(
    ("first", "second"), [(True, True), (True, False), (False, True)], ids=["both", "first", "second"]
)


@READERS
@pytest.mark.parametrize("shape", [(2, 8, 5, 6, 7), (3, 48, 3, 5, 4), (2, 3, 4, 5, 3), (1, 1, 2, 3, 4)])
def test_readers_add_their_gradients_in_one_launch(shape: tuple[int, ...], first: bool, second: bool) -> None:
    check_readers(shape, torch.float32, first, second)


@READERS
@pytest.mark.parametrize(
    "shape", [pytest.param((1, 32, 16, 16, 16), marks=pytest.mark.slow), (3, 48, 3, 5, 4), (2, 3, 4, 5, 3)]
)
@pytest.mark.usefixtures("in_three_launches")
def test_readers_add_their_gradients_in_three_launches(shape: tuple[int, ...], first: bool, second: bool) -> None:
    check_readers(shape, torch.float32, first, second)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_readers_add_in_fp32(dtype: torch.dtype, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setitem(SMALL, "backward", SMALL["backward"]._replace(voxels=0))
    check_readers((2, 16, 5, 6, 7), dtype, True, True)


def test_readers_of_the_same_memory_have_graphs_of_their_own() -> None:
    """The derivative of y^2 + y^3, each term from one of the two results, goes through the norm once."""
    case = oracle.norm_case((1, 8, 2, 3, 4), torch.float32)
    y, again = instance_norm_triton.instance_norm_relu(
        case["x"].requires_grad_(), case["weight"], case["bias"], EPSILON
    )
    twice = (y * y).sum() + (again * again * again).sum()
    (found,) = torch.autograd.grad(twice, case["x"])
    values = y.detach().double()
    case["dy"] = 2 * values + 3 * values.square()
    expected = oracle.instance_norm_relu(**{name: value.detach() for name, value in case.items()})
    assert oracle.relative_error(found, expected["x"]) < 1e-5


@pytest.mark.parametrize("channels", [1, 3, 8, 32, 48, 64, 256, 320, 1000])
def test_columns_of_programs_cover_all_channels_without_waste_where_they_can(channels: int) -> None:
    block = tiles.block_of_columns(channels, 64)
    assert block <= 64
    assert block & (block - 1) == 0
    if channels % 16 == 0:
        assert channels % block == 0


# Loss


def loss_and_gradient(case: dict[str, Tensor], scale: float = 1.0) -> tuple[Tensor, Tensor]:
    logits = case["logits"].clone().requires_grad_()
    loss = dice_cross_entropy_triton.dice_cross_entropy(logits, case["label"], SMOOTH)
    (gradient,) = torch.autograd.grad(loss * scale, logits)
    return loss.detach(), gradient


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 3, 5, 6, 7),
        pytest.param((3, 3, 8, 8, 16), marks=pytest.mark.slow),
        (2, 3, 11, 9, 13),
        pytest.param((40, 3, 1, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_loss_equals_the_formula(
    shape: tuple[int, ...], dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    case = oracle.loss_case(shape, dtype)
    case["logits"] = case["logits"].contiguous(memory_format=memory_format)
    loss, gradient = loss_and_gradient(case, 1024.0)
    expected = oracle.dice_cross_entropy(**case)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    assert gradient.is_contiguous(memory_format=memory_format)
    assert float(loss) == pytest.approx(float(expected["loss"]), rel=2e-6)
    assert oracle.relative_error(gradient, 1024 * expected["logits"]) < TOLERANCE[dtype]


def test_loss_of_strided_logits_and_labels() -> None:
    case = oracle.loss_case((2, 3, 4, 5, 12), torch.float32)
    case = {"logits": case["logits"][..., ::2], "label": case["label"][..., ::2]}
    loss, gradient = loss_and_gradient(case)
    expected = oracle.dice_cross_entropy(**case)
    assert float(loss) == pytest.approx(float(expected["loss"]), rel=2e-6)
    assert oracle.relative_error(gradient, expected["logits"]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_loss_of_extreme_logits_is_finite_and_right(size: float) -> None:
    case = oracle.loss_case((1, 3, 4, 4, 4), torch.float32)
    case["logits"] *= size
    loss, gradient = loss_and_gradient(case)
    plain = case["logits"].double().requires_grad_()
    expected = dice_cross_entropy_reference(plain, case["label"], SMOOTH)
    (expected_gradient,) = torch.autograd.grad(expected, plain)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert oracle.relative_error(gradient, expected_gradient) < 1e-5


def test_loss_of_other_class_counts_is_refused() -> None:
    case = oracle.loss_case((1, 4, 2, 2, 2), torch.float32)
    with pytest.raises(ValueError, match="3 classes"):
        loss_and_gradient(case)


# All


def test_auto_takes_the_kernels() -> None:
    norm = instance_norm.INSTANCE_NORM.select(
        AUTO, OperationRequest(torch.device("cpu"), torch.float32, {"channels": 32})
    )
    loss = dice_cross_entropy.DICE_CROSS_ENTROPY.select(
        AUTO, OperationRequest(torch.device("cpu"), torch.float32, {"classes": 3})
    )
    assert norm.name == loss.name == "triton"
