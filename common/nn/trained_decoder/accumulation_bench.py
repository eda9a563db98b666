"""Time how weights' gradients are added up, and what FP8's second order of operands costs, on one GPU.

``python -m common.nn.trained_decoder.accumulation_bench`` takes the four products of a layer of Llama 3.1 8B (a row of
8,192 tokens) and of GPT-3 over four ranks and on one (two rows of 2,048), and prints for each way

- ``wgrad``: all four weights' gradients, added to gradients in bf16 or fp32 in every implementation of
  :mod:`common.ops.weight_gradient`, and with the operands of two micro-batches put together (half the time of the
  whole); beside it, measured in turn, the products alone, which add nothing; and the difference. In bf16 operands, too,
  and what it costs that sums are promoted to fp32, as Transformer Engine's of gradients are;
- ``passes``: the transposes that a micro-batch makes of weights, inputs and gradients, casts that write one order or
  both, so that the difference is what a producer would pay, and the products for comparison, whole and with tokens
  cut as they come from two or four ranks.

Every case is captured in a CUDA graph. It runs in a process of its own, and another one continues behind a case that
failed, hung or crashed. ``--cases`` limits all to names that contain one of the given words.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import UnsupportedImplementation
from common.nn.scratch import Scratch
from common.ops import fp8_cast, transpose_fp8, weight_gradient
from common.ops.bench.stopwatch import require_gpu, time_graph
from common.ops.bench.supervisor import RESULT, supervise, work
from common.ops.fp8_cast.reference import E4M3, E5M2, Scaling
from common.ops.linear.fp8 import multiply
from common.ops.operation import AUTO, OperationRequest
from common.ops.weight_gradient.half import add_product_

MODULE = "common.nn.trained_decoder.accumulation_bench"
CALLS, ROUNDS = 4, 5
"""Layers in a graph, and turns that a case and the products alone take."""

SEED = 1


class Layer(NamedTuple):
    """Products of a layer.

    Attributes:
        tokens: of a micro-batch.
        weights: outputs and inputs of each, of one rank.
    """

    tokens: int
    weights: Mapping[str, tuple[int, int]]

    def flops(self) -> float:
        """Of one product of each."""
        return 2.0 * self.tokens * self.elements()

    def elements(self) -> int:
        """Of all weights."""
        return sum(outputs * inputs for outputs, inputs in self.weights.values())


LAYERS = {
    "llama31_8b": Layer(
        8192, {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
    ),
    "gpt3/4": Layer(
        4096, {"qkv": (9216, 12288), "output": (12288, 3072), "up": (12288, 12288), "down": (12288, 12288)}
    ),
    "gpt3": Layer(
        4096, {"qkv": (36864, 12288), "output": (12288, 12288), "up": (49152, 12288), "down": (12288, 49152)}
    ),
}
"""Llama 3.1 8B on one rank, GPT-3 on one of four and on one rank."""


class Case(NamedTuple):
    """What is timed.

    Attributes:
        run: enqueues a layer's.
        alone: the same without what is in question; None where there is nothing to compare with.
        flops: of ``run``.
        parts: micro-batches that ``run`` and ``alone`` serve.
    """

    run: Callable[[], object]
    alone: Callable[[], object] | None
    flops: float
    parts: int = 1


class Timed(NamedTuple):
    """What was found, for one micro-batch.

    Attributes:
        name: of the case.
        ms, alone_ms: milliseconds; those alone are NaN where there are none.
        flops: of one micro-batch.
    """

    name: str
    ms: float
    alone_ms: float
    flops: float


Build = Callable[[Layer, torch.device], Case]


def scale_inverse(device: torch.device) -> Tensor:
    """Of operands whose products are of the size of gradients."""
    return torch.full((), 2.0**-10, device=device)


def normal(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Numbers with all mantissas; what is multiplied decides how fast a GPU may run. FP8's are of a cast's size."""
    generator = torch.Generator(device).manual_seed(SEED)
    drawn = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    return drawn.mul_(32.0).to(dtype) if dtype.itemsize == 1 else drawn.to(dtype)


