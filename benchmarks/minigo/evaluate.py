"""Evaluation by games against a fixed model, the target: the share of games that the evaluated model wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.minigo.inference import BatchedInference, sizes_up_to
from benchmarks.minigo.match import Match
from benchmarks.minigo.model import InferenceNetwork, MiniGoArchitecture, check_weights
from benchmarks.minigo.search import SearchSettings
from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.distributed.layout import Layout
from common.errors import CheckpointError, DataError
from common.evaluation.counts import Counts
from common.formats.safetensors_file import read_tensors

TARGET = "target.safetensors"
"""File of the prepared data with the weights of the target."""


def evaluation_settings(settings: SearchSettings, readouts: int) -> SearchSettings:
    """Return the settings of evaluation games: every move is full, without noise, random choice and resignation."""
    return replace(
        settings,
        readouts=readouts,
        fast_probability=0.0,
        noise_mix=0.0,
        soft_pick=False,
        resign_disabled=1.0,
        target_pruning=False,
        allow_pass=True,
    )


def read_target(root: Path, architecture: MiniGoArchitecture, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors of the target of the prepared data in ``root``.

    Raises:
        DataError: the file is missing or damaged, or has another network.
    """
    path = root / TARGET
    try:
        weights = read_tensors(path, device)
    except CheckpointError as error:
        raise DataError(f"{error}; prepare the data again, which makes the target") from error
    try:
        check_weights(architecture, weights)
    except CheckpointError as error:
        raise DataError(f"{path} is {error}; give the data_dir that belongs to this recipe") from error
    return weights


class WinRate(Scorer):
    """Share of the games that the evaluated model has won."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return the share of games, and their number."""
        won, games = predictions.values["won"], predictions.values["games"]
        return {"win_rate": won / games, "eval_samples": games}


class GamesAgainstTarget(Evaluation):
    """Plays a fixed number of games, in which both models have black in turn. The ranks of ``dp`` share the games.

    A game depends on the seed, its number and the networks, not on the number of ranks: on one kind of device, up to
    rounding.

    Args:
        settings: see :func:`evaluation_settings`.
        games: number of games over all ranks.
        dtype: dtype of the networks.
        seed: seed of the symmetries in which positions are seen; nothing else in these games is random.
        implementations: as in :class:`benchmarks.minigo.model.InferenceNetwork`.
        capture: capture the networks in CUDA graphs.
    """

    def __init__(
        self,
        architecture: MiniGoArchitecture,
        settings: SearchSettings,
        games: int,
        layout: Layout,
        dtype: torch.dtype,
        seed: int,
        implementations: Mapping[str, str] | None = None,
        capture: bool = True,
    ) -> None:
        self.scorer, self._counts = WinRate(), Counts(layout, ("won", "games"))
        self._settings, self._layout, self._seed = settings, layout, seed
        self._architecture = architecture
        self._numbers = range(layout.coordinate("dp"), games, layout.size("dp"))
        most = max(1, len(self._numbers)) * settings.virtual_losses
        self._players = [
            BatchedInference(
                InferenceNetwork(architecture, implementations, device=layout.device, dtype=dtype),
                sizes_up_to(most),
                capture,
                flights=1,
            )
            for _ in range(2)
        ]

    def warm_up(self) -> None:
        """Play up to two games of the untrained networks with the smallest search, which compiles the search."""
        self._play(replace(self._settings, readouts=2), self._numbers[:2])
        self._counts.warm_up()

    def open_data(self, root: Path) -> None:
        """Load the target; see :func:`read_target`."""
        self._players[1].load(read_target(root, self._architecture, self._layout.device))

    def predict(self, weights: Weights) -> Predictions:
        """Play all games, and return how many the model of ``weights`` has won. Collective over ``dp``."""
        self._players[0].load(weights.tensors)
        won = self._play(self._settings, self._numbers)
        self._counts.clear()
        device = self._layout.device
        self._counts.add(torch.tensor(won, device=device), torch.tensor(len(self._numbers), device=device))
        return Predictions(self._counts.totals())

    def close(self) -> None:
        """Release the graphs."""
        for player in self._players:
            player.close()

    def _play(self, settings: SearchSettings, numbers: Sequence[int]) -> int:
        if not numbers:  # there are fewer games than ranks
            return 0
        match = Match(settings, numbers, self._seed)
        while not match.ended():
            for player, network in enumerate(self._players):
                if len(bits := match.leaves(player)):
                    match.answer(player, *network(bits))
        return sum(game.winner == 0 for game in match.finished)
