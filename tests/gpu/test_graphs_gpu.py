"""Test captured training steps of all workloads: they equal eager steps, leave no trace of warm-up, and wait for
nothing."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import WORKLOADS
from benchmarks.rgat.graph import SampledBlock
from common import cli
from common.config.composition import compose
from common.contract.workload import Workload
from common.data.batches import Batch, Block
from common.data.prefetch import Prefetcher, side_stream
from common.distributed.layout import Layout
from common.step.graphs import StepRunner
from common.step.train_step import StepResult, StepsInFlight, TrainStep
from tests.command_line import finish, started, the_message, training
from tests.gpu.support import waiting_is_an_error

pytestmark = pytest.mark.gpu

STEPS = 5
AHEAD = 3  # iterations that the host may launch before it reads the first one's result
ROUNDING = 1e-5
"""Largest difference of the weights' changes in a step, relative to the change. Both runs sum in the same order."""

MOVING = {
    "bert": ("hparams.warmup_steps=0",),
    "gpt3": ("benchmark.facts.warmup_samples=0",),
    "maskrcnn": ("deterministic=true", "model.loss_scale=1024"),
    "rgat": ("deterministic=true", "reader.capacity_sigma=100", "reader.capacity_batches=50"),
}
"""Overrides with which the first update moves the weights reproducibly, and all batches have one key.

The warm-ups of BERT and GPT-3 start from a learning rate of 0. Gradients of R-GAT and Mask R-CNN are added atomically
by default, and Adam amplifies differences of the smallest. R-GAT's blocks need enough capacity. Mask R-CNN's gradients
reach 2 on noise, so its first loss scale would exceed the range of fp16.
"""

ONE_GRAPH_PER_COUNT = ("reader.graph_per_count=true", "micro_batch=4", "hparams.global_batch_size=4")

RGAT_REFERENCES = tuple(f"model.implementations.{name}=reference" for name in ("projection", "edge_attention"))

IMPLEMENTATIONS = [
    *(pytest.param(workload, MOVING.get(workload, ()), id=workload) for workload in sorted(WORKLOADS)),
    pytest.param("resnet", ("model.implementations.batch_norm=reference",), id="resnet-reference"),
    # One head of 32 features: those of the recipe are narrower than the Triton attention takes.
    pytest.param("bert", (*MOVING["bert"], "benchmark.facts.heads=1"), id="bert-triton-attention"),
    pytest.param("bert", (*MOVING["bert"], *ONE_GRAPH_PER_COUNT), id="bert-graph-per-count"),
    pytest.param("rgat", (*MOVING["rgat"], *RGAT_REFERENCES), id="rgat-reference"),
]
PRECISIONS = ["fp32", "bf16", "fp16"]
GEOMETRY = ("boxes", "size", "transform", "object")
"""Tensors in Mask R-CNN's batches: corners, sizes, transforms of pictures, and rows of the table of polygons."""
BLOCK = {field.name for field in fields(SampledBlock)}
STRUCTURES = ("edge_source", "edge_target", "edge_shift", "edge_reverse", "free", "global_free")
"""Tensors in OpenCatalyst's batches: edges, which are sorted and have the length of a bond, and free atoms."""


@dataclass
class Built:
    """A workload's ``test`` recipe on the GPU, warmed up."""

    workload: Workload
    step: TrainStep
    runner: StepRunner
    accumulation: int

    def weights(self) -> dict[str, Tensor]:
        """Return float64 copies of the trained weights, or of their fp32 masters where they are in half precision."""
        torch.cuda.synchronize()
        masters: dict[str, Tensor] = {}
        for updater in self.step.updaters:
            masters |= updater.state_dict().get("masters", {})
        # The copy is explicit: double() of float64 would be the weight itself.
        frozen = self.workload.frozen()
        named = {name: tensor for name, tensor in self.workload.model.named_parameters() if name not in frozen}
        return {name: masters.get(name, weight).detach().cpu().clone().double() for name, weight in named.items()}

    def state(self) -> dict[str, Tensor]:
        """Return all persistent tensors, not copies: weights, buffers, masters, momentum and step counters."""
        tensors = dict(self.workload.named_state())
        for number, updater in enumerate(self.step.updaters):
            tensors |= {f"{number}.{name}": tensor for name, tensor in updater.named_state()}
        return tensors

    @torch.no_grad()
    def take_over(self, other: Built) -> None:
        """Copy the state of ``other`` into the tensors of this one, whose addresses a graph has captured."""
        torch.cuda.synchronize()
        theirs = other.state()
        for name, tensor in self.state().items():
            tensor.copy_(theirs[name])
        torch.cuda.synchronize()

    def run(self, batches: list[Batch]) -> StepResult:
        """Run one step and wait for it."""
        with self.runner.on_stream():
            result = self.runner(batches)
        torch.cuda.synchronize()
        return self.step.read(result.names, result.values.tolist())

    def updates(self) -> int:
        """Return the number of updates that the optimizer has applied."""
        return int(self.step.updaters[0].state_dict()["step"])

    def batches(self, seed: int, key: Hashable | None = None) -> list[Batch]:
        """Return random micro-batches of one step, in the shapes of an example. ``key`` replaces their batch key."""
        generator = torch.Generator().manual_seed(seed)
        examples = list(self.workload.example_batches())
        example = examples[seed % len(examples)]
        return [
            Batch(
                {name: _drawn_like(name, tensor.cpu(), generator).cuda() for name, tensor in example.tensors.items()},
                example.samples,
                example.key if key is None else key,
            )
            for _ in range(self.accumulation)
        ]


