"""LSTM with the persistent kernels of ``kernels.cu``, for Hopper GPUs.

The products of the input with its weights are one matrix product over all frames, and so are the gradients of input
and weights. In between, one kernel runs all frames of a batch and reads W_hh only once. It is launched cooperatively,
takes nearly all multiprocessors, and releases those of a group of rows when the group's longest row has ended.
Concurrent work on other streams, such as a reduction, waits or uses the few remaining ones.

Gates are stored unit by unit: gate j of unit u is in column 4 u + j. Shapes: T frames, B rows, I inputs, H width, G =
4 H.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from benchmarks.rnnt.ops.lstm.plan import MOST_ROWS, THREADS, TILE_ROWS, LstmPlan, plans
from benchmarks.rnnt.ops.lstm.reference import GATES, LstmWeights, check
from common.ops.cuda_program import CudaKernel, compiled, no_compiler
from common.ops.operation import OperationRequest
from common.ops.triton_support import multiprocessors

_ARCHITECTURE = "sm_90a"
_HOPPER = 9
"""Major compute capability; later GPUs lack some instructions of the kernels."""
_COUNTER_WORDS = 32
"""Words per group, so that each counter has a cache line to itself."""
_MISSING = -1
"""Value of a word that no block has written yet."""
_WIDTHS = range(128, 1025, TILE_ROWS)

FIXED_PLANS: dict[tuple[bool, int, int], LstmPlan] = {}
"""Plan by (backward, H, B) that replaces the one with the best estimate."""


def unsupported(request: OperationRequest) -> str | None:
    """Return why the persistent kernels cannot serve a request, None if they can. Sizes: ``width``."""
    width = request.sizes["width"]
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"activations are fp16 or bf16, not {request.dtype}"
    if width not in _WIDTHS:
        return f"a width of {width}: multiples of {_WIDTHS.step} from {_WIDTHS.start} to {_WIDTHS[-1]}"
    if request.device.type != "cuda":
        return f"the kernels need a GPU, not {request.device.type}"
    major, minor = torch.cuda.get_device_capability(request.device)
    if major != _HOPPER:
        return f"the kernels are for GPUs of compute capability {_HOPPER}, not {major}.{minor}"
    for backward in (False, True):
        if not fitting_plans(backward, width, MOST_ROWS, request.device):
            return f"{multiprocessors(request.device)} multiprocessors can't hold the weights of {width} units"
    return no_compiler()


def source(plan: LstmPlan, bfloat: bool) -> str:
    """Return the kernel source of a plan, in CUDA C++ without includes, for bf16 if ``bfloat``, else fp16."""
    macros = "".join(f"#define {name} {value}\n" for name, value in plan.macros(bfloat).items())
    folder = Path(__file__).parent
    parts = [(folder / "primitives.cu").read_text(), _multiply(plan.columns, bfloat)]
    return "\n".join([macros, *parts, (folder / "kernels.cu").read_text()])


def _multiply(columns: int, bfloat: bool) -> str:
    """Return a function with the warpgroup's product for ``columns`` columns, because CUDA C++ needs each operand."""
    count, dtype = columns // 2, "bf16" if bfloat else "f16"
    results = ", ".join(f"%{number}" for number in range(count))
    left = ", ".join(f"%{count + number}" for number in range(4))
    constraints = ", ".join(f'"+f"(sums[{number}])' for number in range(count))
    return f"""
// sums (64, {columns}) of the warpgroup += left (64, 16) right (16, {columns}), or = without add.
__device__ __forceinline__ void multiply(float (&sums)[{count}], u32 left0, u32 left1, u32 left2, u32 left3, u64 right,
                                         int add) {{
  asm volatile("{{.reg .pred add;\\nsetp.ne.b32 add, %{count + 5}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} {{{results}}}, {{{left}}}, %{count + 4}, "
      "add, 1, 1, 0;}}"
      : {constraints}
      : "r"(left0), "r"(left1), "r"(left2), "r"(left3), "l"(right), "r"(add));
}}
"""


def fitting_plans(backward: bool, width: int, batch: int, device: torch.device, every: bool = False) -> list[LstmPlan]:
    """Return the plans that fit a GPU, except for limits of clusters.

    Args:
        backward: whether the plans are those of the backward pass.
        width: hidden units.
        batch: utterances.
        every: whether to include both ways of waiting.
    """
    shared_bytes = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return plans(backward, width, batch, multiprocessors(device), shared_bytes, every)


@functools.cache
def _kernel(plan: LstmPlan, bfloat: bool, device: torch.device) -> CudaKernel:
    direction = "backward" if plan.backward else "forward"
    cubin = compiled(source(plan, bfloat), f"lstm_{direction}.cu", _ARCHITECTURE)
    return CudaKernel(cubin, f"lstm_recurrence_{direction}", THREADS, plan.shared_bytes, plan.cluster, device)


