"""Files of self-play games, and the training examples that are drawn from them."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from benchmarks.minigo import records
from benchmarks.minigo.records import Games, Sampling, Shard, draw, generation_folder, write_games
from common.distributed import shared_folder
from common.errors import DataError
from tests.benchmarks.minigo.finished_games import game

SAMPLING = Sampling(window=2, games=3, keep=0.5)


def write_generation(folder: Path, generation: int, lengths: list[list[int]], first: int = 0) -> None:
    """Write a shard for each list of lengths of games; games are numbered from ``first`` on."""
    numbers = itertools.count(first)
    for index, games in enumerate(lengths):
        path = generation_folder(folder, generation) / f"{index}.safetensors"
        write_games(path, [game(length, next(numbers)) for length in games])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for generation in range(3):
        write_generation(tmp_path, generation, [[40, 30], [50, 0, 60]], first=10 * generation)
    return tmp_path


def test_a_shard_returns_its_games(tmp_path):
    written = [game(3, 7), game(0, 8), game(5, 9)]
    write_games(tmp_path / "a.safetensors", written)
    shard = Shard.checked(tmp_path / "a.safetensors", 5)
    assert shard.games == 3
    for number, one in enumerate(written):
        own = slice(*shard.first_G[number : number + 2])
        np.testing.assert_array_equal(shard.bits_RK[own], one.bits)
        np.testing.assert_array_equal(shard.pi_RA[own], one.pi)
        np.testing.assert_array_equal(shard.outcome_R[own], [one.outcome] * len(one.bits))
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_shard_is_a_safetensors_file_of_the_stated_dtypes(tmp_path):
    write_games(tmp_path / "a.safetensors", [game(3, 7)])
    content = (tmp_path / "a.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"} == {
        "bits": ("U8", [3, 41]), "pi": ("F32", [3, 26]), "outcome": ("I8", [3]), "first": ("I64", [2]),
        "digest": ("U8", [4]),
    }  # fmt: skip


@pytest.mark.parametrize("length", [0, 5, 60, -1])
def test_a_truncated_shard_is_one_clear_error(tmp_path, length):
    path = tmp_path / "a.safetensors"
    write_games(path, [game(3, 7)])
    content = path.read_bytes()
    path.write_bytes(content[:length])
    with pytest.raises(DataError, match=r"a\.safetensors.*delete the file"):
        Shard.checked(path, 5)


@pytest.mark.parametrize("position", [-1, -30, -200, -400])
def test_a_damaged_byte_is_one_clear_error(tmp_path, position):
    path = tmp_path / "a.safetensors"
    write_games(path, [game(3, 7)])
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        Shard.checked(path, 5)


@pytest.mark.parametrize(
    ("closed", "remedy"),
    [
        (False, "delete the file, and its games are played again"),
        (True, "copy it back, or resume from a checkpoint before generation 3"),
    ],
)
def test_the_remedy_for_a_damaged_file_depends_on_whether_its_generation_is_closed(closed, remedy, tmp_path):
    path = generation_folder(tmp_path, 3) / "a.safetensors"
    write_games(path, [game(3, 7)])
    if closed:
        Games(tmp_path, 5).close(3)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"{path}.*; {remedy}$"):
        Games(tmp_path, 5).count(3)


def lowest_free_descriptor() -> int:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def test_an_open_shard_keeps_one_file_descriptor(run):
    before = len(os.listdir("/proc/self/fd"))
    games = Games(run, 5)
    assert len(games.of(0)) == 2
    assert len(os.listdir("/proc/self/fd")) == before + 2


def test_nobody_is_told_to_delete_a_file_that_cannot_be_opened(tmp_path):
    write_games(tmp_path / "a.safetensors", [game(3, 7)])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), limits[1]))
    try:
        with pytest.raises(DataError, match=r"a\.safetensors: the games cannot be read \(Too many open files\)$"):
            Shard.checked(tmp_path / "a.safetensors", 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_games_without_records_are_a_shard(tmp_path):
    write_games(tmp_path / "a.safetensors", [game(0, 7), game(0, 8)])
    shard = Shard.checked(tmp_path / "a.safetensors", 5)
    assert (shard.games, len(shard.outcome_R), shard.pi_RA.shape) == (2, 0, (0, 26))


def test_a_shard_of_another_board_is_refused(tmp_path):
    write_games(tmp_path / "a.safetensors", [game(3, 7)])
    with pytest.raises(DataError, match="not of 9x9"):
        Shard.checked(tmp_path / "a.safetensors", 9)


def test_a_file_without_games_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    header = b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(DataError, match="holds no games"):
        Shard.checked(path, 5)


def test_a_full_disk_is_one_clear_error_and_leaves_no_shard(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(records, "write_tensors", full)
    with pytest.raises(DataError, match=r"a\.safetensors.*No space left.*free some space"):
        write_games(tmp_path / "a.safetensors", [game(3, 7)])
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("name", ["a.safetensors", "a.safetensors.partial"])
def test_a_file_of_another_process_is_not_replaced(tmp_path, name):
    (tmp_path / name).write_bytes(b"of another process")
    with pytest.raises(DataError, match=f"{name} exists already: end other processes"):
        write_games(tmp_path / "a.safetensors", [game(3, 7)])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: b"of another process"}


def test_unfinished_files_do_not_count(run):
    (generation_folder(run, 1) / "2.safetensors.partial").write_bytes(b"begun")
    games = Games(run, 5)
    assert [games.count(generation) for generation in range(4)] == [5, 5, 5, 0]


def test_new_shards_are_found_and_old_ones_are_not_read_again(run, monkeypatch):
    games = Games(run, 5)
    assert games.count(2) == 5
    opened: list[Path] = []
    real = Shard.checked

    def noted(path: Path, board: int, remedy: str) -> Shard:
        opened.append(path)
        return real(path, board, remedy)

    monkeypatch.setattr(Shard, "checked", noted)
    write_games(generation_folder(run, 2) / "9.safetensors", [game(4, 99)])
    assert games.count(2) == 6
    assert [path.name for path in opened] == ["9.safetensors"]
    games.forget_before(2)
    games.count(1)
    assert len(opened) == 3


def chosen(sample: records.GenerationSample) -> list[tuple[int, int]]:
    found = sample.read(np.arange(len(sample)))
    return [(int(row[0]), int(row[1])) for row in found.bits_RK]


def test_examples_come_from_exactly_the_games_of_each_generation_in_the_window(run):
    every = Sampling(window=2, games=3, keep=1.0)
    sample = draw(Games(run, 5), every, seed=1, generation=2)
    lengths = {**dict(enumerate([40, 30, 50, 0, 60], 10)), **dict(enumerate([40, 30, 50, 0, 60], 20))}
    found = chosen(sample)
    numbers = {number for number, _ in found}
    assert len(found) == len(set(found)) == sum(lengths[number] for number in numbers)
    for generation in (1, 2):
        own = [number for number in numbers if number // 10 == generation]
        assert len(own) == 3 or (len(own) == 2 and 10 * generation + 3 not in own)  # one game has no records


def test_examples_have_the_values_of_their_records(run):
    sample = draw(Games(run, 5), SAMPLING, seed=1, generation=2)
    found = sample.read(np.arange(len(sample)))
    for bits, pi, outcome in zip(found.bits_RK, found.pi_RA, found.outcome_R, strict=True):
        number, record = int(bits[0]), int(bits[1])
        expected = game(60, number) if number % 10 == 4 else game([40, 30, 50, 0][number % 10], number)
        np.testing.assert_array_equal(pi, expected.pi[record])
        assert outcome == expected.outcome
    assert set(found.symmetry_R) == set(range(8))


def test_a_record_is_kept_with_the_given_probability(tmp_path):
    write_generation(tmp_path, 0, [[250] * 40])
    sample = draw(Games(tmp_path, 5), Sampling(5, 40, 0.3), seed=3, generation=0)
    assert abs(len(sample) - 3000) < 5 * (10_000 * 0.3 * 0.7) ** 0.5
    assert sample.steps(512) == len(sample) // 512


def test_the_order_mixes_generations_games_and_records(run):
    found = chosen(draw(Games(run, 5), SAMPLING, seed=1, generation=2))
    assert found != sorted(found)
    switches = sum(left // 10 != right // 10 for (left, _), (right, _) in itertools.pairwise(found))
    assert switches > len(found) / 4


def test_examples_are_a_function_of_seed_and_generation(run):
    def drawn(seed: int, generation: int) -> list[tuple[int, int]]:
        return chosen(draw(Games(run, 5), SAMPLING, seed, generation))

    assert drawn(1, 2) == drawn(1, 2)
    assert drawn(1, 2) != drawn(2, 2)
    assert drawn(1, 1) != drawn(1, 2)


def test_a_part_of_the_positions_has_the_same_examples_as_all_of_them(run):
    sample = draw(Games(run, 5), SAMPLING, seed=1, generation=2)
    whole, positions = sample.read(np.arange(len(sample))), np.arange(3, len(sample), 4)
    part = sample.read(positions)
    for name in ("bits_RK", "pi_RA", "outcome_R", "symmetry_R"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[positions])


def test_too_few_games_are_one_clear_error(run):
    with pytest.raises(DataError, match="generation 1 has 5 finished games, and training needs 6"):
        draw(Games(run, 5), Sampling(2, 6, 0.3), seed=1, generation=2)


def test_games_that_end_after_their_generation_was_closed_do_not_count(run):
    before = chosen(draw(Games(run, 5), SAMPLING, seed=1, generation=2))
    Games(run, 5).close(2)
    write_games(generation_folder(run, 2) / "0-late.safetensors", [game(4, 99)])
    games = Games(run, 5)
    assert games.count(2) == 5
    assert chosen(draw(games, SAMPLING, seed=1, generation=2)) == before


def test_a_missing_shard_of_a_closed_generation_is_one_clear_error(run, monkeypatch):
    monkeypatch.setattr(shared_folder, "LATE_SECONDS", 0.0)
    Games(run, 5).close(2)
    (generation_folder(run, 2) / "1.safetensors").unlink()
    with pytest.raises(DataError, match=r"1\.safetensors"):
        Games(run, 5).count(2)
