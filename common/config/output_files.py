"""Files that a command writes where the user says: checked before the work, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from common.errors import ConfigError, SuiteError


def require_writable(option: str, path: Path | None) -> None:
    """Check that a file can be written, so that a command fails before its work and not after it.

    Args:
        option: name of the option, for messages.
        path: file to write; its folders need not exist. None: nothing to check.

    Raises:
        ConfigError: the path is a folder, or a folder above it is a file or may not be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder: name a file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "may not be written" if folder.is_dir() else "is no folder"
        raise ConfigError(f"{option} {path}: {folder} {why}: name another file")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a temporary file and rename it, so that nobody opens an incomplete one. Make missing folders.

    Raises:
        SuiteError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise SuiteError(f"{path}: cannot be written: {error.strerror}; name another place") from error
