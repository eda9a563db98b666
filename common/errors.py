"""The errors that the suite raises on purpose, and how they are printed.

Each carries one message for the user: what was wrong, where, and what to do. The command line prints
that message without a traceback and exits with the class's ``exit_code``.
"""

from __future__ import annotations

import errno
import signal
import sys

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says when a disk, or what a user may have of it, is full."""


LONGEST = 2000
"""Characters of a printed line; a log's value may have a million."""


def printable(text: str) -> str:
    """``text`` as one line that any terminal takes: what cannot be seen is written as an escape, and much is cut."""
    shown = "".join(_shown(character) for character in text[:LONGEST])
    return shown if len(text) <= LONGEST else f"{shown} ... ({len(text):,} characters)"


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character in "\n\t" else character.encode("unicode_escape").decode("ascii")


def print_error(error: BaseException) -> None:
    """Print an error's one message, in as many lines as it has."""
    if sys.stdout is not None:
        sys.stdout.flush()
    lines = f"mlperf-suite: {type(error).__name__}: {error}".split("\n")
    print("\n".join(printable(line) for line in lines), file=sys.stderr, flush=True)


class SuiteError(Exception):
    """Base of every error that the command line reports as one message."""

    exit_code = 1


NOT_CONVERGED = 10
"""Exit code of a run that ended properly without reaching its target."""


UNFIT = 11
"""Exit code of `doctor` for machines that can be judged and are not fit."""


class ConfigError(SuiteError):
    """The configuration is wrong: unknown key, wrong type, impossible layout, or against the rules."""

    exit_code = 2


class DataError(SuiteError):
    """Data are missing, truncated, corrupt, or not what their manifest says."""

    exit_code = 3


class CheckpointError(SuiteError):
    """A checkpoint could not be written, read, or does not fit this run."""

    exit_code = 4


class DeviceError(SuiteError):
    """The accelerator is missing or unusable by PyTorch."""

    exit_code = 5


class CaptureError(SuiteError):
    """An operation cannot be captured in a CUDA graph."""

    exit_code = 6


class RankFailure(SuiteError):
    """A rank died, stopped, or left the others waiting in a collective; or what scores for one died or is stuck."""

    exit_code = 7


class UnsupportedImplementation(SuiteError):
    """An implementation was named that cannot serve the request."""

    exit_code = 8


class Interrupted(SuiteError):
    """The run was asked to stop by a signal, SIGTERM if nobody knows better; its log is closed as aborted."""

    exit_code = 128 + signal.SIGTERM

    def came_by(self, signum: int) -> None:
        """Take the exit code that shells give what a signal ended: 130 of SIGINT (Ctrl-C), 143 of SIGTERM."""
        self.exit_code = 128 + signum
