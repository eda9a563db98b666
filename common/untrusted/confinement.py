"""Limits for a process that reads untrusted files: memory, time, other programs, and files.

This runs in the process itself, before it imports anything that reads those files. :mod:`common.untrusted.confined`
starts such processes.
"""

from __future__ import annotations

import os
import resource
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

MEBIBYTE = 2**20
FILE_MEGABYTES = 64
"""Largest file that the process may write."""
READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_DIRECTORY | os.O_NOFOLLOW
FORBIDDEN = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "os.kill",
    "pty.spawn",
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "shutil.move",
    "shutil.copyfile",
    "shutil.unpack_archive",
    "ftplib.",
    "urllib.",
)
"""Audit events, or their prefixes, that raise an error. MLCommons' checkers need none of them."""
_WRITING = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
    "shutil.rmtree",
)  # fmt: skip


def confine(megabytes: int, seconds: int, readable: Sequence[str], writable: str) -> None:
    """Limit this process permanently.

    Args:
        megabytes: limit for data (heap and anonymous mappings); more raises ``MemoryError``.
        seconds: limit for processor time, after which the kernel ends the process.
        readable: files, and folders with everything below them, that may be opened in addition to the installed
            packages.
        writable: the only folder below which files may be written.
    """
    for limit, value in (
        (resource.RLIMIT_DATA, megabytes * MEBIBYTE),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, FILE_MEGABYTES * MEBIBYTE),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    installed = [
        sys.prefix,
        sys.exec_prefix,
        sys.base_prefix,
        sys.base_exec_prefix,
        *sys.path,
        os.path.dirname(os.__file__),
    ]
    system = ["/dev/null", "/dev/urandom", "/proc/self", "/proc/cpuinfo", "/sys/devices/system", "/etc/localtime"]
    sys.addaudithook(_hook([*installed, *system, *readable], writable))


def _hook(readable: Sequence[str], writable: str) -> Callable[[str, tuple[Any, ...]], None]:
    may_read = tuple({os.path.realpath(path) for path in readable if path})
    own = os.path.realpath(writable)

    def within(path: object, roots: Sequence[str]) -> bool:
        if isinstance(path, int):  # a file descriptor, which was opened before
            return True
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        real = os.path.realpath(os.fsdecode(path))
        return any(real == root or real.startswith(root.rstrip("/") + "/") for root in roots)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = bool(set(mode or "") & set("wax+")) or (mode is None and (flags or 0) & ~READ_ONLY)
            if not within(path, (own,) if writes else (*may_read, own)):
                raise PermissionError(f"a confined process may not {'write' if writes else 'read'} {path!r}")
        elif event.startswith(FORBIDDEN) or (
            event.startswith(_WRITING) and not all(within(path, (own,)) for path in arguments[: _paths(event)])
        ):
            raise PermissionError(f"a confined process may not call {event}")

    return hook


def _paths(event: str) -> int:
    """Return how many of an event's arguments are paths."""
    return 2 if event in ("os.rename", "os.link", "os.symlink") else 1


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run a module as a program with ``arguments``; exit as it does."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
