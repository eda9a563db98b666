"""Processes that play games: their files, generations, and what happens if one dies or cannot write."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

from benchmarks.minigo import channel, inference, workers
from benchmarks.minigo.cache import HITS, make_cache
from benchmarks.minigo.channel import ServerEnd
from benchmarks.minigo.inference import BatchedInference, InferenceServer
from benchmarks.minigo.model import InferenceNetwork, MiniGo
from benchmarks.minigo.models import Models
from benchmarks.minigo.records import Games, generation_folder
from benchmarks.minigo.run_folder import RunFolder
from benchmarks.minigo.selfplay import FinishedGame
from benchmarks.minigo.workers import RESTARTS, GameFiles, SelfPlayTask, SelfPlayWorkers, ShardWriter
from common.errors import ConfigError, DataError, DeviceError, RankFailure
from tests.benchmarks.minigo.finished_games import game
from tests.benchmarks.minigo.sizes import SMALL, search_settings
from tests.forked import FORKS

SETTINGS = search_settings(readouts=8, fast_readouts=4, virtual_losses=2, noise_alpha=0.3)


def task(folder: Path) -> SelfPlayTask:
    return SelfPlayTask(SETTINGS, concurrent=4, shard_games=2, folder=folder, name="rank0", seed=3)


@pytest.fixture
def models(tmp_path: Path) -> Models:
    models = Models(tmp_path / "models")
    models.publish(0, MiniGo(SMALL, generator=torch.Generator().manual_seed(0)).state_dict())
    return models


@pytest.fixture
def players(
    tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch, forked_pools: None
) -> Iterator[SelfPlayWorkers]:
    monkeypatch.setattr(inference, "MODEL_SECONDS", 0.0)
    server = InferenceServer(BatchedInference(InferenceNetwork(SMALL), (16,)), models, enough=8)
    players = SelfPlayWorkers(server, 2, task(tmp_path / "games"), token="start1")
    yield players
    players.close()


def play_until(players: SelfPlayWorkers, games: Games, generation: int, count: int) -> None:
    while games.count(generation) < count:
        players.play(0.05)


def play_on(players: SelfPlayWorkers) -> NoReturn:
    while True:
        players.play(1.0)


def test_two_workers_play_different_games_with_the_newest_model(tmp_path, models, players):
    games = Games(tmp_path / "games", 5)
    play_until(players, games, 0, 8)
    models.publish(1, MiniGo(SMALL, generator=torch.Generator().manual_seed(1)).state_dict())
    play_until(players, games, 1, 4)
    shards = games.of(0)
    assert {shard.path.name.split("-")[2] for shard in shards} == {"000", "001"}
    for shard in shards:
        np.testing.assert_allclose(shard.pi_RA.sum(1), 1.0, rtol=1e-5)
        assert set(np.abs(shard.outcome_R)) == {1}
    firsts = [shard.pi_RA[shard.first_G[number]] for shard in shards for number in range(shard.games)]
    assert len({first.tobytes() for first in firsts}) > len(firsts) / 2


def test_a_new_model_empties_the_cache_of_a_worker(tmp_path, models, monkeypatch):
    """The worker's main function runs in this process. The model changes, and then the server ends."""
    cleared, made = [], []
    monkeypatch.setattr(workers, "clear", lambda cache: cleared.append(int(cache.counts[HITS])))
    monkeypatch.setattr(workers, "make_cache", lambda *size: made.append(size) or make_cache(*size))
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    monkeypatch.setattr(inference, "MODEL_SECONDS", 0.0)
    server = InferenceServer(BatchedInference(InferenceNetwork(SMALL), (16,)), models, enough=8)
    given = dataclasses.replace(task(tmp_path / "games"), cache_bytes=1 << 20)
    channel = ServerEnd(given.ring, 0)
    server.attach(channel)
    take = workers.InferenceClient.take
    calls = itertools.count()

    def answered(client):
        number = next(calls)
        if number == 100:
            models.publish(1, MiniGo(SMALL, generator=torch.Generator().manual_seed(1)).state_dict())
        if number == 200:
            raise DataError("enough")
        while not client._connection.poll():
            server.step(0)
        return take(client)

    monkeypatch.setattr(workers.InferenceClient, "take", answered)
    workers.play(channel.worker_end, given)
    assert made == [(5, 1 << 20)]
    assert len(cleared) == 2, "for the first model and for the second"
    assert 0 == cleared[0] < cleared[1] <= server.counts.hits
    server.close()


