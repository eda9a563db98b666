"""The packed planes against their definition on the slow engine."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.minigo.features import PLANES, feature_bytes, symmetry_tables
from benchmarks.minigo.planes import point_codes, write_planes
from tests.benchmarks.minigo.positions_by_hand import Game
from tests.benchmarks.minigo.slow_go import SlowGo


def planes_by_definition(slow: SlowGo, history: list[tuple[int, ...]]) -> np.ndarray:
    """Return the planes (PLANES, rows, columns) of the newest position of ``history``."""
    planes = np.zeros((PLANES, slow.points))
    for age, board in enumerate(history[::-1][:4]):
        planes[2 * age] = np.array(board) == slow.colour
        planes[2 * age + 1] = np.array(board) == -slow.colour
    planes[8] = slow.colour == 1
    for _, stones, liberties in slow.chains(slow.board):
        planes[8 + min(len(liberties), 3), list(stones)] = 1
    for point, board in slow.legal().items():
        if point < slow.points and sum(map(abs, board)) <= sum(map(abs, slow.board)):
            planes[12, point] = 1
    return planes.reshape(PLANES, slow.size, slow.size)


@pytest.mark.parametrize("size", [5, 9, 19])
def test_planes_of_a_random_game_have_their_definition_in_all_symmetries(size):
    generator = np.random.default_rng(size)
    slow, fast, tables = SlowGo(size), Game(size), symmetry_tables(size)
    history, bits, captures = [slow.board], np.zeros(feature_bytes(size), np.uint8), 0
    for number in range(60):
        legal = slow.legal()
        move = sorted(legal)[generator.integers(len(legal))]
        slow.play(move)
        fast.play(move)
        history.append(slow.board)
        expected = planes_by_definition(slow, history)
        captures += expected[12].sum()
        symmetry = number % 8
        mirrored = expected if symmetry < 4 else expected[:, :, ::-1]
        write_planes(point_codes(fast.board, fast.recent, fast.legal()), tables[symmetry], bits)
        assert bits.tolist() == np.packbits(np.rot90(mirrored, symmetry % 4, (1, 2)).astype(bool)).tolist()
    assert captures > 0 or size == 19


def test_positions_before_the_first_one_are_zero():
    game = Game(5).play("c3")
    bits = np.zeros(feature_bytes(5), np.uint8)
    write_planes(point_codes(game.board, game.recent, game.legal()), symmetry_tables(5)[0], bits)
    planes = np.unpackbits(bits)[: PLANES * 25].reshape(PLANES, 25)
    assert planes.sum(1).tolist() == [
        0,
        1,
        *[0] * 6,
        0,
        0,
        0,
        1,
        0,
    ]  # the stone is white's opponent and has 4 liberties
