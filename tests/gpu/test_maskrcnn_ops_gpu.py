"""Test Mask R-CNN's operations on a GPU in ways that cases cannot express: CUDA graphs and large offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.maskrcnn.ops import mask_targets, paste, resize, roi_align, selected_logits
from benchmarks.maskrcnn.polygon_table import PolygonTable
from common.ops.cases import Draw, Pass
from common.ops.catalogue import cases_of
from common.ops.operation import Operation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OPERATIONS = (
    mask_targets.MASK_TARGETS,
    paste.PASTE,
    resize.RESIZE,
    roi_align.ROI_ALIGN,
    selected_logits.SELECTED_LOGITS,
)


def built(operation: Operation, skipped: int, **sizes: Any) -> tuple[list[Pass], list[tuple[Any, ...]]]:
    """Return the passes of the kernels, and a list to which they append the arguments of every call.

    ``skipped`` values are drawn first, so that another number gives other inputs.
    """
    case, arguments = cases_of(operation)[0], []
    draw = Draw(torch.device("cuda"), case.dtypes[-1])
    draw.normal(skipped)

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            arguments.append(given)
            return function(*given)

        return call

    function: Any = operation.function("triton")
    wrapped = function._make(map(recorded, function)) if hasattr(function, "_make") else recorded(function)
    return case.passes(wrapped, draw, **{**(case.gpu or {}), **sizes}), arguments


def tensors(tree: Any) -> list[Tensor]:
    """Return all tensors, including the tensors of polygon tables."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, PolygonTable):
            found += [leaf.object_bounds, leaf.polygon_bounds, leaf.xy]
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_passes_wait_for_nothing_and_their_graph_follows_the_inputs(operation: Operation) -> None:
    """The graph gives the same bits as the passes after other inputs are copied into its inputs."""
    passes, arguments = built(operation, 0)
    others, other_arguments = built(operation, 1000)

    def step() -> list[Tensor]:
        return [x.detach() for x in tensors([each.run() for each in passes])]

    for each in others:
        each.run()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
        torch.cuda.synchronize()
        calls = len(arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = step()
        with torch.no_grad():
            for own, other in zip(tensors(arguments[:calls]), tensors(other_arguments), strict=True):
                own.copy_(other)
            for tensor in captured:
                tensor.zero_()
        graph.replay()
        found = [tensor.clone() for tensor in captured]
        eager = step()
        torch.cuda.synchronize()
    assert any(tensor.any() for tensor in found)
    for one, other in zip(found, eager, strict=True):
        assert torch.equal(one, other)


def test_batches_of_more_than_two_billion_values_are_resized_whole() -> None:
    """Offsets in a large evaluation batch can exceed 32 bits."""
    few, shape = 4, (800, 1344)
    pictures = (((480, 640), (800, 1066), True),) * few
    passes, arguments = built(resize.RESIZE, 0, pictures=pictures, shape=shape)
    expected, _ = passes[0].run()
    many = [x.repeat(170, *[1] * (x.dim() - 1)) if isinstance(x, Tensor) else x for x in arguments[0]]
    assert len(many[0]) * 3 * shape[0] * shape[1] > 2**31
    assert torch.equal(resize.RESIZE.function("triton")(*many)[-few:], expected)
