"""Text of strangers on a terminal."""

import os

import pytest

from common.errors import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("result_0.txt: größer", "result_0.txt: größer"),
        ("a\nVALID RUN", "a VALID RUN"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("right\u202eto left", "right\\u202eto left"),
        (os.fsdecode(b"name\xff"), "name\\udcff"),
        ("a\0b", "a\\x00b"),
    ],
)
def test_what_cannot_be_seen_is_an_escape(text, shown):
    assert printable(text) == shown


def test_much_text_is_cut():
    shown = printable("x" * 1_000_000)
    assert len(shown) < 2_100
    assert shown.endswith("(1,000,000 characters)")
