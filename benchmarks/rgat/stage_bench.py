"""Time each stage of R-GAT's training on a GPU, and all together: ``python -m benchmarks.rgat.stage_bench``.

A random graph with the mean degrees of IGBH-Full and an eighth of its nodes, which is what each of eight GPUs holds, is
made on the device with features in FP8. Measured are sampling, gathering, the captured step on one batch, all three
overlapped as a run has them, and an evaluation. Arguments are overrides, such as ``micro_batch=1024`` or
``model.example_papers=16834135``; throughputs depend on nodes and edges of a seed, which are printed too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.data import BlockSource, Sources
from benchmarks.rgat.evaluate import NodeClassification
from benchmarks.rgat.example import example_sources
from benchmarks.rgat.made_up_graph import IGBH_EIGHTH
from benchmarks.rgat.seeds import EvaluationSeeds, Labelled, SeedStream
from benchmarks.rgat.workload import RgatClassification
from common.config import loading
from common.config.composition import compose
from common.config.schema import BenchConfig, RunConfig
from common.contract.evaluation import Weights
from common.data.batches import Batch
from common.data.batches import Block as Between
from common.data.order import MicroBatches
from common.data.prefetch import Prefetcher, side_stream
from common.distributed.layout import Layout
from common.ops.bench.stopwatch import require_gpu
from common.step.graphs import StepRunner

EVALUATED = 1 << 17
"""Seeds of the evaluation that is timed."""

LABEL = 36


class Stages:
    """What is measured, on one device.

    Args:
        run: the configuration; one micro-batch is a global batch here.
        options: steps.
        device: where everything runs.
    """

    def __init__(self, run: RunConfig, options: BenchConfig, device: torch.device) -> None:
        self.run = replace(
            run, global_batch=run.micro_batch, grad_accumulation_steps=1, scale=replace(run.scale, gpus_per_node=1)
        )
        self.options, self.device = options, device
        self.layout = Layout(self.run.layout, device=device)
        self.workload = RgatClassification(self.run, self.layout)
        self.runner = StepRunner(self.workload.build_step(), self.workload.model, 1, run.cuda_graphs)
        own = run.workload
        self.sources: Sources = example_sources(
            own, own.facts.schema, run.micro_batch, self.workload.build_sampler, self.layout
        )
        seeds = self.sources.graph.nodes[own.facts.schema.seed_type]
        random = np.random.default_rng(0)
        labels = random.integers(own.facts.classes, size=seeds, dtype=np.int16)
        self.labelled = Labelled(np.arange(seeds, dtype=np.int32), labels)
        self.stream = SeedStream(self.labelled, MicroBatches(run.micro_batch), 0, device)
        reader = own.reader
        measuring = self.stream.measuring(reader.capacity_batches)
        self.shape: BlockShape = self.sources.room(run.micro_batch, measuring, reader.capacity_sigma, None)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Name and text of what is measured, one after the other."""
        steps, seeds = self.options.steps, self.run.micro_batch
        batches = [self.stream.batch(number)[0] for number in range(steps)]
        sampler = self.workload.build_sampler(self.sources.graph, self.run.workload.facts.fanouts, self.shape)
        blocks: list[Block] = []
        counts = torch.zeros(self.shape.counts, dtype=torch.int64, device=self.device)

        def sample() -> None:
            for batch in batches:
                block = sampler(batch.seeds, batch.count, batch.seed)
                counts.add_(block.counts)
                blocks[:] = [*blocks[-3:], block]

        sample()
        counts.zero_()
        yield self._row("sampling", self._timed(sample))
        mean = replace(blocks[-1], counts=counts.double() / steps)
        nodes, edges = float(mean.node_counts[-1].sum()), float(mean.edge_counts[-1].sum())
        rows = mean.row_counts.sum(1).tolist()
        yield "a seed", f"{nodes / seeds:,.0f} nodes, {edges / seeds:,.0f} edges, {rows[-1] / seeds:,.0f} rows"
        width = self.sources.features.width * self.sources.features.dtype.itemsize
        room = self.shape.node_offsets(self.shape.hops)[-1]
        out = torch.empty((room, self.sources.features.width), dtype=self.sources.features.dtype, device=self.device)

        def gather() -> None:
            for number in range(steps):
                block = blocks[number % len(blocks)]
                self.sources.features.gather(block, self.sources.features.plan(block), out)

        gather()
        seconds = self._timed(gather)
        yield self._row(
            "gathering", seconds, f", {2 * nodes * width * steps / seconds / 1e9:,.0f} GB/s read and written"
        )
        example = Batch(self.sources.example(self.shape, self.stream.batch(0)), seeds, self.shape)
        self.runner.warm_up([example])
        with self.runner.on_stream():
            self.runner([example])
            seconds = self._timed(lambda: [self.runner([example]) for _ in range(steps)])
        flops = self.workload.model.training_flops(rows, seeds)
        yield self._row(
            "step", seconds, f", {flops * steps / seconds / 1e12:,.0f} TFLOP/s of the projections and classifier"
        )
        yield self._together(steps)
        yield self._evaluation()

    def _together(self, steps: int) -> tuple[str, str]:
        """Training as a run has it: everything overlapped."""
        source = BlockSource(self.sources, self.stream, self.shape, len(self.labelled), True)
        untimed = self.options.warmup_steps
        samples = (untimed + steps) * self.run.micro_batch
        with self.runner.on_stream():
            prefetcher = Prefetcher(self.workload.prepare, 1, side_stream(self.device))
            prefetcher.begin(source.batches(Between(0, 1, 0, 0, samples)))

            def train(count: int) -> None:
                for _ in range(count):
                    batches = prefetcher.take()
                    assert batches is not None, "as many steps as batches"
                    self.runner(batches)
                    prefetcher.consumed()

            train(untimed)
            seconds = self._timed(lambda: train(steps))
        share = 1 - source.sampler.larger / source.sampler.sampled
        return self._row("all overlapped", seconds, f", {share:.4f} of the batches captured")

    def _evaluation(self) -> tuple[str, str]:
        """An evaluation of some seeds, captured."""
        own, count = self.run.workload, min(EVALUATED, len(self.labelled))
        labelled = Labelled(self.labelled.nodes[:count], self.labelled.labels[:count])
        seeds = EvaluationSeeds(labelled, own.reader.eval_batch, 1, 1, 0, 0, self.device)
        evaluation = NodeClassification(
            self.workload.model,
            (self.shape, self.sources.example(self.shape, self.stream.batch(0))),
            lambda _: (self.sources, seeds),
            own.reader.capacity_batches,
            own.reader.capacity_sigma,
            self.layout,
            self.run.cuda_graphs,
        )
        weights: Weights = self.workload.weights()
        with self.runner.on_stream():
            evaluation.open_data(Path())
            evaluation.predict(weights)
            seconds = self._timed(lambda: evaluation.predict(weights))
        evaluation.close()
        return "evaluation", f"{seconds:.3f} s of {count:,} seeds, {count / seconds:,.0f} seeds/s"

    def _row(self, name: str, seconds: float, more: str = "") -> tuple[str, str]:
        steps, seeds = self.options.steps, self.run.micro_batch
        return name, f"{seconds / steps * 1e3:.3f} ms, {steps * seeds / seconds:,.0f} seeds/s{more}"

    def _timed(self, work: Callable[[], object]) -> float:
        """Seconds of ``work`` with all that it queues."""
        self._synchronise()
        began = time.perf_counter()
        work()
        self._synchronise()
        return time.perf_counter() - began

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main(arguments: Sequence[str]) -> None:
    """Print what is measured."""
    given = ["benchmark=rgat", "scale=1xH200", f"model.example_papers={IGBH_EIGHTH}", *arguments]
    run, session = loading.load(compose(given), lambda _: RgatClassification)
    if session.device != "cpu":
        require_gpu("benchmarks.rgat.stage_bench", "device=cpu measures a CPU")
    device = torch.device("cpu" if session.device == "cpu" else "cuda")
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    stages = Stages(run, session.bench, device)
    rows = {
        "hardware": name,
        "versions": f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}",
        "micro-batch": f"{run.micro_batch} seeds, {run.precision}",
        "graph": f"{sum(stages.sources.graph.nodes):,} nodes, {sum(stages.sources.graph.edges):,} edges",
        "room": f"{stages.shape}, mean + {run.workload.reader.capacity_sigma:g} sigma",
        **{f"implementation: {key}": value for key, value in stages.workload.implementations().items()},
    }
    for key, text in rows.items():
        print(f"{key:<{LABEL}}{text}")
    for key, text in stages.rows():
        print(f"{key:<{LABEL}}{text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
