"""Test the preparation of MiniGo's bootstrap on a GPU: several processes share it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.minigo import prepare as preparation
from benchmarks.minigo.bootstrap import BootstrapOptions, generate
from benchmarks.minigo.data import BOOTSTRAP
from benchmarks.minigo.prepare import prepare
from benchmarks.minigo.records import Games

pytestmark = pytest.mark.gpu

OPTIONS = BootstrapOptions(board=9, width=64, generations=2, games=128 + 16, readouts=8, noise_alpha=0.135)


def test_processes_that_share_a_gpu_play_all_games(tmp_path: Path) -> None:
    generate(tmp_path / "raw", OPTIONS)
    made = prepare(tmp_path / "raw", tmp_path / "data", workers=2)
    assert made.counts["train_samples"] == 2 * OPTIONS.games
    games = Games(tmp_path / "data" / BOOTSTRAP, OPTIONS.board)
    for generation in range(OPTIONS.generations):
        shards = games.of(generation)
        assert [shard.games for shard in shards] == [preparation.SHARD_GAMES, OPTIONS.games - preparation.SHARD_GAMES]
        for shard in shards:
            np.testing.assert_allclose(shard.pi_RA.sum(1), 1.0, rtol=1e-5)
