"""cuDNN's fused attention through graphs that we build (``nvidia-cudnn-frontend``), for any number of earlier keys.

PyTorch's operators run the same kernels but support a causal mask only for Sq = Sk. A graph is built at the first use
of its shapes and strides. This waits for the device, so it must happen before the capture of a CUDA graph. cuDNN takes
(B, H, S, D), here as transposed views of (B, S, H, D).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.ops.causal_attention.parts import Library
from common.ops.causal_attention.reference import Saved
from common.ops.libraries import cudnn_handle


class TensorLayout(NamedTuple):
    """Shape and strides of a (B, S, H, D) tensor, in cuDNN's order (B, H, S, D)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class GraphKey(NamedTuple):
    """Everything that a graph depends on, as a cache key.

    Attributes:
        q, k, v: layouts of the inputs. Other tensors are contiguous as (B, S, H, D), except gradients of q, k and v.
        causal: whether the mask is causal; otherwise every query sees every key.
        deterministic: whether the backward pass is deterministic.
    """

    device: torch.device
    dtype: torch.dtype
    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    scale: float
    causal: bool
    deterministic: bool


class BuiltGraph(NamedTuple):
    """A built graph.

    Attributes:
        graph: graph of cuDNN.
        operands: inputs, then outputs.
        workspace: size of the workspace in bytes.
    """

    graph: Any
    operands: tuple[Any, ...]
    workspace: int

    def run(self, *tensors: Tensor) -> None:
        """Enqueue the graph with ``tensors`` in the order of ``operands``."""
        device = tensors[0].device
        workspace = torch.empty(max(self.workspace, 1), dtype=torch.uint8, device=device)
        pointers = {operand: tensor.data_ptr() for operand, tensor in zip(self.operands, tensors, strict=True)}
        self.graph.execute(pointers, workspace.data_ptr(), handle=cudnn_handle(device))


def forward(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, None]:
    """Return context (B, Q, H, D), log-sum-exp (B, H, Q) and None.

    See :class:`common.ops.causal_attention.parts.ForwardCall`.
    """
    o_BQHD = torch.empty_like(q_BQHD, memory_format=torch.contiguous_format)
    lse_BHQ = q_BQHD.new_empty((q_BQHD.shape[0], q_BQHD.shape[2], q_BQHD.shape[1]), dtype=torch.float32)
    key = _key(q_BQHD, k_BSKD, v_BSKD, scale, causal)
    _forward_graph(key).run(q_BQHD, k_BSKD, v_BSKD, o_BQHD, lse_BHQ)
    return o_BQHD, lse_BHQ, None


def backward(do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; see :class:`common.ops.causal_attention.parts.BackwardCall`."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved[:3])
    backward_into(do_BQHD, saved, causal, (dq, dk, dv))
    return dq, dk, dv


def backward_into(do_BQHD: Tensor, saved: Saved, causal: bool, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    """Write the gradients of q, k and v to ``gradients``.

    See :class:`common.ops.causal_attention.parts.BackwardIntoCall`.
    """
    q, k, v = saved[:3]
    dq, dk, dv = gradients
    given = (x.contiguous() for x in (saved.o, do_BQHD, saved.lse))
    graph = _backward_graph(_key(q, k, v, saved.scale, causal), (_layout(dq), _layout(dk), _layout(dv)))
    graph.run(q, k, v, *given, dq, dk, dv)


def _key(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool) -> GraphKey:
    q, k, v = (_layout(x) for x in (q_BQHD, k_BSKD, v_BSKD))
    deterministic = torch.are_deterministic_algorithms_enabled()
    return GraphKey(q_BQHD.device, q_BQHD.dtype, q, k, v, scale, causal, deterministic)


def _layout(x_BSHD: Tensor) -> TensorLayout:
    x_BHSD = x_BSHD.transpose(1, 2)
    return TensorLayout(tuple(x_BHSD.shape), x_BHSD.stride())


def _contiguous(like: TensorLayout) -> TensorLayout:
    """Return the layout of a contiguous (B, S, H, D) tensor of the same shape."""
    _, heads, length, size = like.shape
    return TensorLayout(like.shape, (length * heads * size, size, heads * size, 1))


def _statistics(q: TensorLayout) -> TensorLayout:
    """Return the layout of the log-sum-exp, which has one number per query."""
    rows, heads, queries, _ = q.shape
    return TensorLayout((rows, heads, queries, 1), (heads * queries, queries, 1, 1))


class _Builder:
    """Builder of a graph for ``key``: declares inputs and outputs and compiles the graph."""

    def __init__(self, key: GraphKey) -> None:
        import cudnn

        self.dtype = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}[key.dtype]
        self.single = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=self.dtype,
            intermediate_data_type=self.single,
            compute_data_type=self.single,
            handle=cudnn_handle(key.device),
        )
        alignment = cudnn.diagonal_alignment
        square = key.q.shape[2] == key.k.shape[2]
        self.mask = {
            "diagonal_alignment": alignment.TOP_LEFT if square else alignment.BOTTOM_RIGHT,
            "diagonal_band_right_bound": 0 if key.causal else None,
        }
        self._heuristics = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]

    def input(self, name: str, layout: TensorLayout, dtype: Any = None) -> Any:
        return self.graph.tensor(
            name=name, dim=list(layout.shape), stride=list(layout.strides), data_type=dtype or self.dtype
        )

    def output(self, tensor: Any, layout: TensorLayout, dtype: Any = None) -> None:
        tensor.set_output(True).set_dim(list(layout.shape)).set_stride(list(layout.strides))
        tensor.set_data_type(dtype or self.dtype)

    def finish(self, *operands: Any) -> BuiltGraph:
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans(self._heuristics)
        self.graph.check_support()
        self.graph.build_plans()
        return BuiltGraph(self.graph, operands, self.graph.get_workspace_size())


@functools.cache
def _forward_graph(key: GraphKey) -> BuiltGraph:
    builder = _Builder(key)
    q, k, v = (builder.input(name, getattr(key, name)) for name in "qkv")
    o, lse = builder.graph.sdpa(
        name="attention", q=q, k=k, v=v, attn_scale=key.scale, generate_stats=True, **builder.mask
    )
    builder.output(o, _contiguous(key.q))
    builder.output(lse, _statistics(key.q), builder.single)
    return builder.finish(q, k, v, o, lse)


@functools.cache
def _backward_graph(key: GraphKey, layouts: tuple[TensorLayout, TensorLayout, TensorLayout]) -> BuiltGraph:
    builder = _Builder(key)
    q, k, v = (builder.input(name, getattr(key, name)) for name in "qkv")
    o, do = (builder.input(name, _contiguous(key.q)) for name in ("o", "do"))
    lse = builder.input("lse", _statistics(key.q), builder.single)
    gradients = builder.graph.sdpa_backward(
        name="attention", q=q, k=k, v=v, o=o, dO=do, stats=lse, attn_scale=key.scale,
        use_deterministic_algorithm=key.deterministic, **builder.mask,
    )  # fmt: skip
    for gradient, layout in zip(gradients, layouts, strict=True):
        builder.output(gradient, layout)
    return builder.finish(q, k, v, o, do, lse, *gradients)


LIBRARY = Library(forward, backward, prefixes=True, into=backward_into)
