"""Files that a command writes where the user says: checked before the work, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path

from common.errors import ConfigError, SuiteError


def require_writable(option: str, path: Path | None, inputs: Iterable[Path] = ()) -> None:
    """Check that a file can be written, so that a command fails before its work and not after it.

    Args:
        option: name of the option, for messages.
        path: file to write; its folders need not exist. None: nothing to check.
        inputs: files that the command reads, and must not replace.

    Raises:
        ConfigError: the path is a folder, or a pipe or device that may not be written, or an input, or a folder above
            it is a file or may not be written.
    """
    if path is None:
        return
    if os.path.realpath(path) in map(os.path.realpath, inputs):
        raise ConfigError(f"{option} {path}: the command reads this file, and would replace it: name another file")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder: name a file")
    if _is_stream(path):
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{option} {path}: may not be written: name another file")
        return
    target = Path(os.path.realpath(path))  # the file of a link
    folder = next(parent for parent in target.parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "may not be written" if folder.is_dir() else "is no folder"
        raise ConfigError(f"{option} {path}: {folder} {why}: name another file")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a temporary file and rename it, so that nobody opens an incomplete one. Make missing folders.

    A link stays a link, and its file is replaced. Pipes, devices and the command's own output are written directly.

    Raises:
        SuiteError: it cannot be written.
    """
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    try:
        if _is_stream(path):
            _write_stream(path, data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise SuiteError(f"{path}: cannot be written: {error.strerror}; name another path") from error


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _is_stream(path: Path) -> bool:
    """Return whether a path cannot be replaced: a pipe, a device, or the file of standard output or standard error."""
    return path.exists() and not path.is_dir() and (not path.is_file() or _output_descriptor(path) is not None)


def _output_descriptor(path: Path) -> int | None:
    """Return the descriptor of standard output or standard error if it writes to this path, such as /dev/stdout."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # the descriptor is closed
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
    return None


def _write_stream(path: Path, data: bytes) -> None:
    descriptor = _output_descriptor(path)
    if descriptor is None:
        path.write_bytes(data)
        return
    sys.stdout.flush()  # earlier output comes first
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
