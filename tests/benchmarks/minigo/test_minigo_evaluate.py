"""The evaluation against a target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.minigo.evaluate import TARGET, GamesAgainstTarget, evaluation_settings
from benchmarks.minigo.model import MiniGo
from benchmarks.minigo.search import SearchSettings
from common.contract.evaluation import Weights
from common.distributed.layout import Layout
from common.errors import DataError
from common.formats.safetensors_file import write_tensors
from tests.benchmarks.minigo.sizes import SMALL

SETTINGS = evaluation_settings(SearchSettings(board=5, komi=7.5, virtual_losses=2, noise_alpha=0.3), 8)


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


def evaluation(games: int = 10) -> GamesAgainstTarget:
    made = GamesAgainstTarget(SMALL, SETTINGS, games, Layout(), torch.float32, seed=1)
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


def test_a_missing_target_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"target\.safetensors.*prepare the data again"):
        evaluation().open_data(tmp_path)


def test_a_target_of_another_network_is_one_clear_error(tmp_path):
    write_tensors(tmp_path / TARGET, {"stem.weight": torch.zeros(3, 3)}, {})
    with pytest.raises(DataError, match=r"target\.safetensors is a model of another network"):
        evaluation().open_data(tmp_path)