def _drawn_like(name: str, example: Tensor, generator: torch.Generator) -> Tensor:
    """Return noise where ``example`` is not zero (zeros may be padding), or integers drawn from those of the example.

    Sequences in a buffer (``starts``, ``lengths``) only get shorter; otherwise they could overlap or exceed the buffer.
    Some tensors stay: weights of a loss, because fp16 gradients would overflow; nodes and edges of a graph, because
    kernels use them as indices; and boxes, because they need an area.
    """
    if name in ("weight", *GEOMETRY, *STRUCTURES) or name in BLOCK:
        return example.clone()
    if example.dtype.is_floating_point:
        noise = torch.randn(example.shape, generator=generator).to(example.dtype)
        there = example.float() != 0  # not all operations know FP8
        return torch.empty_like(example).copy_(torch.where(there, noise.float(), 0.0))
    if example.ndim == 0:  # a seed
        return torch.randint(1 << 40, (), generator=generator, dtype=example.dtype)
    chosen = torch.randint(example.numel(), example.shape, generator=generator)
    drawn = example.flatten()[chosen]
    if name == "starts":
        return example.clone()
    return torch.minimum(example, drawn.clamp(min=1)) if name == "lengths" else drawn


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute every sum in a fixed order, without TF32."""
    pool = F.max_pool2d

    def pool_in_order(x_NCHW: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Only the backward pass for channels_last adds atomically.
        y_NCHW: Tensor = pool(x_NCHW.contiguous(), *args, **kwargs)
        return y_NCHW.contiguous(memory_format=torch.channels_last)

    monkeypatch.setattr(F, "max_pool2d", pool_in_order)
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    # PyTorch warns of max pooling in any memory format.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def build(
    precision: str,
    *overrides: str,
    workload: str = "resnet",
    capture: bool = True,
    warm_up: bool = True,
) -> Built:
    """Return a workload, always with the same initial weights."""
    run, _ = cli.load(compose([f"benchmark={workload}", "scale=test", f"precision={precision}", *overrides]))
    layout = Layout(run.layout, device=torch.device("cuda", 0), seed=7)
    built = cli.workload_class(workload)(run, layout)
    step = built.build_step()
    runner = StepRunner(step, built.model, run.grad_accumulation_steps, capture)
    if warm_up:
        runner.warm_up(built.example_batches())
    return Built(built, step, runner, run.grad_accumulation_steps)


def change(after: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: after[name] - before[name] for name in after}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference of two changes of all weights, relative to that of the expected change."""
    off = torch.stack([(found[name] - expected[name]).norm() for name in expected]).norm()
    return float(off / torch.stack([change.norm() for change in expected.values()]).norm())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("workload", "overrides"), IMPLEMENTATIONS)
def test_every_captured_iteration_changes_the_weights_as_the_eager_one(workload, overrides, precision):
    eager, captured = (build(precision, *overrides, workload=workload, capture=capture) for capture in (False, True))
    start = before = eager.weights()
    found = captured.weights()
    assert all(torch.equal(found[name], weight) for name, weight in before.items()), "they start alike"
    for seed in range(STEPS):
        expected_result, result = eager.run(eager.batches(seed)), captured.run(captured.batches(seed))
        assert not expected_result.overflow
        assert result.overflow == expected_result.overflow
        assert result.metrics == pytest.approx(expected_result.metrics, rel=ROUNDING)
        after = eager.weights()
        expected = change(after, before)
        assert difference(change(captured.weights(), before), expected) <= ROUNDING, f"iteration {seed + 1}"
        assert captured.updates() == eager.updates() == seed + 1
        # From equal states: batch norm over a few samples multiplies rounding a hundredfold in an iteration.
        captured.take_over(eager)
        before = after
    assert all(moved.norm() > 0 for moved in change(before, start).values())
    assert captured.runner.uncaptured == {}


