"""Errors that the suite raises on purpose, and how they are printed.

Each has one message for the user: what is wrong, where, and what to do. The command line prints the message without a
traceback and exits with the class's ``exit_code``.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk, an exceeded quota, or an exceeded file-size limit."""


LONGEST = 2000
"""Largest number of characters in a printed line; a log's value may have a million."""


def printable(text: str) -> str:
    """Return ``text`` as one line for any terminal: unprintable characters escaped, long text truncated."""
    shown = "".join(_shown(character) for character in text[:LONGEST])
    return shown if len(text) <= LONGEST else f"{shown} ... ({len(text):,} characters)"


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character in "\n\t" else character.encode("unicode_escape").decode("ascii")


def print_error(error: BaseException) -> None:
    """Print an error's message to stderr; it may have several lines."""
    flush_output()
    lines = f"mlperf-suite: {type(error).__name__}: {error}".split("\n")
    print("\n".join(printable(line) for line in lines), file=sys.stderr, flush=True)


def flush_output() -> None:
    """Write buffered standard output. If that fails, discard it, so that the interpreter does not try again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        discard = os.open(os.devnull, os.O_WRONLY)
        os.dup2(discard, sys.stdout.fileno())
        os.close(discard)


class SuiteError(Exception):
    """Base class of all errors that the command line reports as one message."""

    exit_code = 1


NOT_CONVERGED = 10
"""Exit code of a run that ended properly without reaching its target."""


UNFIT = 11
"""Exit code of `doctor` for machines that were checked and are not fit."""


UNREACHABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE, errno.ENOENT,
    errno.ENOTDIR, errno.EISDIR,
)  # fmt: skip
"""Error numbers for a path that has vanished, that the user may not use, or that the file system does not serve."""


def disk_error(error: OSError, nameless: str) -> SuiteError | None:
    """Return the message about an error that the user's disk or path causes; None for any other, which is a bug.

    Args:
        nameless: stands for the path if the error has none.
    """
    if error.errno in FULL_DISK:
        return SuiteError(f"{error.filename or nameless}: {error.strerror}")
    if error.errno in UNREACHABLE and error.filename is not None:
        return DataError(f"{error.filename}: {error.strerror}")
    return None


class ConfigError(SuiteError):
    """The configuration is wrong: unknown key, wrong type, impossible layout, or a violation of the rules."""

    exit_code = 2


class DataError(SuiteError):
    """Data are missing, truncated, corrupt, or differ from their manifest."""

    exit_code = 3


class CheckpointError(SuiteError):
    """A checkpoint cannot be written or read, or does not fit this run."""

    exit_code = 4


class DeviceError(SuiteError):
    """The accelerator is missing, or PyTorch cannot use it."""

    exit_code = 5


class CaptureError(SuiteError):
    """An operation cannot be captured in a CUDA graph."""

    exit_code = 6


class RankFailure(SuiteError):
    """A rank died, stopped, or left others waiting in a collective; or a rank's scorer process died or hangs."""

    exit_code = 7


class UnsupportedImplementation(SuiteError):
    """The named implementation does not support the request."""

    exit_code = 8


class Interrupted(SuiteError):
    """A signal asked the run to stop (SIGTERM unless :meth:`came_by` is called); its log is closed as aborted."""

    exit_code = 128 + signal.SIGTERM

    def came_by(self, signum: int) -> None:
        """Set the exit code that shells use for a process ended by this signal: 130 for SIGINT, 143 for SIGTERM."""
        self.exit_code = 128 + signum
