"""Fork processes off one that has imported the suite, because starting Python takes longer than most tests.

They have their own process group, environment, folder and streams. Runs on a CPU warm up with one step, and draw no
summary unless :data:`PICTURE` is set.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import connection, reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from hydra.core.global_hydra import GlobalHydra

from common import cli
from common.distributed import launcher
from common.evaluation import scorer_process
from common.observe import summary
from common.step import graphs

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])
"""Starts processes that have already imported slow modules."""

PICTURE = "SUMMARY_PICTURE"
"""Environment variable with which a run draws its summary, which takes half a second."""

FORKING = threading.Lock()
"""Lock for starting processes, which also collects exit codes; two threads must not collect the same one."""


class Descriptor:
    """A file descriptor that a started process gets under the same number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, duplicate: Any) -> None:
        self.number = duplicate.detach()


class Forked:
    """``python -m ...`` in a process of its own, with what tests need of :class:`subprocess.Popen`.

    Args:
        command: ``[sys.executable, "-m", module, *arguments]``.
        cwd: the folder that it works in.
        environment: all of its variables.
        file_size: bytes that a file may have before writing fails, as on a full disk.
        streams: descriptors of its standard input, output and errors, of which None is closed in the process;
            :meth:`communicate` has what it writes without ``streams``.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        file_size: int | None = None,
        streams: Sequence[int | None] | None = None,
    ) -> None:
        assert list(command[:2]) == [sys.executable, "-m"], command
        self.args = list(command)
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name) / name for name in ("output", "errors")]
        opened = []
        if streams is None:
            files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in self._streams]
            streams = opened = [os.open(os.devnull, os.O_RDONLY), *files]
        arguments = (
            self.args,
            cwd,
            dict(environment),
            [None if stream is None else Descriptor(stream) for stream in streams],
            file_size,
        )
        self._process = FORKS.Process(target=_become, args=arguments)
        with FORKING:
            self._process.start()
        for descriptor in opened:
            os.close(descriptor)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def sentinel(self) -> int:
        """Descriptor on which :func:`multiprocessing.connection.wait` waits for the end."""
        return self._process.sentinel

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended the process; None while it runs."""
        with FORKING:
            return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        """Return code of :meth:`poll`."""
        return self.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end. Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        with FORKING:
            self._process.join()
        return self.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait as :meth:`wait` does, and return the text of standard output and standard error."""
        self.wait(timeout)
        output, errors = (stream.read_text() if stream.exists() else "" for stream in self._streams)
        return output, errors

    def send_signal(self, signum: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkedRank:
    """A rank that the suite's launcher forks, with the methods of :class:`subprocess.Popen` that the launcher calls."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], process_group: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.code: int | None = None
        self.pid = os.fork()
        with contextlib.suppress(OSError):  # both sides do it: the other may have been first, or be gone
            os.setpgid(self.pid, process_group)
        if self.pid == 0:
            for signum, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
                signal.signal(signum, handler)
            GlobalHydra.instance().clear()  # the launcher has read the command line
            _run(command, env)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def send_signal(self, signum: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signum)


class ForkedScorer(ForkedRank):
    """The forked scorer process of a rank, with its end of the connection, in its own session."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], **others: object
    ) -> None:
        assert others == {"stdin": subprocess.DEVNULL, "start_new_session": True}
        self.code = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            kept = 0
            for descriptor in sorted({2, *pass_fds}):
                os.closerange(max(kept, 3), descriptor)
                kept = descriptor + 1
            os.closerange(kept, os.sysconf("SC_OPEN_MAX"))
            _run(command, env)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end without a limit."""
        return super().wait()

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        self.send_signal(signal.SIGKILL)


def _become(
    command: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    streams: Sequence[Descriptor | None],
    file_size: int | None,
) -> NoReturn:
    """Set up the forked process as a new process would be."""
    for number, stream in enumerate(streams):
        if stream is not None:
            os.dup2(stream.number, number)
            os.close(stream.number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if streams[number] is None:  # the interpreter sets the object to None if the descriptor is closed
            os.close(number)
            setattr(sys, name, None)
    if "PYTHONUNBUFFERED" in environment and sys.stdout is not None:
        sys.stdout.reconfigure(write_through=True)
    os.chdir(cwd)
    if environment.get("CUDA_VISIBLE_DEVICES") == "":  # a process that has looked for GPUs cannot be forked
        ranks: Any = SimpleNamespace(Popen=ForkedRank)
        launcher.subprocess = ranks
        scorers: Any = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedScorer})
        scorer_process.subprocess = scorers
        _leave_out_warm_ups()
    if PICTURE not in environment:
        summary.draw = lambda *_: None
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # the variable has been read
    _run(command, environment)


def _leave_out_warm_ups() -> None:
    """Warm up with one step; only the capture of CUDA graphs needs more."""
    assert graphs.StepRunner.warm_up.__defaults__ == (graphs.WARM_UP_ITERATIONS,)
    graphs.WARM_UP_ITERATIONS = 1
    graphs.StepRunner.warm_up.__defaults__ = (1,)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    os.environ.clear()
    os.environ.update(environment)
    _, _, module, *sys.argv[1:] = command
    code: Any = 0
    try:
        if module == "common.cli":  # runpy complains about a module that is imported already
            sys.argv[0] = str(cli.__file__)
            cli.main()
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001 - what the interpreter does at the end of a process
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
