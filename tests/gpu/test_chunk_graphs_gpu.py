"""Graphs of the passes of chunks on a GPU: as one graph of the whole iteration and as eager passes, from one memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once

import pytest
import torch
from torch import Tensor

from benchmarks.gpt3.workload import GptPretraining
from benchmarks.llama31_8b.workload import LlamaPretraining
from common import cli
from common.config.composition import compose
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.step.capture import CudaRecorder
from common.step.chunk_graphs import ChunkGraphs
from common.step.graphs import StepRunner
from tests.chunk_passes import Stage

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

GPU = torch.device("cuda", 0)
WITH_FP8 = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 units")
STEPS, ROWS, LENGTH, WORDS = 3, 2, 384, 500
WAYS = {"eager": "false", "whole": "true", "chunks": "chunks"}

WORKLOADS: dict[str, tuple[type[Any], dict[str, object]]] = {
    "gpt3": (
        GptPretraining,
        {"hidden": 512, "layers": 3, "heads": 4, "feed_forward": 2048, "vocabulary": WORDS, "positions": LENGTH,
         "warmup_samples": 0, "initializer_range": 0.04},
    ),
    "llama31_8b": (
        LlamaPretraining,
        {"hidden": 512, "layers": 3, "heads": 4, "kv_heads": 2, "head_size": 128, "feed_forward": 1024,
         "vocabulary": 512, "row_length": LENGTH, "initializer_range": 0.04, "rope_original_context": 256},
    ),
}  # fmt: skip
"""Name to class, and facts of a small network."""

KINDS = {
    "fp32": (("precision=fp32", "deterministic=true", "model.implementations.attention=reference"), 1e-5),
    "bf16": (("precision=bf16", "model.implementations.attention=reference"), 2e-3),
    "fp8": (("precision=bf16", "model.linear=fp8", "model.implementations.attention=reference"), 2e-3),
}
"""Overrides, and how far losses may be apart, relative: in 16 bits attention adds atomically."""


@pytest.fixture(autouse=True)
def in_order() -> Iterator[None]:
    """Every sum in a fixed order where there is a choice, and no TF32."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = tf32


