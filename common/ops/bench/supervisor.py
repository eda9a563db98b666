"""Run measurements in a worker process. If it fails, hangs or crashes, a new process continues with the next task."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import torch

from common.errors import SuiteError

SILENCE_S = 300
"""Seconds without output after which the worker process is killed."""

RESULT = "result "
"""Prefix of lines that :func:`supervise` yields instead of printing them."""

BUSY = "busy "
"""Prefix of lines that only show that the worker makes progress. They are not printed."""

_BEGIN = "begin "
_FAILURES = (RuntimeError, ImportError, AttributeError, TypeError, ValueError, AssertionError, SuiteError)


def failures() -> tuple[type[BaseException], ...]:
    """Return the exceptions that count as a failed task: ours, some built-in ones, and Triton's if it is installed."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return _FAILURES
    return (*_FAILURES, TritonError)


def work(tasks: list[str], run: Callable[[str], None]) -> None:
    """Run tasks in order and stop after the first failure, which may leave the device in any state."""
    for task in tasks:
        print(f"{_BEGIN}{task}", flush=True)
        try:
            run(task)
        except failures() as reason:
            message = (str(reason).strip() or "no message").splitlines()[0]
            print(f"{task:42s} {type(reason).__name__}: {message}", flush=True)
            return
        torch.cuda.empty_cache()


def supervise(
    module: str, arguments: list[str], tasks: list[str], say: Callable[[str], object] | None = None
) -> Iterator[str]:
    """Run tasks in a worker process. If a task fails, hangs or crashes, run the tasks after it in another process.

    Args:
        module: module whose command line ``python -m module arguments --worker tasks`` calls :func:`work`.
        arguments: arguments of that command line.
        tasks: names without line breaks.
        say: function that prints a line; by default ``print`` with a flush.

    Yields:
        The rest of each line that begins with ``RESULT``. Lines that begin with ``BUSY`` are dropped, others printed.
    """
    if say is None:
        say = functools.partial(print, flush=True)
    while tasks:
        command = [sys.executable, "-m", module, *arguments, "--worker", *tasks]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        begun: list[str] = []
        for text in _lines(process):
            if text.startswith(_BEGIN):
                begun.append(text.removeprefix(_BEGIN))
            elif text.startswith(RESULT):
                yield text.removeprefix(RESULT)
            elif not text.startswith(BUSY):
                say(text)
        code = process.wait()
        if code != 0:
            say(f"{begun[-1] if begun else 'nothing begun':42s} ended its process with {code}")
        if not begun:
            return
        tasks = [task for task in tasks if task not in begun]


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the output lines of a process. Kill the process if it prints nothing for ``SILENCE_S`` seconds."""
    assert process.stdout is not None
    while True:
        watch = threading.Timer(SILENCE_S, process.kill)
        watch.start()
        text = process.stdout.readline()
        watch.cancel()
        if not text:
            return
        yield text.rstrip("\n")
