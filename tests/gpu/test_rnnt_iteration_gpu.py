"""RNN-T's iteration on one GPU: captured as eager, nothing waits, and the rules' network at its size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.rnnt import example
from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.workload import SpeechRecognition
from common import cli
from common.config.composition import compose
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from common.step.graphs import StepRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDE = [f"benchmark.facts.{name}=128" for name in ("encoder_width", "prediction_width", "joint_width")]
"""A network of widths that fast kernels take."""
ROOM_FOR_UPDATES = 0.02
"""Difference between two runs of one iteration, whose sums have no fixed order, relative to what the iteration did."""


def built(*overrides: str, scale: str = "test") -> SpeechRecognition:
    run, _ = cli.load(compose(["benchmark=rnnt", f"scale={scale}", *overrides]))
    return SpeechRecognition(run, Layout(run.layout, device=torch.device("cuda", 0), seed=7))


def weights(workload: SpeechRecognition) -> dict[str, Tensor]:
    torch.cuda.synchronize()
    return {name: tensor.detach().float().clone() for name, tensor in workload.named_state()}


def batches(workload: SpeechRecognition, seed: int) -> list[Batch]:
    """Micro-batches of other noise and shorter utterances than the examples', one of each key and again."""
    found = []
    for number in range(workload.cfg.grad_accumulation_steps):
        examples = list(workload.example_batches())
        given = examples[number % len(examples)]
        generator = torch.Generator("cuda").manual_seed(seed + number)
        tensors = {name: tensor.clone() for name, tensor in given.tensors.items()}
        tensors["feature_lengths"] -= torch.arange(workload.cfg.micro_batch, device="cuda", dtype=torch.int32) * 2
        noise = torch.randn(tensors["features"].shape, generator=generator, device="cuda")
        frames = torch.arange(len(noise), device="cuda")[:, None] < tensors["feature_lengths"]
        tensors["features"] = (noise * frames[:, :, None]).to(workload.dtype)
        tensors["seed"].fill_(seed + number)
        found.append(Batch(tensors, given.samples, given.key))
    return found


def trained(capture: bool, overrides: list[str], steps: int = 3) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after a few iterations."""
    workload = built(*overrides)
    step = workload.build_step()
    runner = StepRunner(step, workload.model, workload.cfg.grad_accumulation_steps, capture=capture)
    runner.warm_up(workload.example_batches())
    before = weights(workload)
    with runner.on_stream():
        for number in range(steps):
            result = runner(batches(workload, 100 * number))
    assert torch.isfinite(result.values).all()
    after = weights(workload)
    assert runner.uncaptured == {}
    runner.close()
    return before, after


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_captured_iteration_does_what_an_eager_one_does(precision):
    overrides = [f"precision={precision}", *WIDE, "model.features=256"]
    before, eager = trained(False, overrides)
    again, captured = trained(True, overrides)
    assert all(torch.equal(before[name], again[name]) for name in before), "warm-up has left a trace"
    for name, start in before.items():
        moved = (eager[name] - start).norm()
        assert moved > 0, name
        assert (captured[name] - eager[name]).norm() <= ROOM_FOR_UPDATES * moved, name


def test_replays_differ_in_their_dropout():
    workload = built("precision=fp16", *WIDE)
    step = workload.build_step()
    runner = StepRunner(step, workload.model, workload.cfg.grad_accumulation_steps)
    runner.warm_up(workload.example_batches())
    losses = []
    step.skip.fill_(1)
    for seed in (1, 1, 2):
        given = batches(workload, 5)
        for batch in given:
            batch.tensors["seed"].fill_(seed)
        with runner.on_stream():
            result = runner(given)
        losses.append(float(result.values[2 + result.names.index("loss")]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert abs(losses[2] - losses[0]) > 1e-4 * losses[0]
    runner.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_nothing_in_an_iteration_waits_for_the_device(precision):
    workload = built(f"precision={precision}", *WIDE, "model.features=256")
    step = workload.build_step()
    runner = StepRunner(step, workload.model, workload.cfg.grad_accumulation_steps, capture=False)
    runner.warm_up(workload.example_batches())
    given = batches(workload, 9)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with runner.on_stream():
            runner(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_rules_network_starts_at_the_loss_of_equal_classes(precision):
    workload = built(
        f"precision={precision}",
        "model.examples=average",
        "reader.buckets=[[410,56]]",
        "micro_batch=16",
        scale="1xH200",
    )
    workload.model.eval()
    losses_B = workload.model.loss(next(iter(workload.example_batches())).tensors, None)
    assert float(losses_B.mean()) == pytest.approx(1680, rel=0.02)


def gradients(workload: SpeechRecognition, tensors: dict[str, Tensor], scale: float = 64.0) -> dict[str, Tensor]:
    """Of the mean loss, with dropout."""
    (workload.model.loss(tensors, None).mean() * scale).backward()
    return {name: parameter.grad.float() / scale for name, parameter in workload.model.named_parameters()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_of_the_rules_network_are_those_of_plain_operations_in_fp32(precision):
    common = ["reader.buckets=[[128,30]]", "micro_batch=8"]
    plain = [f"model.implementations.{name}=reference" for name in ("joint", "transducer_loss")]
    plain.append("model.implementations.lstm=library")
    exact = built("precision=fp32", *common, *plain, scale="1xH200")
    ours = built(f"precision={precision}", *common, scale="1xH200")
    ours.model.load_state_dict(exact.model.state_dict())
    exact.model.load_state_dict(ours.model.state_dict())  # the same rounded weights
    facts = fixed_facts(Facts, "rnnt")
    lengths = example.Lengths(np.array([128, 117, 96, 80, 61, 40, 17, 1]), np.array([30, 12, 25, 1, 30, 8, 3, 1]))
    device = torch.device("cuda", 0)
    tensors = example.batch(lengths, (128, 30), facts.features, 256, facts.blank, ours.dtype, device)
    wanted = gradients(exact, {**tensors, "features": tensors["features"].float()})
    for name, found in gradients(ours, tensors).items():
        error = (found - wanted[name]).norm() / wanted[name].norm()
        assert error < (0.1 if precision == "bf16" else 0.02), f"{name}: {error:.4f}"
