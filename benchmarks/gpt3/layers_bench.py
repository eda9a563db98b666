"""Measure GPT-3's layers alone on GPUs, forward and backward: ``python -m benchmarks.gpt3.layers_bench``.

``--linear fp8,torch --layers 3 --rows 2`` is the layers of a micro-batch on one GPU, ``--tp 4 --layers 12`` a stage as
four GPUs share it, with the tokens moving beside the products and without. Weights are full width and random, gradients
are added to main ones in bf16. An iteration of ``--micro-batches`` of them, in which FP8 weights are cast once, is one
CUDA graph; it is replayed for ``--seconds``, so that clocks are those of a long run, and the last replays are timed.
``--ends`` takes the embedding and the head in as well; ``--breakdown`` adds the time by kind of kernel.

TFLOP/s are those of a GPU, by the two conventions: attention counted in full, as NVIDIA's and Megatron-LM's figures,
and the causal half alone.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.gpt3.architecture import Architecture
from benchmarks.gpt3.config import OPERATIONS, Facts
from benchmarks.gpt3.network import Gpt
from benchmarks.gpt3.operations import choose_operations
from benchmarks.gpt3.written import WrittenGpt
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.overlap import PRODUCTS, build_products
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.errors import ConfigError, UnsupportedImplementation
from common.mlperf.fixed import fixed_facts
from common.ops.operation import AUTO
from common.run.kernels import breakdown, recorded
from common.step.capture import capturing

EAGER = 3
"""Iterations before the capture: libraries choose, scales of FP8 come from a first and from a second use."""

TIMED = 10
"""Replays of which the median counts."""


@dataclass(frozen=True)
class Way:
    """What to measure.

    Attributes:
        linear: ``fp8`` or ``torch``.
        products: how tokens move beside products.
        kept_transposes: see :class:`benchmarks.gpt3.written.WrittenGpt`.
        implementations: name of an operation to the implementation that runs it; ``auto`` for those left out.
    """

    linear: str
    products: str = AUTO
    kept_transposes: bool = False
    implementations: Mapping[str, str] = field(default_factory=dict)


class Iteration:
    """Forward and backward passes of some micro-batches, on made-up hidden states or tokens.

    Args:
        architecture: sizes, with as many layers as are measured.
        layout: of tp alone.
        dtype: of weights and activations.
        way: see there.
        rows: of a micro-batch.
        micro_batches: of an iteration.
        ends: whether embedding and head belong to it.

    Attributes:
        chosen: names of implementations.
        outcome: what the last micro-batch has given: the gradient of the first layer's input, or the loss.
    """

    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        dtype: torch.dtype,
        way: Way,
        rows: int,
        micro_batches: int,
        ends: bool,
    ) -> None:
        self._rows, self._micro_batches, self._ends = rows, micro_batches, ends
        device, parallel = layout.device, TensorParallel.from_layout(layout)
        parts = [range(architecture.layers)]
        self.model = Gpt(architecture, parts, ends, ends, device, dtype, parallel)
        self.model.initialise(lambda name: layout.shared_generator(f"weights/{name}", device))
        operations, self.chosen = choose_operations(way.implementations, architecture, device, dtype, parallel.size)
        products = build_products(parallel, device, way.products) if parallel.size > 1 else None
        self.chosen |= {"products": products.name} if products is not None else {}
        tokens = rows * architecture.positions
        self._network = WrittenGpt(
            self.model, operations, way.linear, tokens, products, way.implementations.get("accumulation", AUTO),
            way.kept_transposes,
        )  # fmt: skip
        generator = torch.Generator(device).manual_seed(1 + parallel.index)
        shape = (parallel.own_count(tokens), architecture.hidden)
        self._x_sE = torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()
        self._dy_sE = torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(1e-4)
        shared = torch.Generator(device).manual_seed(1)  # the same tokens on all ranks of tp
        self._tokens_BS = torch.randint(
            architecture.vocabulary, (rows, architecture.positions), generator=shared, device=device
        )
        self.outcome: Tensor | None = None

    def __call__(self) -> None:
        """Enqueue it."""
        with self._network.same_weights():
            for _ in range(self._micro_batches):
                self.outcome = self._whole() if self._ends else self._layers()

    def _layers(self) -> Tensor:
        y_sE = self._network.through(0, self._x_sE, self._rows)
        (dx_sE,) = torch.autograd.grad(y_sE, self._x_sE, self._dy_sE)
        return dx_sE

    def _whole(self) -> Tensor:
        x_sE = self._network.through(0, self._network.embed(self._tokens_BS), self._rows)
        labels_T = self._tokens_BS.roll(-1, 1).flatten()
        loss = self._network.summed_loss(x_sE, labels_T, len(labels_T), 1 / len(labels_T))
        loss.backward()
        return loss.detach()


def flops_of(architecture: Architecture, rows: int, ranks: int, ends: bool, causal: bool) -> float:
    """Of one rank and micro-batch, forward and backward."""
    length = architecture.positions
    forward = architecture.layers * architecture.layer_flops(length, causal)
    return 3.0 * rows * (architecture.forward_flops(length, causal) if ends else forward) / ranks


def measured(run: Iteration, micro_batches: int, seconds: float, device: torch.device) -> tuple[float, str]:
    """Milliseconds of a micro-batch in steady state, and the breakdown of an iteration. Collective over tp."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(EAGER):
            run()
        torch.cuda.synchronize(device)
        with capturing(graph, stream):
            run()
        graph.replay()
        count = max(TIMED, round(seconds / (_replays_ms(graph, TIMED) * 1e-3)))
        count = _agreed(count, device)
        for _ in range(count):
            graph.replay()
        step_ms = _replays_ms(graph, TIMED)
        kernels, _ = recorded(graph.replay, graph.replay)
    graph.reset()
    return step_ms / micro_batches, "\n".join(breakdown(kernels, micro_batches).rows())


