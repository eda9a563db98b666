"""Lists of objects in JSON, whose values are checked and returned as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError


@dataclass(frozen=True)
class Entries:
    """A list of objects in a file.

    Attributes:
        location: file and list, for messages.
        entries: the objects.
    """

    location: str
    entries: Sequence[dict[str, Any]]

    @staticmethod
    def of(content: Any, name: str, path: Path) -> Entries:
        entries = content.get(name) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise DataError(f"{path}: has no list {name!r} of objects; it is not of COCO's format")
        return Entries(f"{path}: {name}", entries)

    def ids(self, key: str) -> NDArray[np.int64]:
        """Return the integers under ``key``."""
        self._refuse_others(key, _is_integer, "an integer")
        return np.array([entry[key] for entry in self.entries], np.int64)

    def integers(self, key: str) -> NDArray[np.int64]:
        """Return the integers under ``key``, which must not be negative."""
        values = self.ids(key)
        self.refuse(values < 0, key, "0 or more")
        return values

    def numbers(self, key: str, width: int = 0) -> NDArray[np.float64]:
        """Return the finite numbers under ``key``, or lists of ``width`` numbers."""

        def fit(value: Any) -> bool:
            if width:
                return type(value) is list and len(value) == width and all(_is_number(one) for one in value)
            return _is_number(value)

        self._refuse_others(key, fit, f"a list of {width} numbers" if width else "a number")
        values = np.array([entry[key] for entry in self.entries], np.float64).reshape(len(self.entries), max(width, 1))
        self.refuse(np.any(~np.isfinite(values), axis=1), key, "finite")
        return values if width else values[:, 0]

    def names(self, key: str) -> NDArray[np.bytes_]:
        """Return the texts under ``key``, in UTF-8."""
        self._refuse_others(key, _is_name, "a name")
        return np.array([entry[key].encode() for entry in self.entries], np.bytes_)

    def texts(self, key: str) -> list[str]:
        """Return the texts under ``key``."""
        self._refuse_others(key, lambda value: type(value) is str, "a text")
        return [entry[key] for entry in self.entries]

    def refuse(self, wrong: NDArray[np.bool_], key: str, expected: str) -> None:
        """Raise DataError for the first entry where ``wrong`` is true.

        Args:
            wrong: (entries,), whether each entry's value is wrong.
            key: key of the value, for the message.
            expected: description of correct values, for the message.
        """
        if wrong.any():
            self.fail(int(wrong.argmax()), key, expected)

    def check_once(self, ids: NDArray[np.int64], key: str) -> None:
        """Raise DataError for the first entry with a repeated id."""
        again = np.ones(len(ids), np.bool_)
        again[np.unique(ids, return_index=True)[1]] = False
        self.refuse(again, key, "one that no entry before has")

    def _refuse_others(self, key: str, fit: Callable[[Any], bool], expected: str) -> None:
        for number, entry in enumerate(self.entries):
            if not fit(entry.get(key)):
                self.fail(number, key, expected)

    def fail(self, number: int, key: str, expected: str) -> NoReturn:
        """Raise DataError for one entry.

        Args:
            number: index of the entry.
            key: key of the wrong or missing value.
            expected: description of correct values, for the message.
        """
        entry = self.entries[number]
        actual = f"is {entry[key]!r:.80}" if key in entry else "is missing"
        raise DataError(f"{self.location}[{number}]: {key!r} {actual}, but must be {expected}")


def _is_integer(value: Any) -> bool:
    """Return whether a JSON value is an integer of 64 bits; ``true`` is not."""
    return type(value) is int and abs(value) < 2**63


def _is_name(value: Any) -> bool:
    return type(value) is str and value != "" and value.isprintable()


def _is_number(value: Any) -> bool:
    return type(value) is float or _is_integer(value)
