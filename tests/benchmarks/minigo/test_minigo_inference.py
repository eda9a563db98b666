"""The inference server: answers, order, batches, hand-over of models, and processes that end."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.minigo import inference
from benchmarks.minigo.channel import InferenceClient, Ring, ServerEnd, WorkerEnd
from benchmarks.minigo.inference import SIZES, BatchedInference, InferenceServer, sizes_up_to
from benchmarks.minigo.model import InferenceNetwork, MiniGo
from benchmarks.minigo.models import Models
from common.errors import CheckpointError, RankFailure
from tests.benchmarks.minigo.sizes import SMALL, packed, random_planes
from tests.forked import FORKS

RING = Ring(board=5, capacity=16)


def weights(seed: int) -> dict[str, torch.Tensor]:
    return MiniGo(SMALL, generator=torch.Generator().manual_seed(seed)).state_dict()


def bits(count: int, seed: int = 0) -> np.ndarray:
    return packed(random_planes(count, 5, seed)).numpy()


def expected(generation: int, leaves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the network's answers, computed for one position after the other."""
    network = InferenceNetwork(SMALL)
    network.load(weights(generation))
    rows = [network(torch.from_numpy(row)[None]) for row in leaves]
    return torch.cat([row[0] for row in rows]).numpy(), torch.cat([row[1] for row in rows]).numpy()


