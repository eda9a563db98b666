"""The queue of pieces that processes do ahead: every piece once, slow pieces late, failures, and continuing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.data.ready_queue import ReadyQueue
from common.errors import DataError


def square(number: int) -> int:
    return number * number


def blocked_on(pipes: dict[int, Path], number: int) -> int:
    """Wait for a writer of the named pipe of a number, if it has one."""
    if number in pipes:
        pipes[number].read_bytes()
    return number


def killed_once(folder: Path, numbers: tuple[int, ...], number: int) -> int:
    if number in numbers and not (folder / str(number)).exists():
        (folder / str(number)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def failed_once(folder: Path, number: int) -> int:
    if number % 3 == 0 and not (folder / str(number)).exists():
        (folder / str(number)).touch()
        raise OSError("the file server is away")
    return number


def signalled(number: int) -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    return number


def killed(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def damaged(number: int) -> int:
    if number == 3:
        raise DataError(f"chain {number} is damaged")
    return number


def undefined(number: int) -> int:
    return 1 // (number - 2)


@contextmanager
def queue(make: Callable[[int], Any], **options: Any) -> Iterator[ReadyQueue[int, Any]]:
    usual = {"workers": 2, "ahead": 4, "window": 1000}
    made = ReadyQueue(make, lambda number: number, **usual | options)
    try:
        yield made
    finally:
        made.close()


def taken(made: ReadyQueue[int, Any], count: int) -> list[int]:
    return [made.take()[0] for _ in range(count)]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_every_piece_comes_once_with_its_result() -> None:
    with queue(square, end=20) as made:
        found = dict(made.take() for _ in range(20))
    assert found == {number: number * number for number in range(20)}


def test_a_slow_piece_does_not_delay_the_others_and_comes_when_it_is_ready(pipe: Path) -> None:
    with queue(partial(blocked_on, {1: pipe}), end=20) as made:
        before = taken(made, 10)
        assert made.late(10) == [1]
        pipe.write_bytes(b"go")
        after = taken(made, 10)
    assert before == [0, *range(2, 11)]
    assert 1 in after
    assert sorted(before + after) == list(range(20))


def test_no_piece_leaves_its_window(pipe: Path) -> None:
    """The window of 4 ends with the slow piece, though the pieces of the next one are ready."""
    with queue(partial(blocked_on, {1: pipe}), window=4, ahead=6) as made:
        assert taken(made, 3) == [0, 2, 3]
        pipe.write_bytes(b"go")
        assert taken(made, 1) == [1]
        assert sorted(taken(made, 4)) == [4, 5, 6, 7]


def test_in_order_all_wait_for_a_slow_piece(pipe: Path) -> None:
    with queue(partial(blocked_on, {1: pipe}), in_order=True) as made:
        assert taken(made, 1) == [0]
        pipe.write_bytes(b"go")
        assert taken(made, 5) == [1, 2, 3, 4, 5]


def test_a_later_queue_continues_with_the_missing_pieces(pipe: Path) -> None:
    with queue(partial(blocked_on, {1: pipe})) as made:
        assert taken(made, 6) == [0, 2, 3, 4, 5, 6]
        assert [made.late(count) for count in range(7)] == [[], [], [1], [1], [1], [1], [1]]
    with queue(square, first=4, late=[1], workers=1) as continued:
        assert taken(continued, 3) == [1, 5, 6]


def test_missing_pieces_are_known_until_they_come() -> None:
    with queue(square, first=4, late=[3, 1], workers=1) as continued:
        assert taken(continued, 5) == [1, 3, 6, 7, 8]
        assert [continued.late(count) for count in (4, 5, 6, 7)] == [[1, 3], [3], [], []]


def test_a_queue_with_an_end_makes_no_more_pieces(tmp_path: Path) -> None:
    asked: list[int] = []
    made = ReadyQueue(square, lambda number: asked.append(number) or number, 2, 4, 1000, end=3)
    try:
        assert sorted(taken(made, 3)) == [0, 1, 2]
    finally:
        made.close()
    assert asked == [0, 1, 2]


def test_another_process_does_the_piece_of_a_killed_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with queue(partial(killed_once, tmp_path, (1, 5)), workers=3, end=12) as made:
        assert sorted(taken(made, 12)) == list(range(12))
    assert "ended with the exit code -9; 1 are left" in capfd.readouterr().err


def test_signals_to_the_whole_job_do_not_stop_the_processes() -> None:
    with queue(signalled, workers=1) as made:
        assert taken(made, 3) == [0, 1, 2]


def test_a_failed_piece_is_done_again(tmp_path: Path) -> None:
    with queue(partial(failed_once, tmp_path), in_order=True) as made:
        assert taken(made, 10) == list(range(10))


@pytest.mark.parametrize(
    ("make", "complaint", "workers"),
    [
        (killed, "ended with the exit code -9, as all others before", 1),
        (killed, "ended with the exit code -9, (at the same sample|as all others before)", 3),
        (damaged, "^chain 3 is damaged$", 2),
        (undefined, "a reader failed: ZeroDivisionError", 2),
    ],
)
def test_a_lasting_failure_is_one_clear_error(make: Callable[[int], int], complaint: str, workers: int) -> None:
    with queue(make, workers=workers, end=10) as made, pytest.raises(DataError, match=complaint):
        taken(made, 10)


def test_an_error_of_the_order_is_raised() -> None:
    made = ReadyQueue(square, lambda number: [0][number], 1, 4, 1000)
    try:
        assert taken(made, 1) == [0]
        with pytest.raises(IndexError):
            made.take()
    finally:
        made.close()