def test_resnet_runs_on_triton_by_default():
    assert build("fp32", warm_up=False).workload.implementations()["batch_norm"] == "triton"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("workload", "overrides"), IMPLEMENTATIONS)
def test_warm_up_and_capture_leave_no_trace(workload, overrides, precision):
    built = build(precision, *overrides, workload=workload, warm_up=False)
    examples = list(built.workload.example_batches())
    before = digest(built)
    built.runner.warm_up(examples)
    assert digest(built) == before
    with built.runner.on_stream():
        built.runner([examples[0]] * built.accumulation)
    assert digest(built) != before, "the same iteration without the skip flag must change the state"


def digest(built: Built) -> str:
    """Return one hash over weights, buffers, the optimizer's state, the skip flag and the random states."""
    torch.cuda.synchronize()
    tensors = built.state()
    tensors |= {"skip": built.step.skip, "host": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}
    made = hashlib.sha256()
    for name in sorted(tensors):
        made.update(name.encode())
        made.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("workload", "overrides"), IMPLEMENTATIONS)
def test_the_host_waits_for_nothing_from_the_reader_to_the_report(workload, overrides, precision, data_of):
    built = build(precision, *overrides, workload=workload)
    built.workload.warm_up_reader()
    samples = STEPS * built.workload.cfg.global_batch
    first, second = (Block(index, 1, 0, index * samples, samples) for index in range(2))
    side, pending, finished = side_stream(torch.device("cuda", 0)), StepsInFlight(built.step), []
    with contextlib.closing(built.workload.open_data(data_of(workload))) as source:
        built.runner.warm_up(built.workload.examples_of_data())
        for _ in source.batches(first):  # threads that bring 3D U-Net's volumes to the device do wait for it
            pass
        torch.cuda.synchronize()
        with built.runner.on_stream(), waiting_is_an_error():
            prefetcher = Prefetcher(built.workload.prepare, built.accumulation, side)
            prefetcher.begin(source.batches(second))
            number = 0
            while (micro_batches := prefetcher.take()) is not None:
                while len(pending) >= AHEAD:  # through the event of the oldest alone
                    finished.append(pending.pop())
                number += 1
                result = built.runner(micro_batches)
                pending.push(number, sum(batch.samples for batch in micro_batches), result, 0.0)
                prefetcher.consumed()
            while len(pending):
                finished.append(pending.pop())
        torch.cuda.synchronize()
    assert [done.step for done in finished] == list(range(1, STEPS + 1))
    assert not any(done.result.overflow for done in finished)
    assert all(math.isfinite(value) for done in finished for value in done.result.metrics.values())
    assert built.updates() == STEPS
    assert built.runner.uncaptured == {}


def test_waiting_would_be_noticed():
    with pytest.raises(RuntimeError), waiting_is_an_error():
        torch.ones((), device="cuda").item()


def test_a_key_that_warm_up_did_not_meet_runs_eagerly_and_is_counted():
    built, known = build("fp32"), build("fp32")
    with built.runner.on_stream():
        built.runner(built.batches(seed=0))
        built.runner(built.batches(seed=1, key="new"))
        built.runner(built.batches(seed=2, key="new"))
    with known.runner.on_stream():
        for seed in range(3):
            known.runner(known.batches(seed))
    assert built.runner.uncaptured == {("new",) * built.accumulation: 2}
    assert known.runner.uncaptured == {}
    assert built.updates() == known.updates() == 3
    found, expected = built.weights(), known.weights()
    assert difference(found, expected) < 1e-3


def test_an_operation_that_cannot_be_captured_is_named(data_of, tmp_path):
    # In a process of its own: a capture that failed leaves CUDA in a state that later tests would meet.
    command = [sys.executable, "-m", "tests.gpu.uncapturable_training"]
    arguments = training(data_of("resnet"), tmp_path / "out", benchmark="resnet")
    arguments.remove("device=cpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    with started([*arguments, "device=cuda"], command=command, CUDA_VISIBLE_DEVICES=visible) as process:
        done = finish(process, timeout=120)
    message = the_message(done)
    assert done.code == 6, message
    assert "_local_scalar_dense" in message
    assert "tests/gpu/uncapturable_training.py" in message
    assert "losses.total.item()" in message
    assert "cuda_graphs=false" in message
    assert "run_start" not in (tmp_path / "out" / "mlperf.log").read_text()
