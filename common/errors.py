"""The errors that the suite raises on purpose.

Each carries one message for the user: what was wrong, where, and what to do. The command line prints
that message without a traceback and exits with the class's ``exit_code``.
"""


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
    """A rank died, stopped, or left the others waiting in a collective."""

    exit_code = 7


class UnsupportedImplementation(SuiteError):
    """An implementation was named that cannot serve the request."""

    exit_code = 8


class Interrupted(SuiteError):
    """The run was asked to stop by a signal; its log is closed as aborted."""

    exit_code = 143
