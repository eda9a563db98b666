"""JSON that Python's parser accepts, but that is ambiguous or excessive, is refused."""

from __future__ import annotations

import pytest

from common.untrusted.strict_json import StrictJsonError, parse_object


def test_a_valid_object_is_parsed() -> None:
    assert parse_object('{"a": [1, 2.5, null, {"b": "c"}], "d": -9007199254740993}') == {
        "a": [1, 2.5, None, {"b": "c"}],
        "d": -9007199254740993,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 1}', "it has 'a' twice"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "it has 'b' twice"),
        ("[1]", "not a JSON object"),
        ('{"a": 1', "truncated or corrupt"),
        ('{"a": 1} {}', "truncated or corrupt"),
        ("", "truncated or corrupt"),
        ('{{"a": {}1{}}}'.format("[" * 40, "]" * 40), "nested more than 32 deep"),
        ('{"a": %s}' % ('{"a":' * 15_000), "truncated or corrupt"),
        ('{"a": %s}' % ('{"a":' * 100_000), "more than 20000 entries"),
        ('{"a": %s}' % ("9" * 30), "an integer of 30 digits"),
        ('{"a": %s}' % ("9" * 100_000), "an integer of 100000 digits"),
    ],
)
def test_an_ambiguous_or_excessive_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(StrictJsonError, match=words):
        parse_object(text)


def test_many_brackets_side_by_side_are_not_deep() -> None:
    assert parse_object('{{"a": [{}]}}'.format(", ".join(["[[1]]"] * 100)))["a"][99] == [[1]]
