"""The evaluation against a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.minigo.evaluate import TARGET, GamesAgainstTarget, evaluation_settings
from benchmarks.minigo.model import MiniGo
from common.contract.evaluation import Weights
from common.distributed.layout import Layout
from common.errors import DataError
from common.formats.safetensors_file import write_tensors
from tests.benchmarks.minigo.sizes import SMALL, search_settings

SETTINGS = evaluation_settings(search_settings(virtual_losses=2, noise_alpha=0.3), 8)


def weights(seed: int) -> dict[str, torch.Tensor]:
    return MiniGo(SMALL, generator=torch.Generator().manual_seed(seed)).state_dict()


def passing(value: float) -> dict[str, torch.Tensor]:
    """Return weights of a network that always passes and has the given value before tanh."""
    found = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
    found["policy.bias"][25] = 20.0
    found["value.bias"][0] = value
    return found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    write_tensors(tmp_path / TARGET, weights(1), {})
    return tmp_path


class Alone(Layout):
    """A rank whose sums over ranks are its own values."""

    def group(self, *axes: str, ends: Sequence[str] = (), purpose: str = "") -> None:
        return None


def evaluation(games: int = 10, replicas: int = 1, replica: int = 0) -> GamesAgainstTarget:
    layout = Alone({"dp": replicas}, replica)
    made = GamesAgainstTarget(SMALL, SETTINGS, games, layout, torch.float32, seed=1)
    made.warm_up()
    return made


def test_a_model_wins_about_half_of_the_games_against_itself_and_always_the_same_ones(target):
    made = evaluation(20)
    made.open_data(target)
    predictions = made.predict(Weights(weights(1)))
    assert predictions.values["games"] == 20
    score = made.scorer.score(predictions)
    assert score["eval_samples"] == 20
    assert score["win_rate"] == predictions.values["won"] / 20
    assert 0.2 <= score["win_rate"] <= 0.8
    again = made.predict(Weights(weights(1)))
    assert again == predictions


def test_white_wins_by_komi_if_both_models_pass(tmp_path):
    """On the empty board white has its komi, and each model has white in every second game."""
    write_tensors(tmp_path / TARGET, passing(0.0), {})
    made = evaluation(6)
    made.open_data(tmp_path)
    assert made.predict(Weights(passing(0.0))).values == {"won": 3, "games": 6}


@pytest.mark.parametrize("models", [(passing(0.0), passing(0.0)), (weights(2), weights(1))], ids=["passing", "random"])
def test_the_games_do_not_depend_on_the_number_of_replicas(tmp_path, models):
    """With three games per replica, the evaluated model has white in the first game of replica 1."""
    write_tensors(tmp_path / TARGET, models[1], {})
    won = []
    for replicas in (1, 3):
        won.append(0)
        for replica in range(replicas):
            part = evaluation(9, replicas, replica)
            part.open_data(tmp_path)
            values = part.predict(Weights(models[0])).values
            assert values["games"] == 9 // replicas
            won[-1] += values["won"]
    assert won[0] == won[1]
    if models[0]["policy.bias"][25] == 20:
        assert won[0] == 4  # white wins every game, and the evaluated model has white in games 1, 3, 5 and 7


@pytest.mark.parametrize(("games", "replicas"), [(1, 1), (2, 3)])
def test_ranks_with_few_games_warm_up_and_play(tmp_path, games, replicas):
    settings = dataclasses.replace(SETTINGS, virtual_losses=1)
    write_tensors(tmp_path / TARGET, weights(1), {})
    for replica in range(replicas):
        layout = Alone({"dp": replicas}, replica)
        made = GamesAgainstTarget(SMALL, settings, games, layout, torch.float32, seed=1)
        made.warm_up()
        made.open_data(tmp_path)
        assert made.predict(Weights(weights(0))).values["games"] == (replica < games)


def test_a_missing_target_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"target\.safetensors.*prepare the data again"):
        evaluation().open_data(tmp_path)


def test_a_truncated_target_is_one_clear_error(tmp_path):
    write_tensors(tmp_path / TARGET, weights(1), {})
    (tmp_path / TARGET).write_bytes((tmp_path / TARGET).read_bytes()[:-1])
    with pytest.raises(DataError, match=r"target\.safetensors cannot be read.*prepare the data again"):
        evaluation().open_data(tmp_path)


def test_a_larger_network_is_no_target(tmp_path):
    """Its tensors include all tensors of the network of these settings."""
    larger = dataclasses.replace(SMALL, blocks=SMALL.blocks + 1)
    write_tensors(tmp_path / TARGET, MiniGo(larger, generator=torch.Generator().manual_seed(0)).state_dict(), {})
    with pytest.raises(DataError, match=r"another network: blocks\.2\.conv1\.weight"):
        evaluation().open_data(tmp_path)


def test_a_target_of_another_network_is_one_clear_error(tmp_path):
    write_tensors(tmp_path / TARGET, {"stem.weight": torch.zeros(3, 3)}, {})
    with pytest.raises(DataError, match=r"target\.safetensors is a model of another network"):
        evaluation().open_data(tmp_path)
