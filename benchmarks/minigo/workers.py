"""Self-play workers: processes that search on CPUs, get inference from a server, and write finished games."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.minigo.cache import HITS, clear, make_cache
from benchmarks.minigo.channel import SLOTS, InferenceClient, Ring, ServerEnd, WorkDone, WorkerEnd
from benchmarks.minigo.inference import InferenceServer
from benchmarks.minigo.records import SUFFIX, generation_folder, held_out_folder, write_games
from benchmarks.minigo.search import SearchSettings
from benchmarks.minigo.selfplay import FinishedGame, SelfPlay
from common.data.order import sample_generator
from common.errors import RankFailure, SuiteError

WAITING_SHARE = 0.1
"""Longest time that a finished game waits for its file, as a part of the time since the model has changed."""
SILENT_SECONDS = 30.0
"""Time after which a message names workers that have sent nothing. The heartbeat of the rank ends the run later."""
RESTARTS = 3
"""Largest number of times that a worker is replaced."""


@dataclass(frozen=True)
class SelfPlayTask:
    """Games that a worker plays, and how it plays and stores them.

    Attributes:
        settings: search and rules of the games.
        concurrent: games in each of the two groups that a worker alternates between: one searches while the network
            evaluates the leaves of the other.
        shard_games: games in a file.
        folder: folder of the games, with a folder for each generation.
        name: prefix of the names of this worker's files.
        seed: seed of this worker, which no other one has.
        cache_bytes: memory for answers of the network, of each worker; 0 for no cache.
    """

    settings: SearchSettings
    concurrent: int
    shard_games: int
    folder: Path
    name: str
    seed: int
    cache_bytes: int = 0

    @property
    def ring(self) -> Ring:
        """Sizes of the channel that the worker needs."""
        return Ring(self.settings.board, self.concurrent * self.settings.virtual_losses)


class ShardWriter:
    """Collects finished games, and writes them below the newest generation at that time.

    A file has ``shard_games`` games, or fewer: a game waits at most a tenth of the time that its model has played, so
    that training does not wait for games that have ended. Games that wait while the model changes count for the next
    generation, as do the games that are unfinished then.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, task: SelfPlayTask, clock: Callable[[], float] = time.monotonic) -> None:
        self._task, self._clock = task, clock
        self._games: list[FinishedGame] = []
        self._generation, self._shards = -1, 0
        self._began = self._oldest = clock()

    def add(self, games: list[FinishedGame], generation: int) -> None:
        """Add finished games. Call it also without games, so that games do not wait longer than they should.

        Args:
            generation: generation of the newest model.

        Raises:
            DataError: a file cannot be written.
        """
        now = self._clock()
        if generation != self._generation:
            self._generation, self._began = generation, now
        if games and not self._games:
            self._oldest = now
        self._games += games
        waited = now - self._oldest >= WAITING_SHARE * (now - self._began)
        if len(self._games) >= self._task.shard_games or waited:
            self.write()

    def write(self) -> None:
        """Write the games that wait.

        Raises:
            DataError: the file cannot be written.
        """
        if self._games:
            name = f"{self._task.name}-{self._shards:06d}{SUFFIX}"
            write_games(generation_folder(self._task.folder, self._generation) / name, self._games)
            self._games, self._shards = [], self._shards + 1


class GameFiles:
    """Writes finished games: those for training, and those that are set aside for validation."""

    def __init__(self, task: SelfPlayTask) -> None:
        self._task, self._training = task, ShardWriter(task)
        self._held_out = ShardWriter(replace(task, folder=held_out_folder(task.folder)))

    def add(self, games: list[FinishedGame], generation: int) -> None:
        """Add finished games to their files; see :meth:`ShardWriter.add`."""
        self._held_out.add([game for game in games if self._is_held_out(game)], generation)
        self._training.add([game for game in games if not self._is_held_out(game)], generation)

    def write(self) -> None:
        """Write the games that wait; see :meth:`ShardWriter.write`."""
        self._training.write()
        self._held_out.write()

    def _is_held_out(self, game: FinishedGame) -> bool:
        return bool(sample_generator(self._task.seed, game.number).random() < self._task.settings.holdout)


