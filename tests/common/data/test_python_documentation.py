"""Text from Python's library."""

from __future__ import annotations

import itertools

from common.data.python_documentation import documentation


def test_what_is_documented_comes_by_the_modules_names_as_prose():
    found = list(itertools.islice(documentation(), 200))

    title, paragraphs = found[0]
    assert title == "__future__"
    assert "language" in " ".join(paragraphs)
    assert [name.partition(".")[0] for name, _ in found] == sorted(name.partition(".")[0] for name, _ in found)
    assert not [text for _, texts in found for text in texts if ">>>" in text or "\n" in text]
