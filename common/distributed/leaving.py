"""Exit of a process that is a rank."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from common.distributed import job_store
from common.errors import NOT_CONVERGED


def leave(work: Callable[[], int]) -> NoReturn:
    """Run ``work`` and end the process with the exit code that it returns.

    After an exception, the message and the exit code are those of the interpreter: the code of SystemExit, 130 for
    Ctrl-C, else 1.

    A crash in native code prints its location. A process that was in a job of several ranks runs its exit handlers and
    then exits at once. Normal interpreter shutdown could abort it, because threads may still return from a wait for a
    peer; Gloo's threads live as long as any object, such as a gradient hook, refers to a process group.
    """
    faulthandler.enable()
    try:
        code = work()
    except BaseException as error:  # includes SystemExit, which Hydra raises, and Ctrl-C
        if not job_store.has_joined():
            raise
        code = _code_of(error)
    if not job_store.has_joined():
        sys.exit(code)
    if code in (0, NOT_CONVERGED) and torch.cuda.is_initialized():
        torch.cuda.cudart().cudaProfilerStop()  # an attached profiler flushes its data
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of the pipe is gone
            stream.flush()
    os._exit(code)


def _code_of(error: BaseException) -> int:
    """Return the exit code that the interpreter would use for ``error``, after printing the same message."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    if isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
        return 1
    traceback.print_exception(error)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
