"""Micro-batches of generations: when games are played, which examples a replica gets, and when models are saved."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.minigo.data import READ_AHEAD, SelfPlayParts, SelfPlaySource
from benchmarks.minigo.models import Models
from benchmarks.minigo.records import (
    CLOSED,
    Games,
    GenerationSample,
    Sampling,
    Shard,
    draw,
    generation_folder,
    write_games,
)
from common.data.batches import Block, GenerationSource
from common.data.order import MicroBatches
from common.distributed import shared_folder
from common.errors import DataError, Interrupted
from tests.benchmarks.minigo.finished_games import game

SAMPLING = Sampling(window=2, games=4, keep=0.5)
SEED = 5


class TwoGamesEachTime:
    """A player that finishes two games of 40 records whenever it may play."""

    def __init__(self, folder: Path, models: Models) -> None:
        self._folder, self._models, self.calls = folder, models, 0

    def play(self, seconds: float) -> bool:
        generation = self._models.newest()
        path = generation_folder(self._folder, generation) / f"{self.calls:04d}.safetensors"
        write_games(path, [game(40, 2 * self.calls), game(40, 2 * self.calls + 1)])
        self.calls += 1
        return True

    def measures(self) -> dict[str, float | str]:
        return {"games": 2.0 * self.calls}

    def close(self) -> None:
        self.calls = -1


def source_of(folder: Path, mine: MicroBatches) -> tuple[SelfPlaySource, TwoGamesEachTime, Models]:
    models = Models(folder / "models")
    if models.newest() is None:
        models.publish(0, {"w": torch.zeros(3)})
    player = TwoGamesEachTime(folder / "games", models)
    parts = SelfPlayParts(Games(folder / "games", 5), models, player, SAMPLING, first=0)
    return SelfPlaySource(parts, mine, SEED, False, 1000, 256, True), player, models


def block(index: int) -> Block:
    return Block(index, index + 1, 1, 0, 0)


def test_games_are_played_until_there_are_enough_and_then_whole_batches_follow(tmp_path):
    source, player, _ = source_of(tmp_path, MicroBatches(8))
    batches = list(source.batches(block(0)))
    assert player.calls == 2
    assert len(batches) == len(draw(Games(tmp_path / "games", 5), SAMPLING, SEED, 0)) // 8 > READ_AHEAD // 4
    assert [batch.position for batch in batches] == list(range(len(batches)))
    assert {batch.samples for batch in batches} == {8}
    assert isinstance(source, GenerationSource)


def test_batches_are_the_examples_in_their_order(tmp_path):
    source, _, _ = source_of(tmp_path, MicroBatches(2))
    batches = list(source.batches(block(0)))
    assert len(batches) > READ_AHEAD
    sample = draw(Games(tmp_path / "games", 5), SAMPLING, SEED, 0)
    expected = sample.read(np.arange(2 * len(batches)))
    for name, array in (
        ("bits", expected.bits_RK), ("pi", expected.pi_RA), ("outcome", expected.outcome_R),
        ("symmetry", expected.symmetry_R),
    ):  # fmt: skip
        np.testing.assert_array_equal(np.concatenate([batch.tensors[name].numpy() for batch in batches]), array)


def test_a_thread_reads_while_training_works(tmp_path, monkeypatch):
    """The second part is read though no batch of it has been taken."""
    threads, second, read = [], threading.Event(), GenerationSample.read

    def noted(sample, positions):
        threads.append(threading.current_thread())
        if len(threads) == 2:
            second.set()
        return read(sample, positions)

    monkeypatch.setattr(GenerationSample, "read", noted)
    source, _, _ = source_of(tmp_path, MicroBatches(2))
    batches = source.batches(block(0))
    next(batches)
    assert second.wait(30.0)
    assert len(list(batches)) >= READ_AHEAD
    assert threading.main_thread() not in threads


def test_replicas_share_the_global_batches_of_one_that_accumulates(tmp_path):
    alone, _, _ = source_of(tmp_path, MicroBatches(2, accumulation=4))
    whole = [batch.tensors["bits"].numpy() for batch in alone.batches(block(0))]
    for replica in range(2):
        source, player, _ = source_of(tmp_path, MicroBatches(2, accumulation=2, replicas=2, replica=replica))
        mine = [batch.tensors["bits"].numpy() for batch in source.batches(block(0))]
        assert player.calls == 0
        np.testing.assert_array_equal(np.stack(mine), np.stack(whole[replica::2]))


def test_reading_continues_at_a_position(tmp_path):
    source, _, _ = source_of(tmp_path, MicroBatches(2))
    whole = [batch.tensors["pi"].numpy() for batch in source.batches(block(0))]
    rest = list(source.batches(block(0), start=5))
    assert rest[0].position == 5
    np.testing.assert_array_equal(np.stack([batch.tensors["pi"].numpy() for batch in rest]), np.stack(whole[5:]))


def test_the_next_generation_is_played_by_the_saved_model_and_trained_with_the_window(tmp_path):
    source, player, models = source_of(tmp_path, MicroBatches(8))
    for number in range(3):
        list(source.batches(block(number)))
        assert source.games(block(number)) == [4] * min(number + 1, 2)
        source.trained(block(number), {"w": torch.full((3,), float(number))})
        assert models.newest() == number + 1
        saved = models.read(number + 1, torch.device("cpu"))
        torch.testing.assert_close(saved["w"], torch.full((3,), float(number)))
    assert player.calls == 6
    source.close()
    assert player.calls == -1


def test_every_shard_is_checked_once(tmp_path, monkeypatch):
    checked: list[Path] = []
    real = Shard.checked

    def noted(path: Path, board: int, remedy: str) -> Shard:
        checked.append(path)
        return real(path, board, remedy)

    monkeypatch.setattr(Shard, "checked", noted)
    source, player, _ = source_of(tmp_path, MicroBatches(8))
    for number in range(5):
        list(source.batches(block(number)))
        source.trained(block(number), {"w": torch.zeros(3)})
        source.games(block(number))
    assert len(checked) == len(set(checked)) == player.calls


def test_a_wait_for_games_reports_progress_only_while_all_workers_work(tmp_path, monkeypatch):
    source, player, _ = source_of(tmp_path, MicroBatches(8))
    works, progress = iter([True, False]), []
    play = player.play
    monkeypatch.setattr(player, "play", lambda seconds: play(seconds) and next(works))
    source.watch(lambda: progress.append(player.calls), lambda: False)
    list(source.batches(block(0)))
    assert (player.calls, progress) == (2, [0, 1])


def test_a_wait_for_games_can_be_stopped(tmp_path):
    source, player, _ = source_of(tmp_path, MicroBatches(8))
    source.watch(lambda: None, lambda: player.calls == 1)
    with pytest.raises(Interrupted, match="while the games of generation 0 were played"):
        next(source.batches(block(0)))
    assert not (generation_folder(tmp_path / "games", 0) / CLOSED).exists()


def test_games_that_another_rank_has_closed_are_awaited(tmp_path, monkeypatch):
    """As on a file system that shows a new file late."""
    folder = generation_folder(tmp_path, 0)
    write_games(folder / "a.safetensors", [game(3, 1)])
    write_games(folder / "b.safetensors", [game(3, 2)])
    late = folder / "late"
    (folder / "b.safetensors").rename(late)
    games = Games(tmp_path, 5)
    games.adopt(0, ["a.safetensors", "b.safetensors"])
    monkeypatch.setattr(shared_folder.time, "sleep", lambda _: late.rename(folder / "b.safetensors"))
    assert games.count(0) == 2


def test_games_that_never_appear_are_one_clear_error(tmp_path, monkeypatch):
    games = Games(tmp_path, 5)
    games.adopt(0, ["a.safetensors"])
    moments = iter(range(0, 1000, 30))
    monkeypatch.setattr(shared_folder.time, "monotonic", lambda: next(moments))
    monkeypatch.setattr(shared_folder.time, "sleep", lambda _: None)
    with pytest.raises(DataError, match=r"a\.safetensors is missing, and training on generation 0 has begun"):
        games.of(0)
    assert 90 < next(moments) <= 150


def test_too_few_examples_for_a_step_are_one_clear_error(tmp_path):
    source, _, _ = source_of(tmp_path, MicroBatches(128))
    with pytest.raises(DataError, match="fewer than the global batch of 128"):
        next(source.batches(block(0)))
