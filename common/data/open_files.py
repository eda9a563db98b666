"""Files that several threads read from at given offsets, and of which only the latest stay open."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from common.errors import DataError

File = TypeVar("File")


class OpenFile:
    """A file that its first read opens, and that is closed when no reference to this object is left.

    Args:
        remedy: advice to the user, for messages.
    """

    def __init__(self, path: Path, remedy: str) -> None:
        self.path, self._remedy = path, remedy
        self._opening = threading.Lock()
        self._descriptor: int | None = None

    def read(self, offset: int, size: int, name: str) -> bytes:
        """Return ``size`` bytes from ``offset`` on.

        Args:
            name: what the bytes are, for messages.

        Raises:
            DataError: the file is missing or too short, or cannot be read.
        """
        content = bytearray(size)
        self.read_into(offset, memoryview(content), name)
        return bytes(content)

    def read_into(self, offset: int, buffer: memoryview, name: str) -> None:
        """Fill ``buffer``, contiguous bytes, from ``offset`` on; see :meth:`read`."""
        descriptor, filled = self._open(), 0
        while filled < len(buffer):
            try:
                got = os.preadv(descriptor, [buffer[filled:]], offset + filled)
            except OSError as error:
                raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
            if not got:
                raise DataError(f"{self.path} is cut off: {name} ends at byte {offset + len(buffer)}; {self._remedy}")
            filled += got

    def _open(self) -> int:
        with self._opening:
            if self._descriptor is None:
                try:
                    self._descriptor = os.open(self.path, os.O_RDONLY)
                except OSError as error:
                    raise DataError(f"{self.path} cannot be opened: {error.strerror}; {self._remedy}") from error
                weakref.finalize(self, os.close, self._descriptor)
            return self._descriptor


class OpenFiles(Generic[File]):
    """A cache of the latest files; one thread calls it, and any thread may read from the files.

    Args:
        most: number of files that stay open.
        make: returns the file with a number.
    """

    def __init__(self, most: int, make: Callable[[int], File]) -> None:
        self._most, self._make = most, make
        self._files: OrderedDict[int, File] = OrderedDict()

    def file(self, number: int) -> File:
        """Return a file. An evicted file is closed when no thread reads from it any more."""
        if number not in self._files:
            while len(self._files) >= self._most:
                self._files.popitem(last=False)
            self._files[number] = self._make(number)
        self._files.move_to_end(number)
        return self._files[number]

    def close(self) -> None:
        """Close the files that no thread reads from."""
        self._files.clear()
