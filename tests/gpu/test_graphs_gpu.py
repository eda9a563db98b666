"""The captured iteration on a GPU: equal to the eager one, alive from replay to replay, and never waited for."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once

import pytest
import torch
from torch import Tensor

from common import cli, config
from common.data.prefetch import Prefetcher
from common.data.source import Batch, HostBatch
from common.distributed.layout import Layout
from common.graphs import StepRunner
from common.step import TrainStep
from common.workload import Workload
from tests.command_line import finish, started, the_message, training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 5


@dataclass
class Built:
    """ResNet's ``test`` recipe on the GPU, warmed up."""

    workload: Workload
    step: TrainStep
    runner: StepRunner
    accumulation: int

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights: the FP32 masters where the weights are half."""
        torch.cuda.synchronize()
        masters = self.step.updaters[0].state_dict().get("masters", {})
        return {name: masters.get(name, p).detach().double() for name, p in self.workload.model.named_parameters()}

    def updates(self) -> int:
        """Updates that the optimizer has applied."""
        return int(self.step.updaters[0].state_dict()["step"])

    def batches(self, seed: int, key: str | tuple[()] = ()) -> list[Batch]:
        """The micro-batches of one iteration, drawn from ``seed``."""
        return [
            Batch({name: tensor.cuda() for name, tensor in host.tensors.items()}, host.samples, key)
            for host in self.host_batches(seed)
        ]

    def host_batches(self, seed: int) -> list[HostBatch]:
        """The same in pinned host memory."""
        generator = torch.Generator().manual_seed(seed)
        example = next(iter(self.workload.example_batches()))
        made = []
        for position in range(self.accumulation):
            like = example.tensors["image"]
            image_NCHW = torch.randn(like.shape, generator=generator)
            image_NCHW[:, 3:] = 0
            image_NCHW = image_NCHW.to(like.dtype, memory_format=torch.channels_last)
            label_N = torch.randint(10, (len(like),), generator=generator)
            tensors = {"image": image_NCHW.pin_memory(), "label": label_N.pin_memory()}
            made.append(HostBatch(tensors, example.samples, position))
        return made


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Deterministic kernels where there are any, and no TF32."""
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True, warn_only=True)  # max pooling's backward pass adds atomically
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def build(precision: str, capture: bool = True, *overrides: str, warm_up: bool = True) -> Built:
    """ResNet, always with the same initial weights."""
    run, _ = config.load(cli.compose(["benchmark=resnet", "scale=test", f"precision={precision}", *overrides]))
    layout = Layout(run.layout, device=torch.device("cuda", 0), seed=7)
    workload = config.workload_class("resnet")(run, layout)
    step = workload.build_step()
    runner = StepRunner(step, workload.model, run.grad_accumulation_steps, capture)
    if warm_up:
        runner.warm_up(workload.example_batches())
    return Built(workload, step, runner, run.grad_accumulation_steps)


def change_in_training(precision: str, capture: bool) -> dict[str, Tensor]:
    """How five iterations change the weights."""
    built = build(precision, capture, "model.batch_norm=torch")
    before = built.weights()
    with built.runner.on_stream():
        for seed in range(STEPS):
            built.runner(built.batches(seed))
    after = built.weights()
    assert built.updates() == STEPS
    assert built.runner.uncaptured == {}
    return {name: after[name] - before[name] for name in after}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference of two changes of all weights, relative to that of the expected one."""
    off = torch.stack([(found[name] - expected[name]).norm() for name in expected]).norm()
    return float(off / torch.stack([change.norm() for change in expected.values()]).norm())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_iterations_change_the_weights_as_eager_ones(precision):
    eager = change_in_training(precision, capture=False)
    assert all(change.norm() > 0 for change in eager.values())
    # What is left of the eager step's own scatter (atomic additions) is measured, not guessed.
    scatter = difference(change_in_training(precision, capture=False), eager)
    assert scatter < 0.02, "the eager step itself is not repeatable enough to compare with"
    assert difference(change_in_training(precision, capture=True), eager) <= max(1e-6, 10 * scatter)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_successive_replays_advance(precision):
    built = build(precision)
    rates, states = [], [built.weights()]
    batches = built.batches(seed=0)
    for _ in range(3):
        with built.runner.on_stream():
            report = built.runner(batches)
        torch.cuda.synchronize()
        rates.append(built.step.read(report.tolist()).metrics["learning_rate"])
        states.append(built.weights())
    # Warm-up to 2.0 in one epoch of 96 samples in batches of 16: 6 steps, counted from 1.
    assert rates == pytest.approx([2 / 6, 4 / 6, 6 / 6], rel=1e-6)
    assert built.updates() == 3
    for before, after in itertools.pairwise(states):
        assert not torch.equal(before["fc.weight"], after["fc.weight"])


def test_a_replay_reads_the_batches_that_it_is_given():
    built, losses = build("fp32"), []
    with built.runner.on_stream():
        built.step.skip.fill_(1)  # the same weights for all
        for seed in (0, 1, 0):
            losses.append(built.runner(built.batches(seed)).clone())
    torch.cuda.synchronize()
    first, other, again = (built.step.read(report.tolist()).metrics["loss"] for report in losses)
    assert first == pytest.approx(again, rel=1e-5)
    assert abs(first - other) > 1e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_warm_up_and_capture_leave_no_trace(precision):
    built = build(precision, warm_up=False)
    examples = list(built.workload.example_batches())
    before = digest(built)
    built.runner.warm_up(examples)
    assert digest(built) == before
    with built.runner.on_stream():
        built.runner([examples[0]] * built.accumulation)
    assert digest(built) != before, "the same iteration without the skip flag must change the state"


def digest(built: Built) -> str:
    """One hash over weights, buffers, the optimizer's state, the skip flag and the random states."""
    torch.cuda.synchronize()
    tensors = dict(built.workload.named_state())
    for number, updater in enumerate(built.step.updaters):
        tensors |= {f"{number}.{name}": tensor for name, tensor in updater.named_state()}
    tensors |= {"skip": built.step.skip, "host": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}
    made = hashlib.sha256()
    for name in sorted(tensors):
        made.update(name.encode())
        made.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Within the block, what waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_host_waits_for_nothing_from_the_reader_to_the_update(precision):
    built = build(precision)
    batches = iter([host for seed in range(STEPS) for host in built.host_batches(seed)])
    launched = 0
    torch.cuda.synchronize()
    with built.runner.on_stream(), waiting_is_an_error():
        prefetcher = Prefetcher(batches, built.workload.prepare, built.accumulation, torch.device("cuda", 0))
        for _ in range(3):
            micro_batches = prefetcher.take()
            assert micro_batches is not None
            built.runner(micro_batches)
            prefetcher.consumed()
            launched += 1
    torch.cuda.synchronize()
    assert built.updates() == launched == 3
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
    assert built.runner.uncaptured == {"new": 2}
    assert known.runner.uncaptured == {}
    assert built.updates() == known.updates() == 3
    found, expected = built.weights(), known.weights()
    assert difference(found, expected) < 1e-3


def test_an_operation_that_cannot_be_captured_is_named(tmp_path):
    # In a process of its own: a capture that failed leaves CUDA in a state that later tests would meet.
    command = [sys.executable, "-m", "tests.gpu.uncapturable_training"]
    arguments = [a for a in training(tmp_path / "none", tmp_path / "out") if not a.startswith("device=")]
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