def play(end: WorkerEnd, task: SelfPlayTask) -> None:
    """Play games until the server ends. The main function of a worker's process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach all processes of a job, and its ranks decide
        signal.signal(number, signal.SIG_IGN)
    try:
        client = InferenceClient(end)
    except RankFailure:  # the server has ended while this process was starting
        os._exit(0)
    writer = GameFiles(task)
    try:
        cache = make_cache(task.settings.board, task.cache_bytes)
        groups = [
            SelfPlay(task.settings, task.concurrent, task.seed, first=first, stride=SLOTS, cache=cache)
            for first in range(SLOTS)
        ]
        for group in groups:
            client.submit(group.leaves())
        while True:
            for group in groups:
                before, hits = client.generation, cache.counts[HITS]
                policy_BA, value_B = client.take()
                began = time.perf_counter()
                if client.generation != before:
                    clear(cache)
                group.answer(policy_BA, value_B)
                finished = group.take_finished()
                writer.add(finished, client.generation)
                bits_BK = group.leaves()
                hits = int(cache.counts[HITS] - hits)
                client.submit(bits_BK, WorkDone(hits, len(finished), time.perf_counter() - began))
    except RankFailure:  # the server has ended, and reports why
        with contextlib.suppress(SuiteError):  # a resumed run uses the games
            writer.write()
        os._exit(0)
    except SuiteError as error:
        client.fail(error)


class SelfPlayWorkers:
    """The worker processes of one server. A worker that dies is replaced, and its unfinished games are played anew.

    Args:
        task: task of all workers. Each one gets its own name and seed from those of the task.
        token: letters and digits that no other start of a process has, a part of names and seeds: a resumed run plays
            other games and writes other files.
    """

    def __init__(self, server: InferenceServer, workers: int, task: SelfPlayTask, token: str) -> None:
        self._server, self._task, self._token = server, task, token
        self._measured = replace(server.counts)
        self._processes: list[BaseProcess] = []
        self._started = [0] * workers
        self._closed = self._named = False
        self._silence = 0.0
        # Before the exit handler of multiprocessing, which would wait for workers whose channels are open.
        atexit.register(self.close)
        for worker in range(workers):
            self._processes.append(self._start(worker))

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the workers."""
        return [process.pid for process in self._processes]

    def play(self, seconds: float) -> bool:
        """Play for ``seconds``, and replace workers that have ended.

        Return whether every worker has sent a request since the last return of True: none of them hangs.

        Raises:
            CheckpointError: a new model is damaged.
            RankFailure: a worker has ended too often.
            SuiteError: a worker has failed, and reports this error, for example that it cannot write its games.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._server.step(left)
            self._replace_ended()
        silent = sorted(set(range(len(self._processes))) - self._server.heard)
        if silent:
            self._silence += seconds  # the workers also wait while the device trains, between two calls
            if not self._named and self._silence >= SILENT_SECONDS:
                self._named = True
                named = ", ".join(f"{worker} (process {self._processes[worker].pid})" for worker in silent)
                print(f"self-play workers that sent nothing for {SILENT_SECONDS:.0f} s: {named}", file=sys.stderr)
            return False
        self._server.heard.clear()
        self._silence, self._named = 0.0, False
        return True

    def measures(self) -> dict[str, float | str]:
        """Return measures of self-play since the last call; see :mod:`benchmarks.minigo.measures`."""
        before, self._measured = self._measured, replace(self._server.counts)
        return self._measured.since(before).measures(len(self._processes))

    def _replace_ended(self) -> None:
        while self._server.ended:
            worker = self._server.ended.pop()
            self._processes[worker].join()
            code = self._processes[worker].exitcode
            if self._started[worker] > RESTARTS:
                raise RankFailure(f"self-play worker {worker} has ended {RESTARTS + 1} times, with exit code {code}")
            print(f"self-play worker {worker} ended with exit code {code}, and is replaced", file=sys.stderr)
            self._processes[worker] = self._start(worker)

    def close(self) -> None:
        """End all workers. Later calls do nothing."""
        atexit.unregister(self.close)
        if self._closed:
            return
        self._closed = True
        self._server.close()
        for process in self._processes:
            process.join()

    def _start(self, worker: int) -> BaseProcess:
        number = self._started[worker]
        self._started[worker] += 1
        start = int.from_bytes(hashlib.sha256(self._token.encode()).digest()[:8], "little")
        seed = int(sample_generator(self._task.seed, start, worker, number).integers(2**63))
        name = f"{self._task.name}-{self._token}-{worker:03d}-{number}"
        task = replace(self._task, name=name, seed=seed)
        channel = ServerEnd(task.ring, worker)
        target: Callable[[WorkerEnd, SelfPlayTask], None] = play
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=target, args=(channel.worker_end, task), daemon=True)
        self._server.attach(channel)  # refuses requests that are too large, before there is a process
        process.start()
        channel.started()
        return process
