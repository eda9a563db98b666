"""JSON that anybody may have written: no key twice, nothing too deep, too large or too long to be worked with.

Python's parser takes the last of two equal keys where other readers take the first, integers of thousands of digits
that overflow later, and nesting up to its own limit. :func:`parse_object` reads lines of logs, :func:`read_json` whole
files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from common.errors import DataError, SuiteError
from common.untrusted.regular_file import TEXT_BYTES, decoded, read_bytes

DEPTH = 32
"""Of lists and objects within each other."""
ENTRIES = 20_000
"""Of an object, in all depths: each takes a hundred times the memory of its text."""
FILE_ENTRIES = 1_000_000
"""Of a whole file. The largest index that is read, of a published checkpoint's tensors, has some thousand."""
LARGE_BYTES = 2**34
"""Of annotations: COCO's of the training pictures have 470 MB, those of OpenImages 3 GB."""
DIGITS = 20
"""Of an integer: those of 2**64. Seeds are the largest numbers of a log."""


class StrictJsonError(ValueError):
    """What is wrong with a text, to be put behind "is"."""


def parse_object(text: str) -> dict[str, Any]:
    """Return the object that ``text`` is.

    Raises:
        StrictJsonError: it is none, not valid, or has a key twice, too large a number, or too deep a nesting.
    """
    content = _parse(text, ENTRIES)  # half of a surrogate pair is no fault of a log: MLCommons' checker takes it
    if not isinstance(content, dict):
        raise StrictJsonError("not a JSON object")
    return content


def parse(text: str, entries: int = ENTRIES) -> Any:
    """Return the value that ``text`` is, which may have so many entries.

    Raises:
        StrictJsonError: it is not valid, or has a key twice, too large a number, too deep a nesting, or half of a
            surrogate pair.
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
    """Return the object of one line of a file of texts: as fast as Python's parser, of any number of entries.

    Raises:
        StrictJsonError: it is none, not valid, not UTF-8, or has half of a surrogate pair.
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
    """Refuse half of a surrogate pair, such as ``\\ud800``: Python takes it, and no encoding of Unicode has it."""
    if _SURROGATE.search(text) is None:
        return
    try:
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode("ascii")
        raise StrictJsonError(f"corrupt: it has {half}, half of a surrogate pair, which is no character") from error


def read_json(
    path: Path, *, most: int = TEXT_BYTES, follow: bool = True, error: type[SuiteError] = DataError, remedy: str = ""
) -> Any:
    """Return the value that a file of JSON holds; arguments as :func:`common.untrusted.regular_file.read_bytes`.

    Raises:
        SuiteError: of the class ``error``: the file cannot be read within its bounds, or is no valid JSON.
    """
    content = read_bytes(path, most, follow=follow, error=error, remedy=remedy)
    try:
        return parse(decoded(path, content, error=error, remedy=remedy), FILE_ENTRIES)
    except ValueError as problem:
        reason = f"it is {problem}" if isinstance(problem, StrictJsonError) else str(problem)
        raise error(f"{path}: is no readable JSON: {reason}" + (f"; {remedy}" if remedy else "")) from problem


def read_json_object(
    path: Path, *, most: int = TEXT_BYTES, follow: bool = True, error: type[SuiteError] = DataError, remedy: str = ""
) -> dict[str, Any]:
    """Return the object that a file of JSON holds; arguments and errors as :func:`read_json` has them."""
    content = read_json(path, most=most, follow=follow, error=error, remedy=remedy)
    if not isinstance(content, dict):
        raise error(f"{path}: is no readable JSON: it is not a JSON object" + (f"; {remedy}" if remedy else ""))
    return content


def read_large_json(path: Path) -> Any:
    """Return the value of a file of gigabytes, such as annotations, as fast as Python's parser.

    It takes up to twenty times the memory of its file; integers may have 4,300 digits and keys may come twice.

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