def fits(plan: LstmPlan, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether all blocks of a plan can run on a GPU at once, which clusters may prevent."""
    return _kernel(plan, dtype == torch.bfloat16, device).resident_blocks() >= plan.blocks


@functools.cache
def fastest(backward: bool, width: int, batch: int, dtype: torch.dtype, device: torch.device) -> LstmPlan:
    """Return the first plan that fits the GPU, for the backward pass if ``backward``, else for the forward pass.

    Raises:
        RuntimeError: no plan fits.
    """
    for plan in fitting_plans(backward, width, batch, device):
        if fits(plan, dtype, device):
            return plan
    raise RuntimeError(f"no division of {batch} rows and {width} units of an LSTM fits {device}")


def launch(backward: bool, batch: int, pointers: list[Tensor | None], width: int, tail: list[int]) -> list[Tensor]:
    """Run all rows, at most ``MOST_ROWS`` per launch.

    Args:
        backward: direction.
        batch: B.
        pointers: arguments before ``fresh``; the fourth of backward is None, for the sums of the gates' gradients.
        width: H.
        tail: arguments after the rows.

    Returns:
        These sums, (lines, 4 H) fp32 each; empty for forward.
    """
    like = pointers[0]
    assert like is not None
    device, bfloat, sums = like.device, like.dtype == torch.bfloat16, []
    for first in range(0, batch, MOST_ROWS):
        rows = min(batch - first, MOST_ROWS)
        plan = FIXED_PLANS.get((backward, width, rows)) or fastest(backward, width, rows, like.dtype, device)
        fresh = torch.full((plan.fresh_words,), _MISSING, dtype=torch.int32, device=device)
        arrived = torch.zeros(plan.groups * _COUNTER_WORDS, dtype=torch.int32, device=device)
        arguments = list(pointers)
        if backward:
            sums.append(torch.empty((plan.groups * 4, GATES * width), dtype=torch.float32, device=device))
            arguments[3] = sums[-1]
        _kernel(plan, bfloat, device).launch_cooperatively(
            plan.blocks, [*arguments, fresh, arrived, len(like), batch, first, first + rows, *tail]
        )
    return sums


def _by_unit(rows: Tensor) -> Tensor:
    """Reorder rows (4 H, ...) from gate by gate to unit by unit."""
    return rows.unflatten(0, (GATES, -1)).transpose(0, 1).flatten(0, 1)


def _by_gate(rows: Tensor) -> Tensor:
    """Reorder rows (4 H, ...) from unit by unit to gate by gate."""
    return rows.unflatten(0, (-1, GATES)).transpose(0, 1).flatten(0, 1)


class _Lstm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        save: bool,  # whether to keep what backward needs
        x_TBI: Tensor,
        lengths_B: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ih_GI, hh_GH, bias_ih_G, bias_hh_G = weights
        frames, batch = x_TBI.shape[:2]
        width = hh_GH.shape[1]
        x_TBI = x_TBI.contiguous()
        ih_GI, hh_GH = _by_unit(ih_GI), _by_unit(hh_GH)
        gates_NG = torch.addmm(_by_unit(bias_ih_G + bias_hh_G), x_TBI.flatten(0, 1), ih_GI.t())
        hidden_TBH = x_TBI.new_empty((frames + 1, batch, width))
        hidden_TBH[0].zero_()
        cell_TBH = None
        if save:
            cell_TBH = torch.empty_like(hidden_TBH)
            cell_TBH[0].zero_()
        gates_TBG = gates_NG.view(frames, batch, -1)
        launch(False, batch, [gates_TBG, hidden_TBH, cell_TBH, hh_GH, lengths_B], width, [int(save)])
        ctx.save_for_backward(x_TBI, lengths_B, ih_GI, hh_GH)
        ctx.states = (gates_NG, hidden_TBH, cell_TBH) if save else None
        return hidden_TBH[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TBH: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.states is None:
            raise RuntimeError("an LSTM's gates are overwritten by their gradients: its backward pass runs only once")
        (gates_NG, hidden_TBH, cell_TBH), ctx.states = ctx.states, None
        x_TBI, lengths_B, ih_GI, hh_GH = ctx.saved_tensors
        frames, batch, width = len(x_TBI), x_TBI.shape[1], hh_GH.shape[1]
        gates_TBG = gates_NG.view(frames, batch, -1)
        pointers = [gates_TBG, cell_TBH, d_y_TBH.contiguous(), None, hh_GH.t().contiguous(), lengths_B]
        sums = launch(True, batch, pointers, width, [])
        _, needs_x, _, needs_ih, needs_hh, *needs_bias = ctx.needs_input_grad
        d_bias_G = _by_gate(torch.cat(sums).sum(0)).to(x_TBI.dtype) if any(needs_bias) else None
        return (
            None,
            (gates_NG @ ih_GI).view_as(x_TBI) if needs_x else None,
            None,
            _by_gate(gates_NG.t() @ x_TBI.flatten(0, 1)) if needs_ih else None,
            _by_gate(gates_NG.t() @ hidden_TBH[:-1].flatten(0, 1)) if needs_hh else None,
            d_bias_G if needs_bias[0] else None,
            d_bias_G if needs_bias[1] else None,
        )


def lstm_persistent(x_TBI: Tensor, weights: LstmWeights, lengths_B: Tensor) -> Tensor:
    """Return the hidden state after each frame, (T, B, H).

    See :func:`benchmarks.rnnt.ops.lstm.reference.lstm_reference`. The backward pass can run only once, because it
    overwrites what forward has saved.

    Raises:
        ValueError: the shapes do not match.
        RuntimeError: the compiler or the driver rejects a kernel.
    """
    check(x_TBI, weights, lengths_B)
    # `needs_input_grad` is true for weights even under no_grad, so an evaluation would save everything.
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_TBI, *weights))
    return _Lstm.apply(save, x_TBI, lengths_B.to(torch.int32).contiguous(), *weights)
