"""Test MiniGo on a GPU: the network against float64, captured inference, and several batches in flight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.minigo import inference
from benchmarks.minigo.channel import InferenceClient, Ring, ServerEnd
from benchmarks.minigo.features import FeatureBits
from benchmarks.minigo.inference import BatchedInference, InferenceServer
from benchmarks.minigo.model import InferenceNetwork, MiniGo, losses
from benchmarks.minigo.models import Models
from tests.benchmarks.minigo.sizes import LARGE, SMALL, packed, random_planes, trained
from tests.gpu.support import relative_error

pytestmark = pytest.mark.gpu

POSITIONS = 16


def gradients(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = MiniGo(LARGE, generator=torch.Generator().manual_seed(1), device=device, dtype=dtype)
    planes = FeatureBits(19, device).planes(packed(random_planes(POSITIONS, 19)).to(device), dtype)
    of_targets = torch.promote_types(dtype, torch.float32)
    pi = torch.full((POSITIONS, LARGE.moves), 1 / LARGE.moves, dtype=of_targets, device=device)
    cross_entropy, squared = losses(*model(planes), pi, torch.ones(POSITIONS, dtype=of_targets, device=device))
    (cross_entropy + 0.5 * squared).backward()
    return {name: tensor.grad.double().cpu() for name, tensor in model.named_parameters() if tensor.grad is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-2), (torch.bfloat16, 0.5)], ids=str)
def test_gradients_follow_float64(dtype: torch.dtype, tolerance: float) -> None:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected, found = gradients("cpu", torch.float64), gradients("cuda", dtype)
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) < tolerance, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_captured_inference_equals_eager_inference_and_follows_float64(dtype: torch.dtype) -> None:
    weights = trained(LARGE).eval().state_dict()
    bits = packed(random_planes(300, 19)).numpy()
    found = []
    for capture in (True, False):
        batched = BatchedInference(InferenceNetwork(LARGE, device="cuda", dtype=dtype), (256, 512), capture)
        batched.load(weights)
        assert batched.padded(300) == (512 if capture else 300)
        found.append([result.copy() for result in batched(bits)])
        batched.close()
    reference = InferenceNetwork(LARGE, dtype=torch.float64)
    reference.load(weights)
    policy, value = (result.numpy() for result in reference(torch.from_numpy(bits)))
    for ours in found:
        assert np.abs(ours[0] - policy).sum(1).max() < 0.2
        assert np.abs(ours[1] - value).max() < 0.1
    for captured, eager in zip(*found, strict=True):
        np.testing.assert_allclose(captured, eager, atol=2e-2)


DELAY = 200_000_000
"""GPU clock cycles, about 0.1 s: much longer than all other work of a test."""


def test_weights_are_loaded_after_the_work_that_computes_them_and_before_their_memory_is_reused() -> None:
    batched = BatchedInference(InferenceNetwork(SMALL, device="cuda", dtype=torch.float32), (32,))
    bits, network = packed(random_planes(20, 5)), InferenceNetwork(SMALL)
    network.load(trained(SMALL, torch.float32).state_dict())
    final = {name: tensor.cuda() for name, tensor in trained(SMALL, torch.float32).state_dict().items()}
    weights = {name: torch.full_like(tensor, 3) for name, tensor in final.items()}
    for delayed in (torch.cuda.current_stream(), batched._stream):  # the writes, then the reads
        torch.cuda.synchronize()
        with torch.cuda.stream(delayed):
            torch.cuda._sleep(DELAY)
        for name, tensor in weights.items():
            tensor.copy_(final[name])
        batched.load(weights)
        for tensor in weights.values():
            tensor.fill_(3)
        for ours, theirs in zip(batched(bits.numpy()), network(bits), strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-2, atol=1e-3)
    batched.close()


def test_answers_stay_with_their_requests_while_batches_are_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many requests of two workers, in batches of several sizes, while the model changes."""
    monkeypatch.setattr(inference, "MODEL_SECONDS", 0.0)
    models, networks, states = Models(tmp_path), [InferenceNetwork(SMALL) for _ in range(2)], []
    for generation, network in enumerate(networks):
        state = trained(SMALL, torch.float32).state_dict()
        states.append({name: tensor * (1 + generation) for name, tensor in state.items()})
        network.load(states[generation])
    models.publish(0, states[0])
    batched = BatchedInference(InferenceNetwork(SMALL, device="cuda"), (8, 16, 32))
    server = InferenceServer(batched, models, enough=8)
    clients = []
    for worker in range(2):
        channel = ServerEnd(Ring(5, 16), worker)
        server.attach(channel)
        clients.append(InferenceClient(channel.worker_end))
    generations = set()
    for turn in range(60):
        if turn == 30:
            models.publish(1, states[1])
        requests = [packed(random_planes(1 + (turn + number) % 16, 5, 4 * turn + number)) for number in range(4)]
        for number, bits in enumerate(requests):
            clients[number // 2].submit(bits.numpy())
        for _ in range(6):
            server.step(0)
        for number, bits in enumerate(requests):
            policy, value = clients[number // 2].take()
            generation = clients[number // 2].generation
            generations.add(generation)
            for ours, theirs in zip((policy, value), networks[generation](bits), strict=True):
                np.testing.assert_allclose(ours, theirs.numpy(), rtol=4e-2, atol=4e-3)  # rounded to fp16
    assert generations == {0, 1}
    server.close()
    batched.close()
