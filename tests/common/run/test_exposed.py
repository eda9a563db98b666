"""Time in which anything ran, and communication that nothing ran beside, by hand."""

from __future__ import annotations

import pytest

from common.run.exposed import Span, busy_us, exposed_us


@pytest.mark.parametrize(
    ("spans", "exposed", "busy"),
    [
        ([], 0, 0),
        ([Span(0, 5, False)], 0, 5),
        ([Span(0, 5, True)], 5, 5),
        ([Span(0, 5, True), Span(2, 3, False)], 4, 5),
        ([Span(0, 5, True), Span(3, 9, False), Span(8, 12, True)], 6, 12),
        ([Span(0, 5, True), Span(1, 4, True), Span(5, 7, True)], 7, 7),
        ([Span(0, 2, False), Span(1, 6, False), Span(4, 6, True)], 0, 6),
        ([Span(6, 8, True), Span(0, 2, False)], 2, 4),
    ],
)
def test_time_in_which_only_communication_ran_and_in_which_anything_did(spans, exposed, busy):
    assert exposed_us(spans) == exposed
    assert busy_us(spans) == busy