def weight_gradients(implementation: str, dtype: torch.dtype, parts: int, layer: Layer, device: torch.device) -> Case:
    """FP8, into gradients of a dtype, of ``parts`` micro-batches at once.

    Raises:
        UnsupportedImplementation: this GPU or this installation has no such one.
    """
    request = OperationRequest(device, dtype)
    accumulate = weight_gradient.WEIGHT_GRADIENT.select(implementation, request).function
    scratch, inverse, tokens = Scratch(device), scale_inverse(device), parts * layer.tokens
    sets = []
    for outputs, inputs in layer.weights.values():
        operands = normal(device, E5M2, outputs, tokens), normal(device, E4M3, inputs, tokens)
        sets.append((*operands, torch.zeros(outputs, inputs, dtype=dtype, device=device)))

    def room(shape: Sequence[int], of: torch.dtype) -> Tensor:
        return scratch.slot("room", shape, of)

    def run() -> None:
        for dy, x, gradient in sets:
            accumulate(dy, x, inverse, inverse, gradient, room)

    def alone() -> None:
        for dy, x, gradient in sets:
            multiply(dy, x, inverse, inverse, dtype, out=room(gradient.shape, dtype))

    return Case(run, alone, parts * layer.flops(), parts)


def promoted_weight_gradients(layer: Layer, device: torch.device) -> Case:
    """FP8 products whose sums go to fp32 registers every few steps, beside those of fast accumulation; none adds."""
    inverse, scratch, half = scale_inverse(device), Scratch(device), torch.bfloat16
    sets = [
        (normal(device, E5M2, outputs, layer.tokens), normal(device, E4M3, inputs, layer.tokens))
        for outputs, inputs in layer.weights.values()
    ]

    def run(fast: bool) -> None:
        for dy, x in sets:
            out = scratch.slot("room", (len(dy), len(x)), half)
            torch._scaled_mm(dy, x.t(), inverse, inverse, out_dtype=half, use_fast_accum=fast, out=out)

    return Case(lambda: run(False), lambda: run(True), layer.flops())


def half_weight_gradients(dtype: torch.dtype, layer: Layer, device: torch.device) -> Case:
    """In bf16, where PyTorch's product adds, to gradients of a dtype; beside products that write bf16."""
    half, scratch = torch.bfloat16, Scratch(device)
    sets = []
    for outputs, inputs in layer.weights.values():
        operands = normal(device, half, layer.tokens, outputs), normal(device, half, layer.tokens, inputs)
        sets.append((*operands, torch.zeros(outputs, inputs, dtype=dtype, device=device)))

    def run() -> None:
        for dy, x, gradient in sets:
            add_product_(gradient, dy, x)

    def alone() -> None:
        for dy, x, gradient in sets:
            torch.mm(dy.t(), x, out=scratch.slot("room", gradient.shape, half))

    return Case(run, alone, layer.flops())


def products(backward: bool, cuts: int, layer: Layer, device: torch.device) -> Case:
    """The forward products, or those towards the input; tokens in so many cuts, as they come from other ranks."""
    inverse, scratch, sets = scale_inverse(device), Scratch(device), []
    for outputs, inputs in layer.weights.values():
        rows, columns = (inputs, outputs) if backward else (outputs, inputs)
        left = normal(device, E5M2 if backward else E4M3, layer.tokens, columns)
        sets.append((left, normal(device, E4M3, rows, columns)))

    def run(cuts: int) -> None:
        for left, right in sets:
            out = scratch.slot("result", (len(left), len(right)), torch.bfloat16)
            for rows, result in zip(left.chunk(cuts), out.chunk(cuts), strict=True):
                multiply(rows, right, inverse, inverse, torch.bfloat16, out=result)

    return Case(lambda: run(cuts), (lambda: run(1)) if cuts > 1 else None, layer.flops())


def matrices(what: str, layer: Layer) -> list[tuple[int, int]]:
    """Rows and columns of what is transposed for each product."""
    return [
        {"weights": (outputs, inputs), "inputs": (layer.tokens, inputs), "gradients": (layer.tokens, outputs)}[what]
        for outputs, inputs in layer.weights.values()
    ]


def transposes(what: str, layer: Layer, device: torch.device) -> Case:
    """Of weights, inputs or gradients, by passes of their own."""
    transpose = transpose_fp8.TRANSPOSE_FP8.select(AUTO, OperationRequest(device, E4M3)).function
    scratch = Scratch(device)
    sets = [normal(device, E4M3, *shape) for shape in matrices(what, layer)]

    def run() -> None:
        for matrix in sets:
            transpose(matrix, scratch.slot("turned", matrix.shape[::-1], E4M3))

    return Case(run, None, 0.0)


