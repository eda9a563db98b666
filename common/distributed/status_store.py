"""Status store: ranks publish small values for each other in a process-group store or in a shared folder.

Background threads use it during training, so no method waits for a key that may never be set.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist


class StatusStore(Protocol):
    """Status store of named small values; the last writer wins."""

    def post(self, name: str, value: bytes) -> None:
        """Store ``value`` under ``name``."""
        ...

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the values of ``names``, with None for each name that is not set."""
        ...

    def claim(self, name: str, value: bytes) -> bytes:
        """Store ``value`` unless ``name`` is already set. Return the stored value."""
        ...


class SharedStatusStore(StatusStore):
    """Status store in a ``dist.Store``; its separate connection keeps it independent of collectives that block.

    Args:
        timeout_seconds: largest time that a call may wait for the store.
    """

    def __init__(self, store: dist.Store, timeout_seconds: float) -> None:
        own = store.clone()
        own.set_timeout(timedelta(seconds=timeout_seconds))
        self._store = dist.PrefixStore("heartbeat", own)
        self._complete: set[tuple[str, ...]] = set()

    def post(self, name: str, value: bytes) -> None:
        self._store.set(name, value.decode())

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        wanted = tuple(names)
        if wanted in self._complete or self._store.check(list(wanted)):
            self._complete.add(wanted)
            return [bytes(value) for value in self._store.multi_get(list(wanted))]
        return [bytes(self._store.get(name)) if self._store.check([name]) else None for name in wanted]

    def claim(self, name: str, value: bytes) -> bytes:
        return bytes(self._store.compare_set(name, "", value.decode()))


class StatusFiles(StatusStore):
    """Status store of files in a folder that all ranks share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def post(self, name: str, value: bytes) -> None:
        # The file is written under a temporary name and then renamed, so no rank reads a part of it.
        beside = self._temporary(name)
        beside.write_bytes(value)
        beside.replace(self.folder / name)

    def _temporary(self, name: str) -> Path:
        # Containers on two hosts can have the same process id, and even the same host name.
        return self.folder / f"{name}.{uuid.uuid4().hex}.tmp"

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        return [path.read_bytes() if (path := self.folder / name).is_file() else None for name in names]

    def claim(self, name: str, value: bytes) -> bytes:
        beside = self._temporary(name)
        beside.write_bytes(value)
        try:
            os.link(beside, self.folder / name)
        except FileExistsError:
            return (self.folder / name).read_bytes()
        finally:
            beside.unlink()
        return value