class Trained:
    """A workload that trains one of the ways."""

    def __init__(self, name: str, way: str, count: int, overrides: tuple[str, ...]) -> None:
        cls, facts = WORKLOADS[name]
        given = [f"benchmark.facts.{key}={value}" for key, value in facts.items()]
        run, _ = cli.load(
            compose([
                f"benchmark={name}", "scale=test", "device=cuda", *given, f"hparams.global_batch_size={ROWS * count}",
                f"micro_batch={ROWS}", f"cuda_graphs={WAYS[way]}", *overrides,
            ])
        )  # fmt: skip
        self.workload = cls(run, Layout(run.layout, seed=3, device=GPU))
        self.step, self.count = self.workload.build_step(), run.grad_accumulation_steps
        self.runner = StepRunner(self.step, self.workload.model, self.count, run.cuda_graphs)

    def state(self) -> dict[str, Tensor]:
        """Copies of all persistent tensors."""
        torch.cuda.synchronize()
        tensors = dict(self.workload.named_state())
        for updater in self.step.updaters:
            tensors |= dict(updater.named_state())
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def batches(self, seed: int) -> list[Batch]:
        """The micro-batches of a step."""
        generator = torch.Generator().manual_seed(seed)
        every = torch.randint(WORDS, (self.count, ROWS, LENGTH + 1), generator=generator, dtype=torch.int32)
        every[:, :, -1] = -1
        return [Batch({"tokens": tokens.to(GPU)}, ROWS) for tokens in every]

    def train(self) -> list[float]:
        """Losses of some steps; where they are replayed nothing waits for the device."""
        given = [self.batches(seed) for seed in range(STEPS)]
        results = []
        torch.cuda.synchronize()
        with self.runner.on_stream():
            torch.cuda.set_sync_debug_mode("error" if self.runner.cost.graphs else "default")
            try:
                for micro_batches in given:
                    result = self.runner(micro_batches)
                    results.append((result.names, result.values.clone()))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        return [self.step.read(names, values.tolist()).metrics["loss"] for names, values in results]


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("kind", ["fp32", "bf16", pytest.param("fp8", marks=WITH_FP8)])
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_chunk_graphs_train_as_one_graph_and_as_eager_passes(name, kind, count):
    overrides, close = KINDS[kind]
    losses: dict[str, list[float]] = {}
    changes: dict[str, dict[str, Tensor]] = {}
    for way in WAYS:
        trained = Trained(name, way, count, overrides)
        start = {n: parameter.detach().double() for n, parameter in trained.workload.model.named_parameters()}
        trained.runner.warm_up(trained.workload.example_batches())
        losses[way] = trained.train()
        after = dict(trained.workload.model.named_parameters())
        changes[way] = {n: after[n].detach().double() - weight for n, weight in start.items()}
        assert trained.runner.uncaptured == {}
        assert trained.runner.cost.graphs == {"eager": 0, "whole": 1, "chunks": 2}[way]
        assert (trained.runner.cost.memory > 0) == (way != "eager")
        trained.runner.close()
        del trained, after
    assert all(moved.norm() > 0 for moved in changes["eager"].values())
    for way in ("whole", "chunks"):
        assert losses[way] == pytest.approx(losses["eager"], rel=close), way
    if kind == "fp32":
        for way in ("whole", "chunks"):
            off = torch.stack([(changes[way][n] - wanted).norm() for n, wanted in changes["eager"].items()]).norm()
            size = torch.stack([wanted.norm() for wanted in changes["eager"].values()]).norm()
            assert off / size < 1e-4, way  # Adam makes much of the smallest gradients


@pytest.mark.parametrize("kind", ["fp32", pytest.param("fp8", marks=WITH_FP8)])
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_warm_up_by_chunks_leaves_no_trace(name, kind):
    trained = Trained(name, "chunks", 8, KINDS[kind][0])
    before = trained.state()
    random = torch.get_rng_state(), torch.cuda.get_rng_state()
    trained.runner.warm_up(trained.workload.example_batches())
    for key, tensor in trained.state().items():
        assert torch.equal(tensor, before[key]), key
    assert torch.equal(random[0], torch.get_rng_state())
    assert torch.equal(random[1], torch.cuda.get_rng_state())
    trained.runner.close()


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_replays_take_no_more_memory(name):
    trained = Trained(name, "chunks", 8, KINDS["bf16"][0])
    trained.runner.warm_up(trained.workload.example_batches())
    trained.train()
    taken = torch.cuda.memory_reserved()
    for _ in range(3):
        trained.train()
    assert torch.cuda.memory_reserved() == taken
    trained.runner.close()


def test_many_micro_batches_under_way_keep_what_is_theirs():
    """Graphs of two chunks, each for as many micro-batches as a stage of a pipeline has under way, in its order."""
    eager, graphs = Stage(GPU), Stage(GPU, ChunkGraphs())
    assert graphs.graphs is not None
    stream = torch.cuda.Stream(GPU)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        wanted = eager.run()
        with graphs.graphs.recording(CudaRecorder(stream)):
            graphs.record()
        for repeated in range(2):  # in the second round places are used again from the start
            found = graphs.run()
            for unit, tensor in wanted.items():
                torch.testing.assert_close(found[unit], tensor, rtol=0, atol=1e-11, msg=lambda m, u=unit: f"{u}: {m}")
            for own, one in zip(graphs.gradients(), eager.gradients(), strict=True):
                torch.testing.assert_close(own, one * (repeated + 1), rtol=1e-10, atol=1e-10)
    torch.cuda.synchronize()
    assert graphs.graphs.count > 2 * 8
    graphs.graphs.close()
