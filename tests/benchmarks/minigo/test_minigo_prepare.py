"""The bootstrap: games of the start model, the target, interrupted preparations, and files that are wrong."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.minigo import prepare as preparation
from benchmarks.minigo.bootstrap import START, BootstrapOptions, generate, of_rules, untrained
from benchmarks.minigo.data import BOOTSTRAP, FORMAT
from benchmarks.minigo.evaluate import TARGET
from benchmarks.minigo.models import write_model
from benchmarks.minigo.prepare import PREPARE_COMMAND, prepare
from benchmarks.minigo.records import Games, Sampling, draw
from common.data import manifest
from common.data.preparation import assets_of
from common.errors import DataError
from common.formats.safetensors_file import read_tensors

OPTIONS = BootstrapOptions(blocks=1, width=8, value_hidden=8, generations=2, games=5, readouts=4)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    generate(tmp_path / "raw", OPTIONS)
    return tmp_path / "raw"


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "SHARD_GAMES", 2)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def same_weights(path: Path, expected: dict[str, torch.Tensor]) -> bool:
    found = read_tensors(path, torch.device("cpu"))
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_every_generation_has_its_games_and_training_can_draw_from_them(raw, tmp_path, small_shards):
    made = prepare(raw, tmp_path / "data")
    assert (made.counts["train_samples"], made.counts["generations"], made.counts["board"]) == (10, 2, 5)
    games = Games(tmp_path / "data" / BOOTSTRAP, 5)
    assert [games.count(generation) for generation in range(3)] == [5, 5, 0]
    assert [shard.games for shard in games.of(1)] == [2, 2, 1]
    sample = draw(games, Sampling(window=2, games=5, keep=1.0), seed=0, generation=1)
    assert len(sample) == made.counts["records"]
    records = sample.read(np.arange(len(sample)))
    np.testing.assert_allclose(records.pi_RA.sum(1), 1.0, rtol=1e-5)
    assert np.mean(records.pi_RA[:, -1] == 0) > 0.8, "nobody passes while there is another move"
    assert manifest.verify(tmp_path / "data", FORMAT, PREPARE_COMMAND).synthetic


def test_games_that_end_without_further_leaves_are_kept(raw, tmp_path, monkeypatch):
    """The last search of a game may only visit positions after its end. Here all games end in the last call."""
    leaves, take, over = preparation.SelfPlay.leaves, preparation.SelfPlay.take_finished, []

    def asked(play):
        bits = leaves(play)
        over.extend([play] * (not len(bits)))
        return bits

    monkeypatch.setattr(preparation.SelfPlay, "leaves", asked)
    monkeypatch.setattr(preparation.SelfPlay, "take_finished", lambda play: take(play) if play in over else [])
    assert prepare(raw, tmp_path / "data").counts["train_samples"] == 10


def test_generations_and_files_have_different_games(raw, tmp_path, small_shards):
    prepare(raw, tmp_path / "data")
    games = Games(tmp_path / "data" / BOOTSTRAP, 5)
    firsts = {
        shard.pi_RA[shard.first_G[game] : shard.first_G[game] + 8].tobytes()
        for generation in range(2)
        for shard in games.of(generation)
        for game in range(shard.games)
    }
    assert len(firsts) == 10


def test_the_start_model_plays_and_is_in_the_assets(raw, tmp_path):
    other = untrained(replace(OPTIONS, seed=3))
    write_model(tmp_path / "own.safetensors", other, 7)
    prepare(raw, tmp_path / "random")
    prepare(raw, tmp_path / "own", start=tmp_path / "own.safetensors")
    assert contents(tmp_path / "random" / BOOTSTRAP) != contents(tmp_path / "own" / BOOTSTRAP)
    assert same_weights(assets_of(tmp_path / "own") / START, other)
    assert same_weights(tmp_path / "own" / TARGET, untrained(OPTIONS))


def test_two_processes_make_the_same_files(raw, tmp_path, small_shards, forked_pools):
    prepare(raw, tmp_path / "one", workers=1)
    prepare(raw, tmp_path / "two", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_an_interrupted_preparation_keeps_its_files_and_removes_unfinished_ones(
    raw, tmp_path, small_shards, monkeypatch
):
    """The first attempt is interrupted after a file was written, but before the file was recorded."""
    calls = iter(range(100))
    write = preparation.write_games

    def interrupted(path, games):
        write(path, games)
        if next(calls) == 3:
            raise KeyboardInterrupt

    data = tmp_path / "data"
    monkeypatch.setattr(preparation, "write_games", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(raw, data)
    before = {path: path.stat().st_ino for path in data.rglob("0*.safetensors")}
    unfinished = data / BOOTSTRAP / "000001" / "000001.safetensors.partial"
    unfinished.write_bytes(b"begun")
    assert len(before) == 4
    monkeypatch.setattr(preparation, "write_games", write)
    assert prepare(raw, data).counts["train_samples"] == 10
    assert {path: path.stat().st_ino for path in before} == before
    assert not unfinished.exists()
    prepare(raw, tmp_path / "whole")
    assert contents(data) == contents(tmp_path / "whole")


def test_an_existing_damaged_file_is_one_clear_error(raw, tmp_path, small_shards):
    path = tmp_path / "data" / BOOTSTRAP / "000000" / "000001.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"000001\.safetensors.*delete the file, and its games are played again"):
        prepare(raw, tmp_path / "data")


def test_a_damaged_file_of_complete_data_is_made_again(raw, tmp_path, small_shards):
    data = tmp_path / "data"
    prepare(raw, data)
    before, path = contents(data), data / BOOTSTRAP / "000001" / "000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DataError, match=r"000001\.safetensors.*delete the file and manifest\.json") as refused:
        Games(tmp_path / "run", 5, data / BOOTSTRAP, 2).count(1)
    assert "keeps all other games" in str(refused.value)
    path.unlink()
    (data / manifest.NAME).unlink()
    kept = {other: other.stat().st_ino for other in data.rglob("0*.safetensors")}
    prepare(raw, data)
    assert contents(data) == before
    assert {other: other.stat().st_ino for other in kept} == kept


def test_a_disk_that_is_full_after_a_while_is_one_clear_error(raw, tmp_path, small_shards, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("benchmarks.minigo.records.write_tensors", full)
    with pytest.raises(DataError, match=r"000000\.safetensors.*No space left on device.*free some space"):
        prepare(raw, tmp_path / "data")


def test_the_target_can_be_replaced_without_playing_again(raw, tmp_path):
    data, model = tmp_path / "data", tmp_path / "model.safetensors"
    prepare(raw, data)
    before = contents(data / BOOTSTRAP)
    (data / TARGET).unlink()
    trained = untrained(replace(OPTIONS, seed=1))
    write_model(model, trained, 45)
    prepare(tmp_path / "nowhere", data, target=model)
    assert same_weights(data / TARGET, trained)
    assert contents(data / BOOTSTRAP) == before
    assert manifest.verify(data, FORMAT, PREPARE_COMMAND).synthetic
    with pytest.raises(DataError, match="other raw data"):
        prepare(raw, data)
    (raw / TARGET).write_bytes(model.read_bytes())
    assert prepare(raw, data).counts["train_samples"] == 10


@pytest.mark.parametrize("given", ["option", "raw"])
def test_another_start_is_refused_where_the_target_is_replaced(given, raw, tmp_path):
    data, model = tmp_path / "data", tmp_path / "model.safetensors"
    made = prepare(raw, data)
    write_model(model, untrained(replace(OPTIONS, seed=1)), 45)
    other = raw / START if given == "raw" else tmp_path / "own.safetensors"
    write_model(other, untrained(replace(OPTIONS, seed=2)), 7)
    before = contents(data)
    with pytest.raises(DataError, match=f"were played by another start than {other}"):
        prepare(raw, data, start=other if given == "option" else None, target=model)
    assert contents(data) == before
    write_model(other, untrained(OPTIONS), 0)
    assert prepare(raw, data, start=other if given == "option" else None, target=model).counts == made.counts
    assert same_weights(data / TARGET, untrained(replace(OPTIONS, seed=1)))


def test_models_that_are_missing_damaged_or_of_another_network_are_refused(raw, tmp_path):
    data = tmp_path / "data"
    (raw / TARGET).unlink()
    with pytest.raises(DataError, match=r"target\.safetensors is missing: give --target MODEL.*or --untrained"):
        prepare(raw, data)
    write_model(raw / TARGET, untrained(replace(OPTIONS, blocks=2)), 0)
    with pytest.raises(DataError, match=r"target\.safetensors is a model of another network: blocks\.1\.conv1\.weight"):
        prepare(raw, data)
    (raw / TARGET).write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"target\.safetensors cannot be read"):
        prepare(raw, data)
    assert not data.exists()


def test_untrained_networks_are_used_only_if_the_user_says_so(raw, tmp_path):
    (raw / TARGET).unlink()
    prepare(raw, tmp_path / "data", untrained_models=True)
    assert same_weights(tmp_path / "data" / TARGET, untrained(OPTIONS))


def test_data_that_are_not_synthetic_have_the_sizes_of_the_rules_and_are_custom(tmp_path, monkeypatch):
    options = of_rules()
    assert (options.generations * options.games, options.readouts, options.noise_alpha) == (40960, 80, 0.03)
    settings = options.settings()
    assert (settings.fast_probability, settings.target_pruning, settings.allow_pass) == (0.0, False, False)
    assert (settings.resign_low, settings.resign_high, settings.virtual_losses) == (-1.0, -0.99, 4)
    monkeypatch.setattr(preparation, "of_rules", lambda: OPTIONS)
    made = prepare(tmp_path / "nowhere", tmp_path / "data", untrained_models=True)
    assert not made.synthetic
    assert "our own" in made.custom
