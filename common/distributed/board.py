"""Where ranks post what the others should know: a store of the process group, or files in a shared folder.

Used by threads beside training, so nothing here waits for a key that may never come.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist


class Board(Protocol):
    """Small values under names, last writer wins."""

    def post(self, name: str, value: bytes) -> None:
        """Set ``name``."""
        ...

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        """The values of ``names``; None where nothing was posted."""
        ...

    def claim(self, name: str, value: bytes) -> bytes:
        """Set ``name`` if nothing was posted there; the value that stands."""
        ...


class StoreBoard:
    """A board in a store, over a connection of its own so that no collective's set-up delays it."""

    def __init__(self, store: dist.Store, timeout_seconds: float) -> None:
        own = store.clone()
        own.set_timeout(timedelta(seconds=timeout_seconds))
        self._store = dist.PrefixStore("heartbeat", own)
        self._complete: set[tuple[str, ...]] = set()

    def post(self, name: str, value: bytes) -> None:
        """Set ``name``."""
        self._store.set(name, value.decode())

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        """The values of ``names``; None where nothing was posted."""
        wanted = tuple(names)
        if wanted in self._complete or self._store.check(list(wanted)):
            self._complete.add(wanted)
            return [bytes(value) for value in self._store.multi_get(list(wanted))]
        return [bytes(self._store.get(name)) if self._store.check([name]) else None for name in wanted]

    def claim(self, name: str, value: bytes) -> bytes:
        """Set ``name`` if nothing was posted there; the value that stands."""
        return bytes(self._store.compare_set(name, "", value.decode()))


class FileBoard:
    """A board of files in a folder that all ranks share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def post(self, name: str, value: bytes) -> None:
        """Set ``name``: written beside, then renamed."""
        beside = self.folder / f"{name}.{os.getpid()}.tmp"
        beside.write_bytes(value)
        beside.replace(self.folder / name)

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        """The values of ``names``; None where nothing was posted."""
        return [path.read_bytes() if (path := self.folder / name).is_file() else None for name in names]

    def claim(self, name: str, value: bytes) -> bytes:
        """Set ``name`` if nothing was posted there; the value that stands."""
        beside = self.folder / f"{name}.{os.getpid()}.tmp"
        beside.write_bytes(value)
        try:
            os.link(beside, self.folder / name)
        except FileExistsError:
            return (self.folder / name).read_bytes()
        finally:
            beside.unlink()
        return value
