"""mmCIF files: categories of named columns of texts, as in the Protein Data Bank.

A category is written as pairs of a name and a value, or as a loop: names, and then rows of values. A value is a word, a
quoted text, or lines between semicolons at the start of a line. ``.`` and ``?`` without quotes stand for missing
values. (Source: International Tables for Crystallography, volume G, section 2.2.)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

Category = dict[str, list[str]]
"""Values of each column, by its name in lower case; missing values are empty."""
_TOKEN = re.compile(r"""\s*(?:(['"])(.*?)\1(?=\s|$)|(#.*)|(\S+))""")
_MISSING = (".", "?")


def read_categories(text: str, wanted: Collection[str]) -> dict[str, Category]:
    """Return the wanted categories of the first data block, such as ``atom_site``.

    Args:
        wanted: names in lower case. Missing categories are left out.

    Raises:
        ValueError: the file is no mmCIF file, or is truncated or damaged.
    """
    if not re.search(r"^data_", text, re.MULTILINE | re.IGNORECASE):
        raise ValueError("it has no data block")
    found: dict[str, Category] = {}
    reader = _Lines(text)
    blocks = 0
    while (token := reader.token()) is not None:
        value, quoted = token
        word = "" if quoted else value.lower()
        if word.startswith("data_"):
            blocks += 1
            if blocks > 1:
                break
        elif word == "loop_":
            _read_loop(reader, wanted, found)
        elif word.startswith("_"):
            entry = reader.token()
            if entry is None or (not entry[1] and entry[0].startswith("_")):
                raise ValueError(f"{value} has no value")
            category, _, column = word[1:].partition(".")
            if category not in wanted:
                continue
            if column in found.setdefault(category, {}):
                raise ValueError(f"line {reader.number}: a second {value}")
            found[category][column] = [_text(*entry)]
        else:
            raise ValueError(f"line {reader.number}: {value[:40]!r} belongs to no name")
    return found


def _read_loop(reader: _Lines, wanted: Collection[str], found: dict[str, Category]) -> None:
    names: list[str] = []
    while (token := reader.token()) is not None and not token[1] and token[0].startswith("_"):
        names.append(token[0].lower())
    if token is not None:
        reader.put_back(token)
    categories = {name[1:].partition(".")[0] for name in names}
    if len(categories) != 1:
        raise ValueError(f"line {reader.number}: a loop of {len(categories)} categories")
    (category,) = categories
    values = [_text(*value) for value in reader.values(len(names))]
    if len(values) % len(names):
        raise ValueError(f"line {reader.number}: the loop of {category} ends within a row")
    if category in wanted:
        columns = [name.partition(".")[2] for name in names]
        found[category] = {column: values[first :: len(names)] for first, column in enumerate(columns)}


def _text(value: str, quoted: bool) -> str:
    return "" if not quoted and value in _MISSING else value


class _Lines:
    """Reads a file line by line, and token by token within a line.

    Attributes:
        number: number of the current line, from 1.
    """

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self.number = 0
        self._pending: list[tuple[str, bool]] = []

    def token(self) -> tuple[str, bool] | None:
        """Return the next value and whether it was quoted; None at the end of the file."""
        while not self._pending:
            if self.number >= len(self._lines):
                return None
            self._pending = self._split()
        return self._pending.pop(0)

    def put_back(self, token: tuple[str, bool]) -> None:
        """Make ``token`` the next one."""
        self._pending.insert(0, token)

    def values(self, columns: int) -> Iterator[tuple[str, bool]]:
        """Yield the values of a loop, up to the next name, loop or block."""
        while True:
            line = self._lines[self.number] if self.number < len(self._lines) and not self._pending else ";"
            if line[:1] != ";" and not any(mark in line for mark in "'\"#"):
                words = line.split()
                if len(words) == columns and not _ends_loop(words[0]):  # a whole row, the usual case
                    self.number += 1
                    for word in words:
                        yield word, False
                    continue
            token = self.token()
            if token is None:
                return
            if not token[1] and _ends_loop(token[0]):
                self.put_back(token)
                return
            yield token

    def _split(self) -> list[tuple[str, bool]]:
        """Return the values of the next line, or of the next lines between semicolons."""
        line = self._lines[self.number]
        self.number += 1
        if not line.startswith(";"):
            return self._words(line)
        parts, first = [line[1:].rstrip("\r")], self.number
        while self.number < len(self._lines):
            line = self._lines[self.number]
            self.number += 1
            if line.startswith(";"):
                return [("\n".join(parts), True), *self._words(line[1:])]
            parts.append(line.rstrip("\r"))
        raise ValueError(f"line {first}: the text that starts here has no end")

    def _words(self, line: str) -> list[tuple[str, bool]]:
        words = []
        for match in _TOKEN.finditer(line):
            if match[4] and match[4][0] in "'\"":
                raise ValueError(f"line {self.number}: a quoted text has no end")
            if not match[3]:
                words.append((match[2], True) if match[1] else (match[4], False))
        return words


def _ends_loop(word: str) -> bool:
    return word.startswith("_") or word.lower() == "loop_" or word[:5].lower() == "data_"


def encode_category(name: str, columns: Category) -> str:
    """Return a category as a loop; empty values are written as missing ones.

    Raises:
        ValueError: a value has both kinds of quotes, or a line break.
    """
    rows = zip(*columns.values(), strict=True)
    lines = [" ".join(map(_quoted, row)) for row in rows]
    return "\n".join(["loop_", *(f"_{name}.{column}" for column in columns), *lines, "#", ""])


def _quoted(value: str) -> str:
    if not value:
        return "?"
    if re.fullmatch(r"[^\s'\"#_;.?\[\]$][^\s#]*", value) and not re.match(
        "(loop|data|save|stop|global)_", value.lower()
    ):
        return value
    quote = "'" if "'" not in value else '"'
    if "\n" in value or quote in value:
        raise ValueError(f"{value[:40]!r} cannot be quoted")
    return f"{quote}{value}{quote}"
