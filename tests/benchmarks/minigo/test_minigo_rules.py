"""The compiled engine against a slow one, and cases that are known from the rules of Go."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.minigo.benson import pass_alive, score
from benchmarks.minigo.engine import CAPTURES, KO, PASSES, TO_PLAY, WHITE, Board, legal_moves, make_board, play
from benchmarks.minigo.positions import contains, enlarged_positions, insert, make_positions, of_game, remove
from tests.benchmarks.minigo.positions_by_hand import RULES, Game, drawn
from tests.benchmarks.minigo.slow_go import SlowGo

KOMI = 7.5


def hash_of(game: Game) -> int:
    """Return the hash of the stones, from the keys of the rules."""
    key = 0
    for point, stone in enumerate(game.board.stones[:-1]):
        if stone:
            key ^= int(game.rules.keys[0 if stone == 1 else 1, point])
    return key


def alive(game: Game) -> np.ndarray:
    owner = np.empty(game.size**2, np.int8)
    pass_alive(game.rules, game.board, owner)
    return owner


@pytest.mark.slow_cases("9-150")
@pytest.mark.parametrize(("size", "games"), [(5, 850), (9, 150)])
def test_random_games_equal_those_of_a_slow_engine(size, games):
    generator = np.random.default_rng(size)
    for _ in range(games):
        slow, fast = SlowGo(size), Game(size)
        for number in range(3 * size * size):
            legal = slow.legal()
            assert sorted(legal) == np.flatnonzero(fast.legal()).tolist()
            points = sorted(legal)[:-1]
            passes = not points or generator.random() < 0.03
            move = slow.points if passes else points[generator.integers(len(points))]
            slow.board, slow.colour = legal[move], -slow.colour
            slow.seen.add(slow.board)
            fast.play(move)
            assert tuple(fast.board.stones[:-1]) == slow.board
            if number % 16 == 15:
                assert int(fast.board.key[0]) == hash_of(fast)
                assert score(fast.rules, fast.board, KOMI) == slow.score(KOMI)
        for colour in (1, -1):
            assert set(np.flatnonzero(alive(fast) == colour)) == slow.alive(colour)


def test_legal_moves_reach_the_12675_legal_positions_of_3x3():
    """The known number: https://tromp.github.io/go/legal.html."""
    rules, no_past, legal = RULES[3], of_game(make_positions(1, 1), 0), np.empty(10, np.int8)
    waiting = [make_board(3)]
    seen = {tuple(waiting[0].stones)}
    while waiting:
        board = waiting.pop()
        for colour in (1, -1):
            board.state[TO_PLAY], board.state[KO] = colour, -1
            legal_moves(rules, board, no_past, legal)
            for point in np.flatnonzero(legal[:9]):
                if legal[point] == 1:
                    after = (*board.stones[:point], colour, *board.stones[point + 1 :])
                    if after in seen:
                        continue
                new = Board(*(array.copy() for array in board))
                play(rules, new, int(point))
                if tuple(new.stones) not in seen:
                    seen.add(tuple(new.stones))
                    waiting.append(new)
    assert len(seen) == 12675


def test_all_moves_are_legal_on_an_empty_board():
    assert Game(19).legal().tolist() == [1] * 362


def test_a_stone_joins_chains_and_their_liberties():
    game = Game(5).play("b1", "e5", "a2", "d5", "c2", "e4", "b3", "d4", "b2")
    heads = {game.board.chain[game.point(name)] for name in ("b1", "a2", "c2", "b3", "b2")}
    assert len(heads) == 1
    assert game.board.liberties[heads.pop()] == len({"a1", "c1", "a3", "c3", "d2", "b4"})


def test_a_move_captures_several_chains():
    game = drawn("X.XO. O.O.. ..... ..... .....", WHITE)
    assert game.legal()[game.point("b1")] == CAPTURES
    game.play("b1")
    assert game.stones().split()[:2] == [".O.O.", "O.O.."]
    assert game.board.liberties[game.board.chain[game.point("b1")]] == 3


