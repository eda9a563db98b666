"""Work that is begun before it is wanted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.data.ahead import ahead


@pytest.mark.parametrize("window", [0, 1, 3, 9])
def test_everything_comes_in_order_with_a_window_begun(window: int) -> None:
    begun: list[int] = []

    def begin() -> Iterator[int]:
        for number in range(5):
            begun.append(number)
            yield number

    for expected, piece in enumerate(ahead(begin(), window, pytest.fail)):
        assert piece == expected
        assert len(begun) == min(expected + 1 + window, 5)
    assert len(begun) == 5


def test_what_nobody_wants_any_more_is_abandoned() -> None:
    abandoned: list[int] = []
    pieces = ahead(iter(range(9)), 3, abandoned.append)
    assert next(pieces) == 0
    pieces.close()
    assert abandoned == [1, 2, 3]
