"""How a process ends that is a rank."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from common.distributed import job_store


def leave(work: Callable[[], int]) -> NoReturn:
    """Do a process's ``work`` and end the process with the exit code that it returns, or 1 after an exception.

    A crash in native code says where it happened. A process that was in a job of several ranks runs its exit handlers
    and is gone: taking the interpreter down could abort it, because threads may still come back from a wait for a peer,
    and Gloo's live as long as anything refers to a process group, be it only a gradient's hook.
    """
    faulthandler.enable()
    code = 1
    try:
        code = work()
    except Exception:
        if not job_store.has_joined():
            raise
        traceback.print_exc()
    if not job_store.has_joined():
        sys.exit(code)
    if code == 0 and torch.cuda.is_initialized():
        torch.cuda.cudart().cudaProfilerStop()  # a profiler around the process writes what it has not written yet
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
