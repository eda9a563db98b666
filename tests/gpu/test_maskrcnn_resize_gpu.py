"""Pictures of COCO's size on a GPU: the kernel against the reference, bit for bit, and inside a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.maskrcnn.ops import resize
from benchmarks.maskrcnn.pictures import resized_size

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

MEAN = (102.9801, 115.9465, 122.7717)
PUBLISHED = [(480, 640), (427, 640), (96, 640), (333, 500), (640, 640), (399, 601)]
SLOT = 640


def inputs(pictures: int, shape: tuple[int, int], seed: int = 0) -> tuple[Tensor, ...]:
    """Pictures of the orientation of ``shape``."""
    random = torch.Generator().manual_seed(seed)
    turned = shape[0] > shape[1]
    sizes = [PUBLISHED[i % len(PUBLISHED)][:: -1 if turned else 1] for i in range(pictures)]
    made = (
        torch.randint(256, (pictures, SLOT, SLOT, 3), dtype=torch.uint8, generator=random),
        torch.tensor(sizes, dtype=torch.int32),
        torch.tensor([resized_size(*size, 800, 1333) for size in sizes], dtype=torch.float32),
        torch.rand(pictures, generator=random) < 0.5,
    )
    return tuple(tensor.cuda() for tensor in made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(800, 1344), (1344, 800)], ids=str)
@pytest.mark.parametrize("pictures", [12, 1])
def test_the_kernel_gives_the_bits_of_the_reference(pictures, shape, dtype):
    found, expected = (
        resize.RESIZE.function(name)(*inputs(pictures, shape), MEAN, shape, dtype) for name in ("triton", "reference")
    )
    assert torch.equal(found, expected)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_batches_of_more_than_two_billion_values_are_whole():
    """An evaluation batch may be so large that a place in it exceeds 32 bits."""
    pictures, shape = 680, (800, 1344)
    assert pictures * 3 * shape[0] * shape[1] > 2**31
    few = inputs(4, shape)
    many = tuple(tensor.repeat(pictures // 4, *[1] * (tensor.dim() - 1)) for tensor in few)
    function = resize.RESIZE.function("triton")
    found, expected = (function(*given, MEAN, shape, torch.bfloat16) for given in (many, few))
    assert torch.equal(found[-4:], expected)


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_it_waits_for_nothing_and_a_graph_can_hold_it(name):
    shape, function = (800, 1344), resize.RESIZE.function(name)
    given = inputs(3, shape)
    with torch.cuda.stream(torch.cuda.Stream()):
        function(*given, MEAN, shape, torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            function(*given, MEAN, shape, torch.bfloat16)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = function(*given, MEAN, shape, torch.bfloat16)
        for tensor, other in zip(given, inputs(3, shape, seed=1), strict=True):
            tensor.copy_(other)
        graph.replay()
        eager = function(*given, MEAN, shape, torch.bfloat16)
        torch.cuda.synchronize()
    assert torch.equal(captured, eager)