def test_suicide_is_illegal_and_a_capture_is_not():
    game = drawn(".X... X.... ..... ..... .....", WHITE)
    assert game.legal()[game.point("a1")] == 0
    game = drawn(".XO.. XO... O.... ..... .....", WHITE)
    assert game.legal()[game.point("a1")] == CAPTURES


def test_a_ko_is_forbidden_until_a_move_elsewhere():
    game = drawn(".XO.. XO.O. .XO.. ..... .....").play("c2")
    assert game.stones().split()[1] == "X.XO."
    assert game.board.state[KO] == game.point("b2")
    assert game.legal()[game.point("b2")] == 0
    game.play("e5", "a5")
    assert game.board.state[KO] == -1
    assert game.legal()[game.point("b2")] == CAPTURES


def test_a_snapback_is_legal():
    game = drawn("X.OX. OOXX. XX... ..... .....", WHITE).play("b1")
    assert game.stones().split()[:2] == [".OOX.", "OOXX."]
    assert game.legal()[game.point("a1")] == CAPTURES
    game.play("a1")
    assert game.stones().split()[:2] == ["X..X.", "..XX."]


def test_superko_forbids_the_last_move_of_a_triple_ko():
    kos = ".XO..XO.. XO.OX.XO. .XO..XO.. ......... .XO...... XO.O..... .XO...... ......... ........."
    game = drawn(kos)
    game.play("c2", "f2", "c6", "b2", "g2")
    back = game.point("b6")  # would give the first position again, with the same colour to move
    assert game.board.state[KO] not in (-1, back)
    assert game.legal()[back] == 0
    assert game.play("e9", "f9").legal()[back] == CAPTURES


def test_two_passes_in_a_row_are_counted():
    game = Game(5).play("pass", "c3", "pass")
    assert game.board.state[PASSES] == 1
    assert game.play("pass").board.state[PASSES] == 2


@pytest.mark.parametrize(
    ("drawing", "expected"),
    [
        ("two eyes: .X.XO XXXXO OOOOO ..... .....", "XXXX. XXXX. ..... ..... ....."),
        ("one eye: .XXXO XXXXO OOOOO ..... .....", "..... ..... ..... ..... ....."),
        ("two eyes, one with a prisoner: .XO.X XXXXX ..... ..... .....", "XXXXX XXXXX ..... ..... ....."),
        ("four chains that share eyes: .X.X. X.XX. .X... XX... .....", "XXXX. XXXX. XX... XX... ....."),
        ("both: .XO.O XXOOO XXO.O XXOOO .XOOO", "XXOOO XXOOO XXOOO XXOOO XXOOO"),
    ],
)
def test_benson(drawing, expected):
    game = drawn(drawing.partition(": ")[2])
    found = "".join(".XO"[owner] for owner in alive(game))
    assert " ".join(found[row : row + 5] for row in range(0, 25, 5)) == expected


@pytest.mark.parametrize(
    ("drawing", "area"),
    [
        ("dame: .X.O. .X.O. .X.O. .X.O. .X.O.", 0),
        ("seki: XX.OO XXXOO XXXOO XXXOO XX.OO", 13 - 10),
        ("dead stones in pass-alive regions: .XO.X XXXXX ..... ..... .....", 25),
        ("both alive: .XO.O XXOOO XXO.O XXOOO .XOOO", 10 - 15),
        ("empty: ..... ..... ..... ..... .....", 0),
    ],
)
def test_score(drawing, area):
    game = drawn(drawing.partition(": ")[2])
    assert score(game.rules, game.board, KOMI) == area - KOMI
    assert SlowGo.of(5, game.board.stones[:-1]).score(KOMI) == area - KOMI


def test_a_larger_set_of_positions_has_the_same_positions():
    small = make_positions(20, 2)
    keys = np.random.default_rng(0).integers(0, 2**64, 20, np.uint64)
    slots = [insert(of_game(small, 1), key) for key in keys]
    remove(of_game(small, 1), slots[-1])
    for positions in (small, enlarged_positions(small, 500)):
        assert [contains(of_game(positions, 1), key) for key in keys] == [True] * 19 + [False]
        assert not any(contains(of_game(positions, 0), key) for key in keys)