def test_measures_are_those_since_the_last_call(tmp_path, players):
    games = Games(tmp_path / "games", 5)
    while players._server.counts.games < 8:  # a worker reports a game with the request after it
        players.play(0.05)
    first, counts = players.measures(), dataclasses.replace(players._server.counts)
    assert first["games"] == counts.games
    assert first["leaves_per_second"] == pytest.approx(counts.positions / counts.seconds)
    assert first["search_us_per_leaf"] == pytest.approx(1e6 * counts.search_seconds / counts.positions)
    assert first["batch_fill"] == 1.0, "a CPU pads no batch"
    assert 0 < first["search_share"] < 1
    assert 0 < first["inference_share"] < 1
    assert players.measures() == {}
    play_until(players, games, 0, games.count(0) + 4)
    second = players.measures()
    assert second["seconds"] == pytest.approx(players._server.counts.seconds - counts.seconds)
    assert second["games"] == players._server.counts.games - counts.games


def test_a_killed_worker_is_replaced(tmp_path, players, capfd):
    games = Games(tmp_path / "games", 5)
    play_until(players, games, 0, 4)
    os.kill(players.pids[0], signal.SIGKILL)
    while not any("-000-1-" in shard.path.name for shard in games.of(0)):
        players.play(0.05)
    assert "self-play worker 0 ended with exit code -9, and is replaced" in capfd.readouterr().err


def test_play_says_whether_every_worker_works(tmp_path, players, capfd, monkeypatch):
    monkeypatch.setattr(workers, "SILENT_SECONDS", 0.4)
    while not players.play(0.05):
        pass
    os.kill(players.pids[1], signal.SIGSTOP)
    try:
        while players.play(0.2):  # the last request of the stopped worker may still be on its way
            pass
        assert not players.play(0.5)
        named = f"self-play workers that sent nothing for 0 s: 1 (process {players.pids[1]})"
        assert capfd.readouterr().err.count(named) == 1
    finally:
        os.kill(players.pids[1], signal.SIGCONT)
    while not players.play(0.05):
        pass


def test_too_little_shared_memory_is_one_clear_error(tmp_path, models, monkeypatch):
    """As with the 64 MB of a docker container by default."""
    monkeypatch.setattr(channel.os, "posix_fallocate", refuse_space)
    before = set(Path(channel.MEMORY).iterdir())
    server = InferenceServer(BatchedInference(InferenceNetwork(SMALL), (16,)), models, enough=8)
    with pytest.raises(DeviceError, match=r"/dev/shm has no .* MB are free.*docker run --shm-size"):
        SelfPlayWorkers(server, 2, task(tmp_path / "games"), "start1")
    assert not set(Path(channel.MEMORY).iterdir()) - before


def refuse_space(descriptor: int, offset: int, size: int) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_shared_memory_of_a_channel_is_reserved():
    memory = channel.reserved(1 << 20)
    assert os.stat(f"{channel.MEMORY}/{memory.name}").st_blocks * 512 == 1 << 20
    memory.close()
    memory.unlink()


def test_a_share_of_the_games_is_set_aside_for_validation(tmp_path):
    given = dataclasses.replace(task(tmp_path / "games"), settings=dataclasses.replace(SETTINGS, holdout=0.25))
    files = GameFiles(given)
    for number in range(60):
        files.add([finished(number)], 0)
    files.write()
    used, held_out = (Games(folder, 5) for folder in (tmp_path / "games", tmp_path / "holdout"))
    numbers = [int(shard.bits_RK[first, 0]) for games in (used, held_out) for shard in games.of(0)
               for first in shard.first_G[:-1]]  # fmt: skip
    assert sorted(numbers) == list(range(60))
    assert 5 <= held_out.count(0) <= 25
    RunFolder(tmp_path)._keep(-1)
    assert Games(tmp_path / "games", 5).count(0) == 0
    assert not (tmp_path / "holdout" / "000000").exists()


def test_without_a_share_no_game_is_set_aside(tmp_path):
    files = GameFiles(task(tmp_path / "games"))
    files.add([finished(number) for number in range(20)], 0)
    files.write()
    assert Games(tmp_path / "games", 5).count(0) == 20
    assert not (tmp_path / "holdout").exists()