def _replays_ms(graph: torch.cuda.CUDAGraph, count: int) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def _agreed(count: int, device: torch.device) -> int:
    """Rank 0's number: all replay equally often."""
    if not dist.is_initialized():
        return count
    shared = torch.tensor(count, device=device)
    dist.broadcast(shared, 0)
    return int(shared)


def ways(arguments: argparse.Namespace) -> Iterator[Way]:
    """What to compare."""
    given = dict(pair.split("=", 1) for pair in arguments.implementations)
    movements = (AUTO,) if arguments.tp == 1 else arguments.products.split(",")
    for linear in arguments.linear.split(","):
        for products in movements:
            yield Way(linear, products, arguments.kept_transposes, given)


def in_words(way: Way, ms: float, architecture: Architecture, rows: int, ranks: int, ends: bool) -> str:
    """One line."""
    full, causal = (flops_of(architecture, rows, ranks, ends, half) / ms / 1e9 for half in (False, True))
    tokens = rows * architecture.positions / ranks
    how = "" if way.products == AUTO else f" {way.products}"
    return (
        f"{way.linear:5s}{how}  {ms:8.3f} ms a micro-batch, {ms / architecture.layers:7.3f} ms a layer; "
        f"{full:7.1f} TFLOP/s with attention in full, {causal:7.1f} causal; {tokens / ms * 1e3:,.0f} tokens/s a GPU"
    )


def run_rank(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    """Measure every way on this rank of tp; rank 0 prints."""
    ranks, device = arguments.tp, torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, device_id=device
        )
    layout = Layout({"tp": ranks}, rank, device=device)
    shape = facts(arguments.layers)
    for way in ways(arguments):
        torch.cuda.reset_peak_memory_stats(device)
        try:
            run = Iteration(shape, layout, torch.bfloat16, way, arguments.rows, arguments.micro_batches, arguments.ends)
        except UnsupportedImplementation as error:
            text = f"{way.linear} {way.products}: {error}"
        else:
            ms, kinds = measured(run, arguments.micro_batches, arguments.seconds, device)
            used = torch.cuda.max_memory_allocated(device) / 1e9
            names = ", ".join(f"{operation}={name}" for operation, name in sorted(run.chosen.items()))
            text = (
                f"{in_words(way, ms, shape, arguments.rows, ranks, arguments.ends)}; {used:.1f} GB at most\n    {names}"
            )
            text += f"\n{kinds}" if arguments.breakdown else ""
            if ranks > 1:
                dist.barrier()  # before memory that others have mapped is freed
            del run
        torch.cuda.empty_cache()
        if rank == 0:
            print(text, flush=True)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def facts(layers: int) -> Facts:
    """The rules' network with so many layers."""
    return fixed_facts(Facts, "gpt3", layers=layers)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: it asks for what there cannot be.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--linear", default="fp8,torch", help="of the products, separated by commas")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch, 2,048 tokens each")
    parser.add_argument("--micro-batches", type=int, default=4, help="of an iteration")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share every layer")
    parser.add_argument("--products", default=",".join(PRODUCTS), help="how tokens move with --tp, separated by commas")
    parser.add_argument("--kept-transposes", action="store_true", help="transpose FP8 weights once an iteration")
    parser.add_argument("--implementations", nargs="*", default=[], help="such as attention=cudnn")
    parser.add_argument("--ends", action="store_true", help="embedding and head, too")
    parser.add_argument("--seconds", type=float, default=20.0, help="before the timed replays")
    parser.add_argument("--breakdown", action="store_true", help="time by kind of kernel")
    arguments = parser.parse_args(words)
    for name in ("layers", "rows", "micro_batches", "tp"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: at least 1")
    for linear in arguments.linear.split(","):
        if linear not in ("fp8", "torch"):
            raise ConfigError(f"--linear {linear}: fp8 or torch, or both with a comma between")
    for pair in arguments.implementations:
        if pair.partition("=")[0] not in OPERATIONS or "=" not in pair:
            raise ConfigError(f"--implementations {pair}: <operation>=<name>, of {', '.join(OPERATIONS)}")
    return arguments


def main() -> None:
    """Command line."""
    try:
        arguments = parsed()
        facts(arguments.layers)
    except ConfigError as error:
        sys.exit(str(error))
    if torch.cuda.device_count() < arguments.tp:
        sys.exit(f"benchmarks.gpt3.layers_bench --tp {arguments.tp}: PyTorch sees {torch.cuda.device_count()} GPUs")
    started = time.monotonic()
    print(
        f"{arguments.tp} x {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {arguments.layers} layers, "
        f"{arguments.rows} rows of 2,048 tokens, {arguments.micro_batches} micro-batches in a graph",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(folder, arguments), nprocs=arguments.tp)
    print(f"{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
