"""Untrusted JSON: no duplicate keys, and limits on nesting, size and digits.

Python's parser takes the last of two equal keys where other parsers take the first. It accepts integers of thousands
of digits, which overflow later, and nesting up to its own limit. :func:`parse_object` reads lines of logs,
:func:`read_json_object` complete files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.untrusted.regular_file import TEXT_BYTES, decoded, read_bytes

DEPTH = 32
"""Largest nesting depth of lists and objects."""
ENTRIES = 20_000
"""Largest number of entries of an object, at all depths; each needs a hundred times the memory of its text."""
FILE_ENTRIES = 1_000_000
"""Largest number of entries of a file. The largest index of a published checkpoint has some thousand."""
LARGE_BYTES = 2**34
"""Largest annotation file in bytes. COCO's training annotations have 470 MB, those of OpenImages 3 GB."""
DIGITS = 20
"""Largest number of digits of an integer, as in 2**64. Seeds are the largest numbers in a log."""


class StrictJsonError(ValueError):
    """The reason why a text is refused. The message follows "is"."""


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``, within the limits of this module.

    Raises:
        StrictJsonError: it is not valid JSON, not an object, or has a duplicate key, an integer of more than
            :data:`DIGITS` digits, more than :data:`ENTRIES` entries (commas and opening brackets, including those
            inside strings), or a nesting deeper than :data:`DEPTH`.
    """
    content = _parse(text, ENTRIES)  # allow half of a surrogate pair, as MLCommons' checker does
    if not isinstance(content, dict):
        raise StrictJsonError("not a JSON object")
    return content


def parse(text: str, entries: int = ENTRIES) -> Any:
    """Return the JSON value in ``text``, within the limits of this module.

    Args:
        entries: largest number of entries: commas and opening brackets, including those inside strings.

    Raises:
        StrictJsonError: it is not valid JSON, or has a duplicate key, an integer of more than :data:`DIGITS` digits,
            more than ``entries`` entries, a nesting deeper than :data:`DEPTH`, or half of a surrogate pair.
    """
    content = _parse(text, entries)
    _require_characters(text, content)
    return content


def _parse(text: str, entries: int) -> Any:
    if text.count(",") + text.count("[") + text.count("{") > entries:
        raise StrictJsonError(f"corrupt: it has more than {entries} entries")
    try:
        content = _DECODER.decode(text)
    except StrictJsonError:
        raise
    except (ValueError, RecursionError) as error:
        raise StrictJsonError(f"truncated or corrupt ({error})") from error
    if text.count("[") + text.count("{") > DEPTH and _deeper_than(content, DEPTH):
        raise StrictJsonError(f"corrupt: nested more than {DEPTH} deep")
    return content


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the object in one line of a text file, with any number of entries, at the speed of Python's parser.

    Raises:
        StrictJsonError: it is not an object, not valid, not UTF-8, or has half of a surrogate pair.
    """
    try:
        text = line.decode("utf-8-sig")
        content = json.loads(text)
        _require_characters(text, content)
    except StrictJsonError:
        raise
    except (ValueError, RecursionError) as error:
        raise StrictJsonError(f"truncated or corrupt ({error})") from error
    if not isinstance(content, dict):
        raise StrictJsonError("not a JSON object")
    return content


def _require_characters(text: str, content: object) -> None:
    """Refuse half of a surrogate pair, such as ``\\ud800``, which Python accepts but cannot encode."""
    if _SURROGATE.search(text) is None:
        return
    try:
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode("ascii")
        raise StrictJsonError(f"corrupt: it has {half}, half of a surrogate pair, which is no character") from error


def read_json_object(path: Path, *, most: int = TEXT_BYTES, follow: bool = True, remedy: str = "") -> dict[str, Any]:
    """Return the object of a JSON file; for arguments see :func:`common.untrusted.regular_file.read_bytes`.

    Raises:
        DataError: the file cannot be read within its bounds, or is not valid JSON, or not an object.
    """
    text = decoded(path, read_bytes(path, most, follow=follow, remedy=remedy), remedy)
    try:
        content = parse(text, FILE_ENTRIES)
        if not isinstance(content, dict):
            raise StrictJsonError("not a JSON object")
    except ValueError as error:
        reason = f"it is {error}" if isinstance(error, StrictJsonError) else str(error)
        raise DataError(f"{path}: is no readable JSON: {reason}" + (f"; {remedy}" if remedy else "")) from error
    return content


def read_large_json(path: Path) -> Any:
    """Return the value of a JSON file of gigabytes, such as annotations, at the speed of Python's parser.

    Needs up to twenty times the file's size in memory. Integers may have 4,300 digits, and keys may be duplicate.

    Raises:
        DataError: the file is larger than :data:`LARGE_BYTES`, cannot be read, or is not valid JSON.
    """
    try:
        return json.loads(decoded(path, read_bytes(path, LARGE_BYTES)).removeprefix("\ufeff"))
    except (ValueError, RecursionError, MemoryError) as problem:
        raise DataError(f"{path}: cannot be read as JSON: {problem}") from problem


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


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_int=_integer)