class Started:
    """A process that ends at once."""

    def start(self) -> None: ...

    def join(self) -> None: ...


def test_two_starts_have_other_names_and_seeds(tmp_path, models, monkeypatch, forked_pools):
    tasks: list[SelfPlayTask] = []
    for token in ("start1", "start2"):
        server = InferenceServer(BatchedInference(InferenceNetwork(SMALL), (16,)), models, enough=8)
        monkeypatch.setattr(FORKS, "Process", lambda target, args, daemon: tasks.append(args[1]) or Started())
        SelfPlayWorkers(server, 2, task(tmp_path / "games"), token).close()
    assert len({task.name for task in tasks}) == len({task.seed for task in tasks}) == 4


def test_a_worker_that_always_dies_ends_the_run(players):
    for number in itertools.count():
        os.kill(players.pids[1], signal.SIGKILL)
        if number == RESTARTS:
            break
        before = players.pids[1]
        while players.pids[1] == before:
            players.play(0.05)
    with pytest.raises(RankFailure, match=f"self-play worker 1 has ended {RESTARTS + 1} times, with exit code -9"):
        play_on(players)


def test_a_worker_that_cannot_write_its_games_is_one_clear_error(tmp_path, players):
    (tmp_path / "games").write_text("this is no folder")
    with pytest.raises(DataError, match=r"games/000000/rank0-.*cannot be written"):
        play_on(players)


def test_a_worker_without_numba_is_one_clear_error(tmp_path, monkeypatch):
    """The worker's main function runs in this process, where SelfPlay can be replaced."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ConfigError("search needs numba")

    monkeypatch.setattr(workers, "SelfPlay", refuse)
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    end = ServerEnd(task(tmp_path).ring, 0)
    workers.play(end.worker_end, task(tmp_path))
    with pytest.raises(ConfigError, match="search needs numba"):
        end.receive()
    end.close()


def test_a_worker_whose_server_has_ended_before_its_start_ends_silently(tmp_path, monkeypatch, capfd):
    class Ended(Exception):
        """Replaces the end of the process."""

    def ended(code: int) -> NoReturn:
        raise Ended(code)

    monkeypatch.setattr(workers.os, "_exit", ended)
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    channel = ServerEnd(task(tmp_path).ring, 0)
    channel.close()
    with pytest.raises(Ended, match="0"):
        workers.play(channel.worker_end, task(tmp_path))
    assert capfd.readouterr().err == ""


def finished(number: int) -> FinishedGame:
    made = game(3, number)
    return FinishedGame(number, made.bits, made.pi, made.outcome, 9, False, 50)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def counts(folder: Path) -> list[list[int]]:
    """Return the numbers of games of each file, for each of two generations."""
    games = Games(folder, 5)
    return [[shard.games for shard in games.of(generation)] for generation in range(2)]


def test_a_file_is_written_when_it_is_full(tmp_path):
    clock = Clock()
    writer = ShardWriter(task(tmp_path), clock)
    writer.add([], 0)
    clock.seconds += 100
    writer.add([finished(1)], 0)
    assert counts(tmp_path) == [[], []]
    writer.add([finished(2)], 0)
    assert counts(tmp_path) == [[2], []]
    names = [path.name for path in sorted(generation_folder(tmp_path, 0).iterdir())]
    assert names == ["rank0-000000.safetensors"]


def test_a_finished_game_waits_at_most_a_tenth_of_the_time_of_its_model(tmp_path):
    clock = Clock()
    writer = ShardWriter(task(tmp_path), clock)
    writer.add([], 0)
    clock.seconds += 100
    writer.add([finished(1)], 0)
    clock.seconds += 11
    writer.add([], 0)
    assert counts(tmp_path) == [[], []]  # 11 of 111 seconds
    clock.seconds += 0.2
    writer.add([], 0)
    assert counts(tmp_path) == [[1], []]


def test_games_that_wait_while_the_model_changes_count_for_the_next_generation(tmp_path):
    clock = Clock()
    writer = ShardWriter(task(tmp_path), clock)
    writer.add([], 0)
    clock.seconds += 100
    writer.add([finished(1)], 0)
    writer.add([finished(2)], 1)
    assert counts(tmp_path) == [[], [2]]
    writer.add([finished(3)], 1)  # the model has just changed: nothing waits
    assert counts(tmp_path) == [[], [2, 1]]
