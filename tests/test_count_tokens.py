"""The script that measures how large the code is."""

from __future__ import annotations

from pathlib import Path

from scripts.count_tokens import Size, size_of, total

SOURCE = '''"""A docstring
of two lines."""

# a comment
LIMIT = 3  # another
"""A docstring of a name."""


def double(x):
    """A docstring."""
    text = "no docstring"
    return (
        x * 2
    )


class Doubled(Exception): """A docstring on a line of code."""
'''


def test_only_code_counts() -> None:
    """3 of LIMIT, 6 of def, 3 of text, 6 of return, 6 of class; brackets stand on lines of their own."""
    assert size_of(SOURCE) == Size(1, 24, 7)


def test_layout_does_not_change_the_tokens() -> None:
    assert size_of(SOURCE.replace("(\n        x * 2\n    )", "(x * 2)"))[1:] == (24, 5)


def test_files_below_the_folders_of_an_area_are_added_up_once(tmp_path: Path) -> None:
    for name in ("a/ops/one.py", "b/ops/deep/two.py", "b/other/three.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(SOURCE)
    assert total(tmp_path, ("*/ops/*", "b/ops/*")) == Size(2, 48, 14)
    assert total(tmp_path, ("c/*",)) == Size(0, 0, 0)