def casts(what: str, layer: Layer, device: torch.device) -> Case:
    """Casts from bf16 that write both orders, beside those that write one."""
    cast = fp8_cast.FP8_CAST.select(AUTO, OperationRequest(device, torch.bfloat16)).function
    to = E5M2 if what == "gradients" else E4M3
    scaling = Scaling(torch.full((), 8.0, device=device), torch.zeros(2, dtype=torch.int32, device=device))
    sets = [normal(device, torch.bfloat16, *shape) for shape in matrices(what, layer)]

    def run(both: bool) -> None:
        for matrix in sets:
            cast(matrix, scaling, to, both)

    return Case(lambda: run(True), lambda: run(False), 0.0)


def cases() -> dict[str, Build]:
    """Everything that can be timed, by name without the layer's."""
    bf16, fp32 = torch.bfloat16, torch.float32
    found: dict[str, Build] = {}
    for dtype, into in ((bf16, "bf16"), (fp32, "fp32")):
        for name in weight_gradient.WEIGHT_GRADIENT.names:
            found[f"wgrad fp8 into {into} {name}"] = _given(weight_gradients, name, dtype, 1)
    for name in weight_gradient.WEIGHT_GRADIENT.names:
        found[f"wgrad fp8 into bf16 {name}, two micro-batches"] = _given(weight_gradients, name, bf16, 2)
    found["wgrad fp8 alone, promoted to fp32"] = promoted_weight_gradients
    for dtype, into in ((bf16, "bf16"), (fp32, "fp32")):
        found[f"wgrad bf16 into {into}"] = _given(half_weight_gradients, dtype)
    for what in ("weights", "inputs", "gradients"):
        found[f"passes transposes of {what}"] = _given(transposes, what)
    for what in ("inputs", "gradients"):
        found[f"passes casts of {what} in both orders"] = _given(casts, what)
    for backward, where in ((False, "forward"), (True, "towards inputs")):
        for cuts in (1, 2, 4):
            found[f"passes products {where}, {cuts} cuts"] = _given(products, backward, cuts)
    return found


def _given(build: Callable[..., Case], *given: object) -> Build:
    return lambda layer, device: build(*given, layer, device)


def tasks() -> dict[str, tuple[Layer, Build]]:
    """Cases of every layer by their full names."""
    return {f"{of}: {name}": (layer, build) for of, layer in LAYERS.items() for name, build in cases().items()}


def measure(name: str, layer: Layer, build: Build, device: torch.device) -> Timed:
    """Time one case and, in turn with it, what it is compared with."""
    case = build(layer, device)
    times: list[float] = []
    alone: list[float] = []
    for _ in range(ROUNDS):
        if case.alone is not None:
            alone.append(_milliseconds(case.alone))
        times.append(_milliseconds(case.run))
    alone_ms = statistics.median(alone) / case.parts if alone else float("nan")
    return Timed(name, statistics.median(times) / case.parts, alone_ms, case.flops / case.parts)


def _milliseconds(run: Callable[[], object]) -> float:
    def repeat() -> int:
        for _ in range(CALLS):
            run()
        return CALLS

    return time_graph(repeat, replays=3)


def line(timed: Timed) -> str:
    """One line of the table."""
    text = f"{timed.name:62s} {timed.ms:8.3f} ms"
    if timed.alone_ms == timed.alone_ms:
        difference = timed.ms - timed.alone_ms
        text += f", alone {timed.alone_ms:8.3f}, more {difference:+7.3f} ({100 * difference / timed.alone_ms:+5.1f} %)"
    if timed.flops:
        text += f" {timed.flops / timed.ms * 1e-9:7.0f} TFLOP/s"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Measure on one GPU and print."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", help="words, separated by commas")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    require_gpu(MODULE)
    device = torch.device("cuda", torch.cuda.current_device())
    if arguments.worker is not None:
        _work(arguments.worker, device)
        return
    words = [word for word in arguments.cases.split(",") if word]
    wanted = [name for name in tasks() if not words or any(word in name for word in words)]
    if not wanted:
        parser.error(f"--cases {arguments.cases} names nothing")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
    for result in supervise(MODULE, [], wanted):
        print(line(Timed(*json.loads(result))), flush=True)


def _work(names: list[str], device: torch.device) -> None:
    def run(name: str) -> None:
        try:
            found = measure(name, *tasks()[name], device)
        except UnsupportedImplementation as reason:  # which says nothing against the device
            print(f"{name:62s} {reason}", flush=True)
            return
        print(f"{RESULT}{json.dumps(found)}", flush=True)

    work(names, run)


if __name__ == "__main__":
    main()
