"""Communication that nothing ran beside, by hand."""

from __future__ import annotations

import pytest

from common.run.exposed import Span, exposed_us


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0),
        ([Span(0, 5, False)], 0),
        ([Span(0, 5, True)], 5),
        ([Span(0, 5, True), Span(2, 3, False)], 4),
        ([Span(0, 5, True), Span(3, 9, False), Span(8, 12, True)], 6),
        ([Span(0, 5, True), Span(1, 4, True), Span(5, 7, True)], 7),
        ([Span(0, 2, False), Span(1, 6, False), Span(4, 6, True)], 0),
    ],
)
def test_time_in_which_only_communication_ran(spans, expected):
    assert exposed_us(spans) == expected
