"""Convolution with the moments of its result through the graph API of cuDNN (``nvidia-cudnn-frontend``).

cuDNN has special engines for this pattern, which are not always faster. So the first call with new shapes times two
variants: the convolution with moments, and PyTorch's convolution plus a pass over y. This call waits for the device and
must happen before the capture of a CUDA graph, with ``torch.backends.cudnn.benchmark`` enabled; otherwise PyTorch's
convolution runs. Later calls can be captured. PyTorch computes the backward pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import cudnn
import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.batch_norm import triton as batch_norm_triton
from common.ops.libraries import cudnn_handle

LAUNCHES = 20
"""Number of launches in a timed CUDA graph."""

ROUGH_LAUNCHES = 3
WORKSPACE_LIMIT = 1 << 30
BYTE_ALIGNMENT = 16


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of channels_last. In PyTorch, strides of dimensions of size 1 are arbitrary."""
    _, channels, height, width = tensor.shape
    return [channels * height * width, 1, width * channels, channels]


def _usable(tensor: Tensor) -> Tensor:
    """Return the tensor in channels_last, aligned for cuDNN."""
    tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor if tensor.data_ptr() % BYTE_ALIGNMENT == 0 else tensor.clone(memory_format=torch.channels_last)


class ConvolutionPlan:
    """A convolution with moments for fixed shapes, executed by one engine of cuDNN.

    Args:
        x_NCHW, weight: fp16 tensors with the shapes.

    Raises:
        cudnn.cudnnGraphNotSupportedError: cuDNN has no engine for these shapes.
    """

    def __init__(self, x_NCHW: Tensor, weight: Tensor, stride: int, padding: int) -> None:
        half, single = cudnn.data_type.HALF, cudnn.data_type.FLOAT
        handle = cudnn_handle(x_NCHW.device)
        graph = cudnn.pygraph(io_data_type=half, intermediate_data_type=single, compute_data_type=single, handle=handle)
        image = graph.tensor(name="x", dim=list(x_NCHW.shape), stride=_strides(x_NCHW), data_type=half)
        filters = graph.tensor(name="weight", dim=list(weight.shape), stride=_strides(weight), data_type=half)
        y = graph.conv_fprop(
            image=image, weight=filters, padding=[padding] * 2, stride=[stride] * 2, dilation=[1, 1], name="convolution"
        )
        y.set_output(True).set_data_type(half)
        total, square = graph.genstats(input=y, name="moments")
        for sums in (total, square):
            sums.set_output(True).set_data_type(single)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self._graph = graph
        self._tensors = (image, filters, y, total, square)
        height, width = ((size + 2 * padding - weight.shape[2]) // stride + 1 for size in x_NCHW.shape[2:])
        self._shape = (x_NCHW.shape[0], weight.shape[0], height, width)
        self._index = -1
        self._workspace = 0

    def tune(self, x_NCHW: Tensor, weight: Tensor) -> None:
        """Build all engines of cuDNN, time them and select the fastest.

        Raises:
            cudnn.cudnnGraphNotSupportedError: no engine can be built within ``WORKSPACE_LIMIT``.
        """
        best = float("inf")
        for index in range(self._graph.get_execution_plan_count()):
            try:
                self._graph.build_plan_at_index(index)
            except cudnn.cudnnGraphNotSupportedError:
                continue
            workspace = self._graph.get_workspace_size_plan_at_index(index)
            if workspace > WORKSPACE_LIMIT:
                continue
            before = self._index, self._workspace
            self._index, self._workspace = index, workspace
            time_ms = _rough_ms(lambda: self(x_NCHW, weight))
            if time_ms < best:
                best = time_ms
            else:
                self._index, self._workspace = before
        if self._index < 0:
            raise cudnn.cudnnGraphNotSupportedError("no candidate could be built")

    def __call__(self, x_NCHW: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (N, C, H, W) and its moments, fp32 (2, 1, C)."""
        channels = self._shape[1]
        y_NCHW = torch.empty(self._shape, dtype=x_NCHW.dtype, device=x_NCHW.device, memory_format=torch.channels_last)
        moments = x_NCHW.new_empty((2, 1, channels), dtype=torch.float32)
        workspace = x_NCHW.new_empty(max(self._workspace, 1), dtype=torch.uint8)
        pointers = [tensor.data_ptr() for tensor in (x_NCHW, weight, y_NCHW, moments[0], moments[1])]
        self._graph.execute_plan_at_index(
            dict(zip(self._tensors, pointers, strict=True)),
            workspace.data_ptr(),
            self._index,
            cudnn_handle(x_NCHW.device),
        )
        return y_NCHW, moments


def _rough_ms(launch: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest of a few launches. Good enough to compare engines of equal overhead."""
    launch()
    times = []
    for _ in range(ROUGH_LAUNCHES):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return min(times)


def _graph_ms(launch: Callable[[], object]) -> float:
    """Return milliseconds per launch without host overhead: the median of three replays of a CUDA graph."""
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(LAUNCHES):
            launch()
    graph.replay()
    times = []
    for _ in range(3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / LAUNCHES)
    return statistics.median(times)


_PLANS: dict[tuple[Any, ...], ConvolutionPlan | None] = {}
"""Plans by shapes; None if PyTorch's convolution and a pass over y are faster."""


@torch.no_grad()
def _choose(x_NCHW: Tensor, weight: Tensor, stride: int, padding: int) -> ConvolutionPlan | None:
    try:
        plan = ConvolutionPlan(x_NCHW, weight, stride, padding)
        plan.tune(x_NCHW, weight)
    except cudnn.cudnnGraphNotSupportedError:
        return None
    separate = _graph_ms(
        lambda: batch_norm_triton.partial_moments(F.conv2d(x_NCHW, weight, stride=stride, padding=padding))
    )
    return plan if _graph_ms(lambda: plan(x_NCHW, weight)) < separate else None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NCHW: Tensor, weight: Tensor, stride: int, padding: int, plan: ConvolutionPlan
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_NCHW, weight)
        ctx.stride, ctx.padding = stride, padding
        y_NCHW, moments = plan(x_NCHW, weight)
        ctx.mark_non_differentiable(moments)
        return y_NCHW, moments

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NCHW, weight = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        dx_NCHW, d_weight, _ = torch.ops.aten.convolution_backward(
            gradients[0], x_NCHW, weight, None, [ctx.stride] * 2, [ctx.padding] * 2, [1, 1], False, [0, 0], 1, needed
        )
        return dx_NCHW, d_weight, None, None, None


def convolution(x_NCHW: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor | None]:
    """Return the convolution (N, C out, H, W) and its moments, or None instead of them.

    See :func:`common.ops.convolution.convolution_reference`. It returns moments where this is faster.
    """
    key = (x_NCHW.device, tuple(x_NCHW.shape), tuple(weight.shape), stride, padding)
    if key not in _PLANS and torch.backends.cudnn.benchmark and not torch.cuda.is_current_stream_capturing():
        _PLANS[key] = _choose(_usable(x_NCHW.detach()), _usable(weight.detach()), stride, padding)
    plan = _PLANS.get(key)
    if plan is None or not torch.backends.cudnn.benchmark:
        return F.conv2d(x_NCHW, weight, stride=stride, padding=padding), None
    result: tuple[Tensor, Tensor] = _Convolution.apply(_usable(x_NCHW), _usable(weight), stride, padding, plan)
    return result
