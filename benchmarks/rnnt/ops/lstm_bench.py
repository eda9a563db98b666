"""Measure a layer of LSTM on one GPU: microseconds a frame, forward and backward, of every implementation.

``python -m benchmarks.rnnt.ops.lstm_bench`` times the whole operation, input products and weight gradients included,
and of the persistent one the recurrence alone, both captured, all rows of the same length. ``--real`` gives rows the
lengths of utterances instead, sorted; ``--plans 12`` times that many other divisions of rows and units and ways of
waiting, the best by estimate first.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.rnnt.ops.lstm import LSTM, LstmWeights, persistent
from benchmarks.rnnt.ops.lstm.plan import Plan
from common.ops.bench.stopwatch import require_gpu, time_graph
from common.ops.operation import OperationRequest

CUDA = torch.device("cuda")
MEAN, DEVIATION = 0.67, 0.2
"""Of an utterance's length, as a share of the longest one's."""


def lengths_of(batch: int, frames: int, real: bool) -> Tensor:
    """Frames of each row: all, or as utterances have, the longest first."""
    if not real:
        return torch.full((batch,), frames, dtype=torch.int32, device=CUDA)
    drawn = torch.randn(batch, device=CUDA).mul_(DEVIATION).add_(MEAN).clamp_(0.05, 1.0).mul_(frames)
    drawn[0] = frames
    return drawn.sort(descending=True).values.to(torch.int32)


def microseconds(run: Callable[[], object], frames: int) -> float:
    """Of a frame."""

    def once() -> int:
        run()
        return 1

    return time_graph(once, replays=5) * 1e3 / frames


def operation(name: str, x: Tensor, weights: LstmWeights, lengths: Tensor) -> tuple[float, float]:
    """Forward and backward of an implementation."""
    function, frames = LSTM.function(name), len(x)
    gradient = torch.randn(*x.shape[:2], weights.width, device=CUDA).to(x.dtype)
    inputs = [x, *weights]

    def both() -> object:
        return torch.autograd.grad(function(x, weights, lengths), inputs, gradient)

    forward = microseconds(lambda: function(x, weights, lengths), frames)
    return forward, microseconds(both, frames) - forward


def recurrence(plan: Plan, frames: int, batch: int, dtype: torch.dtype, lengths: Tensor) -> float:
    """The kernel of a division alone; what it computes is of no account."""
    width = plan.width

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=CUDA)

    gates, weights = zeros(frames, batch, 4 * width), torch.randn(4 * width, width, device=CUDA).mul_(0.02).to(dtype)
    hidden, cell = zeros(frames + 1, batch, width), zeros(frames + 1, batch, width)
    if plan.backward:
        pointers: list[Tensor | None] = [gates, cell, hidden[1:], None, weights.t().contiguous(), lengths]
        tail = []
    else:
        pointers, tail = [gates, hidden, cell, weights, lengths], [1]
    persistent.FIXED_PLANS[plan.backward, width, batch] = plan
    try:
        return microseconds(lambda: persistent.launch(plan.backward, batch, pointers, width, tail), frames)
    finally:
        del persistent.FIXED_PLANS[plan.backward, width, batch]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="192,32,8", help="rows, separated by commas")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--real", action="store_true", help="lengths of utterances")
    parser.add_argument("--plans", type=int, default=0, help="so many other divisions")
    arguments = parser.parse_args()
    require_gpu("benchmarks.rnnt.ops.lstm_bench")
    dtype, frames, width = getattr(torch, arguments.dtype), arguments.frames, arguments.width
    request = OperationRequest(CUDA, dtype, {"inputs": arguments.inputs, "width": width})
    print(f"{torch.cuda.get_device_name()}, {arguments.dtype}, {frames} frames, {arguments.inputs} -> {width}")
    for batch in (int(number) for number in arguments.batches.split(",")):
        torch.manual_seed(0)
        lengths = lengths_of(batch, frames, arguments.real)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=CUDA).mul_(width**-0.5).to(dtype).requires_grad_()

        x = normal(frames, batch, arguments.inputs)
        weights = LstmWeights(
            normal(4 * width, arguments.inputs), normal(4 * width, width), normal(4 * width), normal(4 * width)
        )
        for name in ("library", "persistent"):
            reason = LSTM.unsupported(name, request)
            if reason is not None:
                print(f"{batch:4d} rows  {name:12s} {reason}")
                continue
            forward, backward = operation(name, x, weights, lengths)
            print(f"{batch:4d} rows  {name:12s} forward {forward:6.2f} us  backward {backward:6.2f} us", flush=True)
        if persistent.unsupported(request) is not None:
            continue
        for backward_too in (False, True):
            chosen = persistent.fastest(backward_too, width, batch, dtype, CUDA)
            others = persistent.fitting_plans(backward_too, width, batch, CUDA, every=True)
            tried = (plan for plan in others if plan != chosen and persistent.fits(plan, dtype, CUDA))
            for plan in [chosen, *itertools.islice(tried, arguments.plans)]:
                took = recurrence(plan, frames, batch, dtype, lengths)
                which = "backward" if backward_too else "forward"
                print(
                    f"{batch:4d} rows  recurrence   {which:8s} {took:6.2f} us  {plan.groups} groups of {plan.rows}, "
                    f"{plan.units} units a block, clusters of {plan.cluster}, {plan.blocks} blocks, {plan.wait.name}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
