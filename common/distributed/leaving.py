"""How a process ends that is a rank."""

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
    """Do a process's ``work`` and end the process with the exit code that it returns, or 1 after an exception.

    A crash in native code says where it happened. A process that was in a job of several ranks runs its exit handlers
    and is gone: taking the interpreter down could abort it, because threads may still come back from a wait for a peer,
    and Gloo's live as long as anything refers to a process group, be it only a gradient's hook.
    """
    faulthandler.enable()
    try:
        code = work()
    except BaseException as error:  # also what Hydra raises to exit, and Ctrl-C
        if not job_store.has_joined():
            raise
        code = _code_of(error)
    if not job_store.has_joined():
        sys.exit(code)
    if code in (0, NOT_CONVERGED) and torch.cuda.is_initialized():
        torch.cuda.cudart().cudaProfilerStop()  # a profiler around the process writes what it has not written yet
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _code_of(error: BaseException) -> int:
    """The exit code of a process that ``error`` ends, after its message, as the interpreter has it."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    if isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
        return 1
    traceback.print_exception(error)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
