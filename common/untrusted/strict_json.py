"""JSON that a stranger wrote: one object, no key twice, nothing too deep, too large or too long to be worked with.

Python's parser takes the last of two equal keys where other readers take the first, integers of thousands of digits
that overflow later, and nesting up to its own limit.
"""

from __future__ import annotations

import json
from typing import Any

DEPTH = 32
"""Of lists and objects within each other."""
ENTRIES = 20_000
"""Of an object, in all depths: each takes a hundred times the memory of its text."""
DIGITS = 20
"""Of an integer: those of 2**64. Seeds are the largest numbers of a log."""


class StrictJsonError(ValueError):
    """What is wrong with a text, to be put behind "is"."""


def parse_object(text: str) -> dict[str, Any]:
    """The object that ``text`` is.

    Raises:
        StrictJsonError: it is none, not valid, or has a key twice, too large a number or too deep a nesting.
    """
    if text.count(",") + text.count("[") + text.count("{") > ENTRIES:
        raise StrictJsonError(f"corrupt: it has more than {ENTRIES} entries")
    try:
        content = _DECODER.decode(text)
    except StrictJsonError:
        raise
    except (ValueError, RecursionError) as error:
        raise StrictJsonError(f"truncated or corrupt ({error})") from error
    if not isinstance(content, dict):
        raise StrictJsonError("not a JSON object")
    if text.count("[") + text.count("{") > DEPTH and _deeper_than(content, DEPTH):
        raise StrictJsonError(f"corrupt: nested more than {DEPTH} deep")
    return content


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise StrictJsonError(f"ambiguous: it has {twice[:80]!r} twice")
    return found


def _integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > DIGITS:
        raise StrictJsonError(f"corrupt: it has an integer of {len(digits)} digits")
    return int(digits)


def _deeper_than(content: object, depth: int) -> bool:
    level = [content]
    for _ in range(depth):
        level = [
            child
            for entry in level
            if isinstance(entry, dict | list)
            for child in (entry.values() if isinstance(entry, dict) else entry)
        ]
        if not level:
            return False
    return any(isinstance(entry, dict | list) for entry in level)


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_int=_integer)
