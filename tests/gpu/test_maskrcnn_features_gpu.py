"""RoIAlign and the mask head's loss on a GPU: against torchvision's and float64 at real sizes, captured, repeatable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor

from benchmarks.maskrcnn.loss import mask_loss
from benchmarks.maskrcnn.ops import roi_align, selected_logits
from benchmarks.maskrcnn.ops.roi_align import Regions
from benchmarks.maskrcnn.ops.roi_align.reference import level_of

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5}
STRIDES = (4, 8, 16, 32)
CHANNELS, KINDS, SLOTS, SIDE = 256, 81, 128, 28


def assert_close(name: str, found: Tensor, formula: Tensor, tolerance: float) -> None:
    error = (found.double() - formula).norm() / formula.norm()
    assert error < tolerance, f"{name}: relative error {error:.2e}"


def assert_captured_and_repeatable(step: Callable[[], list[Tensor]], redraw: Callable[[], None]) -> None:
    """The step waits for nothing, and its graph gives the bits of the step for other inputs."""
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = step()
        redraw()
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        eager = step()
        torch.cuda.synchronize()
    for tensor, reference in zip(captured, eager, strict=True):
        assert reference.isfinite().all()
        assert torch.equal(tensor, reference)


# RoIAlign


def pyramid(pictures: int, dtype: torch.dtype, height: int = 800, width: int = 1344) -> list[Tensor]:
    shapes = [(pictures, height // stride, width // stride, CHANNELS) for stride in STRIDES]
    return [torch.randn(shape, device="cuda").to(dtype).permute(0, 3, 1, 2).requires_grad_() for shape in shapes]


def both_heads(pictures: int) -> list[Regions]:
    """Boxes of all sizes; some reach out of the picture, and a tenth of the slots are empty."""
    corner = torch.rand((pictures, 512, 2), device="cuda") * torch.tensor([1344.0, 800.0], device="cuda") - 30
    size = torch.rand((pictures, 512, 2), device="cuda") ** 3 * 900
    boxes, there = torch.cat([corner, corner + size], 2), torch.rand((pictures, 512), device="cuda") < 0.9
    return [Regions(boxes, there, 7), Regions(boxes[:, :SLOTS], there[:, :SLOTS], 14)]


def by_torchvision(levels: list[Tensor], own: Regions) -> Tensor:
    boxes, there, bins = own
    picture = torch.arange(len(boxes), device="cuda").repeat_interleave(boxes.shape[1])
    rows = torch.cat([picture[:, None].to(boxes.dtype), boxes.flatten(0, 1)], 1).double()
    level = torch.where(there, level_of(boxes, STRIDES), -1).flatten()
    out = torch.zeros((len(rows), CHANNELS, bins, bins), device="cuda", dtype=torch.float64)
    for index, stride in enumerate(STRIDES):
        here = level == index
        part = torchvision.ops.roi_align(levels[index], rows[here], bins, 1 / stride, 2, aligned=False)
        out = out.index_put((here.nonzero().squeeze(1),), part)
    return out


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_features_and_gradients_of_both_heads_are_torchvisions(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    levels, sets = pyramid(2, dtype), both_heads(2)
    found = roi_align.ROI_ALIGN.function("triton").several(levels, sets, STRIDES, 2)
    wide = [level.detach().double().requires_grad_() for level in levels]
    wanted = [by_torchvision(wide, own) for own in sets]
    gradients = [torch.randn_like(features) for features in found]
    mine = torch.autograd.grad(found, levels, gradients)
    exact = torch.autograd.grad(wanted, wide, [gradient.double() for gradient in gradients])
    for name, one, other in zip(("box", "mask", *STRIDES), (*found, *mine), (*wanted, *exact), strict=True):
        assert one.dtype == dtype
        assert one.is_contiguous(memory_format=torch.channels_last)
        assert_close(str(name), one, other, TOLERANCE[dtype])


def test_a_whole_micro_batch_is_that_of_its_pictures() -> None:
    """12 pictures: offsets of the finest level and of its gradient are beyond what a picture has."""
    torch.manual_seed(2)
    levels, sets = pyramid(12, torch.bfloat16), both_heads(12)
    function = roi_align.ROI_ALIGN.function("triton")
    found = function.several(levels, sets, STRIDES, 2)
    gradients = [torch.randn_like(features) for features in found]
    mine = torch.autograd.grad(found, levels, gradients)
    for picture in (0, 11):
        alone = [level[picture : picture + 1].detach().requires_grad_() for level in levels]
        own = [Regions(boxes[picture, None], there[picture, None], bins) for boxes, there, bins in sets]
        rows = [slice(picture * part.there_BR.shape[1], (picture + 1) * part.there_BR.shape[1]) for part in own]
        features = function.several(alone, own, STRIDES, 2)
        assert all(torch.equal(one[row], other) for one, row, other in zip(found, rows, features, strict=True))
        parts = torch.autograd.grad(features, alone, [one[row] for one, row in zip(gradients, rows, strict=True)])
        assert all(torch.equal(one[picture, None], other) for one, other in zip(mine, parts, strict=True))


def test_roi_align_is_captured_and_gives_the_same_bits_in_every_run() -> None:
    levels, sets = pyramid(1, torch.bfloat16), both_heads(1)
    gradients = [torch.randn((own.there_BR.numel(), CHANNELS, *[own.resolution] * 2), device="cuda") for own in sets]
    gradients = [gradient.bfloat16() for gradient in gradients]

    def step() -> list[Tensor]:
        found = roi_align.ROI_ALIGN.function("triton").several(levels, sets, STRIDES, 2)
        return [*(features.detach() for features in found), *torch.autograd.grad(found, levels, gradients)]

    def redraw() -> None:
        for own, other in zip(sets, both_heads(1), strict=True):
            own.boxes_BR4.copy_(other.boxes_BR4)
            own.there_BR.copy_(other.there_BR)

    assert_captured_and_repeatable(step, redraw)


# Mask logits


def drawn_classes(regions: int) -> Tensor:
    drawn = torch.randint(1, KINDS, (regions,), device="cuda")
    return torch.where(torch.rand(regions, device="cuda") < 0.4, drawn, -1)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_logits_of_one_class_equal_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    regions = 3 * SLOTS
    shapes = (regions, SIDE * SIDE, CHANNELS), (KINDS, CHANNELS), (KINDS,)
    leaves = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    classes, gradient = drawn_classes(regions), torch.randn(shapes[0][:2], device="cuda")
    found = selected_logits.SELECTED_LOGITS.function("triton")(*leaves, classes)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    there = (classes >= 0).nonzero().squeeze(1)
    part = torch.einsum("rpc,rc->rp", wide[0][there], wide[1][classes[there]]) + wide[2][classes[there], None]
    wanted = torch.zeros_like(gradient, dtype=torch.float64).index_put((there,), part)
    mine = torch.autograd.grad(found, leaves, gradient)
    exact = torch.autograd.grad(wanted, wide, gradient.double())
    for name, one, other in zip(("logits", "x", "weight", "bias"), (found, *mine), (wanted, *exact), strict=True):
        assert_close(name, one, other, 1e-5 if name == "logits" else TOLERANCE[dtype])


def test_logits_of_one_class_and_their_loss_are_captured() -> None:
    shapes = (SLOTS, SIDE * SIDE, CHANNELS), (KINDS, CHANNELS), (KINDS,)
    leaves = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    target = torch.randint(2, (SLOTS, SIDE, SIDE), device="cuda", dtype=torch.uint8)
    classes = drawn_classes(SLOTS)

    def step() -> list[Tensor]:
        logits = selected_logits.SELECTED_LOGITS.function("triton")(*leaves, classes)
        loss = mask_loss(logits.unflatten(1, (SIDE, SIDE)), target, classes)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    def redraw() -> None:
        classes.copy_(drawn_classes(SLOTS))

    assert_captured_and_repeatable(step, redraw)