def assert_answers(found: tuple[np.ndarray, np.ndarray], generation: int, leaves: np.ndarray) -> None:
    for ours, theirs in zip(found, expected(generation, leaves), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture
def models(tmp_path: Path) -> Models:
    models = Models(tmp_path / "models")
    models.publish(0, weights(0))
    return models


@pytest.fixture
def server(models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[InferenceServer]:
    """Return a server that looks for models in every step."""
    monkeypatch.setattr(inference, "MODEL_SECONDS", 0.0)
    server = InferenceServer(BatchedInference(InferenceNetwork(SMALL), (8, 32)), models, enough=8)
    yield server
    server.close()


def connected(server: InferenceServer, worker: int = 0) -> InferenceClient:
    channel = ServerEnd(RING, worker)
    server.attach(channel)
    return InferenceClient(channel.worker_end)


def test_a_request_is_answered_by_the_network(server):
    client, leaves = connected(server), bits(5)
    client.submit(leaves)
    for _ in range(2):
        server.step(0)
    assert_answers(client.take(), 0, leaves)
    assert client.generation == 0


def test_requests_of_several_workers_are_one_batch_and_answers_are_not_mixed(server):
    clients = [connected(server, worker) for worker in range(3)]
    for number, client in enumerate(clients):
        client.submit(bits(4 + number, number))
    for _ in range(2):
        server.step(0)
    for number, client in enumerate(clients):
        assert_answers(client.take(), 0, bits(4 + number, number))
    assert (server.counts.batches, server.counts.positions) == (1, 15)


def test_two_requests_of_a_worker_are_in_flight_and_are_answered_in_order(server):
    client = connected(server)
    for number in range(6):
        client.submit(bits(3, 2 * number))
        client.submit(bits(2, 2 * number + 1))
        for _ in range(4):
            server.step(0)
        assert_answers(client.take(), 0, bits(3, 2 * number))
        assert_answers(client.take(), 0, bits(2, 2 * number + 1))


def test_a_batch_has_whole_requests_and_is_not_larger_than_the_largest(server):
    clients = [connected(server, worker) for worker in range(3)]
    for client in clients:
        client.submit(bits(14))
    server.step(0)
    assert (server.counts.batches, server.counts.positions) == (2, 42)
    for _ in range(2):
        server.step(0)
    for client in clients:
        assert_answers(client.take(), 0, bits(14))


def test_few_waiting_leaves_do_not_start_a_second_batch(server):
    first, second, third = (connected(server, worker) for worker in range(3))
    first.submit(bits(3))
    server.step(0)
    assert server.counts.batches == 1
    second.submit(bits(4))
    third.submit(bits(3))
    server.step(0)  # the first batch ends before the 7 leaves start
    assert server.counts.batches == 2
    assert_answers(first.take(), 0, bits(3))


@pytest.mark.parametrize("count", [0, 17])
def test_a_request_must_fit_into_its_slot(server, count):
    client = connected(server)
    with pytest.raises(ValueError, match="leaves"):
        client.submit(bits(count) if count else bits(1)[:0])


def test_a_third_request_in_flight_is_refused(server):
    client = connected(server)
    client.submit(bits(1))
    client.submit(bits(1))
    with pytest.raises(ValueError, match="2 requests in flight"):
        client.submit(bits(1))


def test_requests_larger_than_a_batch_are_refused(models):
    server = InferenceServer(BatchedInference(InferenceNetwork(SMALL), (8,)), models)
    channel = ServerEnd(RING, 0)
    with pytest.raises(ValueError, match="requests of 16 leaves"):
        server.attach(channel)
    channel.close()


def test_a_new_model_is_used_from_the_next_batch_on(server, models):
    client, leaves = connected(server), bits(5)
    client.submit(leaves)
    server.step(0)  # launched with generation 0
    models.publish(1, weights(1))
    server.step(0)
    client.submit(leaves)
    for _ in range(2):
        server.step(0)
    assert_answers(client.take(), 0, leaves)
    assert client.generation == 0
    assert_answers(client.take(), 1, leaves)
    assert client.generation == server.generation == 1


def test_a_model_that_is_being_written_is_not_used(server, models):
    models.path(1).with_name(f"{models.path(1).name}.partial").write_bytes(b"begun")
    server.step(0)
    server.step(0)
    assert server.generation == models.newest() == 0


def test_without_a_model_there_is_no_server(tmp_path):
    with pytest.raises(CheckpointError, match="no model"):
        InferenceServer(BatchedInference(InferenceNetwork(SMALL), (8,)), Models(tmp_path))


def test_a_damaged_model_is_one_clear_error(server, models):
    models.path(1).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"000001\.safetensors"):
        server.step(0)


def test_a_model_on_a_full_disk_is_one_clear_error(models, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("benchmarks.minigo.models.write_tensors", full)
    with pytest.raises(CheckpointError, match=r"000001\.safetensors.*No space left.*free some space"):
        models.publish(1, weights(1))
    assert models.newest() == 0


def test_the_server_notices_that_a_worker_has_ended_and_serves_the_others(server):
    leaving, staying = connected(server, 4), connected(server, 5)
    leaving.submit(bits(2))
    staying.submit(bits(3))
    server.step(0)
    leaving.close()
    for _ in range(2):
        server.step(0)
    assert server.ended == [4]
    assert_answers(staying.take(), 0, bits(3))
    another = connected(server, 4)
    another.submit(bits(6))
    for _ in range(2):
        server.step(0)
    assert_answers(another.take(), 0, bits(6))


def test_a_worker_notices_that_the_server_has_ended(models):
    server = InferenceServer(BatchedInference(InferenceNetwork(SMALL), (32,)), models)
    client = connected(server)
    client.submit(bits(2))
    server.close()
    with pytest.raises(RankFailure, match="server"):
        client.take()


def test_a_message_of_another_form_is_one_clear_error(server):
    channel = ServerEnd(RING, 3)
    server.attach(channel)
    channel.worker_end.connection.send_bytes(b"x")
    with pytest.raises(RankFailure, match="self-play worker 3"):
        server.step(0)


def _ask(end: WorkerEnd, requests: int) -> None:
    """Send requests with two in flight, and end with code 0 if every answer is the network's."""
    client = InferenceClient(end)
    for number in range(requests + 1):
        if number < requests:
            client.submit(bits(1 + number % 16, number))
        if number:
            assert_answers(client.take(), 0, bits(1 + (number - 1) % 16, number - 1))
    client.close()


def _submit_and_stop(end: WorkerEnd) -> None:
    client = InferenceClient(end)
    client.submit(bits(2))
    os.kill(os.getpid(), signal.SIGKILL)


def started(server: InferenceServer, worker: int, target, *arguments) -> multiprocessing.process.BaseProcess:
    channel = ServerEnd(RING, worker)
    process = FORKS.Process(target=target, args=(channel.worker_end, *arguments))
    process.start()
    channel.started()
    server.attach(channel)
    return process


def test_processes_get_the_answers_to_their_own_requests(server):
    workers = [started(server, worker, _ask, 12) for worker in range(3)]
    while len(server.ended) < 3:
        server.step(10.0)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert server.counts.positions == 3 * sum(range(1, 13))


def test_a_killed_process_is_noticed(server):
    process = started(server, 7, _submit_and_stop)
    while not server.ended:
        server.step(10.0)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert server.ended == [7]


def test_the_server_sleeps_while_it_waits(server, monkeypatch):
    """One call of the system waits for the whole time; nothing polls."""
    connected(server)
    waits: list[float] = []
    monkeypatch.setattr(server._channels, "select", lambda seconds: waits.append(seconds) or [])
    server.step(60.0)
    assert waits == [60.0]


def test_sizes_of_graphs_end_with_the_largest_batch():
    assert sizes_up_to(16) == [16]
    assert sizes_up_to(128) == [32, 64, 128]
    assert sizes_up_to(300) == [32, 64, 128, 256, 300]
    assert sizes_up_to(SIZES[-1]) == list(SIZES)


def test_a_batch_in_one_call_equals_the_network():
    batched = BatchedInference(InferenceNetwork(SMALL), (32,))
    batched.load(weights(3))
    assert_answers(batched(bits(20)), 3, bits(20))
