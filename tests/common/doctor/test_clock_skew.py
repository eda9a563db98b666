"""Offsets of clocks from exchanges of messages."""

import pytest

from common.doctor.command import offset_from_exchanges


def test_a_symmetric_exchange_gives_the_offset_itself():
    # Sent at 10, there at 10.5 by the own clock while the other shows 13.7, back at 11.
    assert offset_from_exchanges([(10.0, 13.7, 11.0)]) == pytest.approx(3.2)


def test_a_clock_that_is_behind_is_negative():
    assert offset_from_exchanges([(10.0, 7.5, 11.0)]) == pytest.approx(-3.0)


def test_the_exchange_with_the_shortest_way_counts():
    delayed_there = (20.0, 29.0 + 3.2, 29.5)
    assert offset_from_exchanges([delayed_there, (10.0, 13.7, 11.0), delayed_there]) == pytest.approx(3.2)
