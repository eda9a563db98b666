"""The decorator of functions that numba compiles.

numba stores compiled functions on disk, but checks only the source file of the function itself, not the files of the
functions that it calls. So the cache folder has in its name a digest of all modules with compiled functions, and of the
modules that these import, because compiled code contains the values of constants.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from common.errors import ConfigError

numba: Any = importlib.import_module("numba") if importlib.util.find_spec("numba") else None

_SOURCES = Path(__file__).parent

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` compiled by numba at its first call, or loaded from the cache.

    The function may not create arrays, except views of its arguments, because it is compiled without counts of
    references: they would take most of the time of short functions.

    Without numba, modules of compiled functions can still be imported, and a call raises :class:`ConfigError`.
    """
    return _compiled(function, _nrt=False)


def allocating(function: Callable[P, R]) -> Callable[P, R]:
    """Return a compiled function, as :func:`compiled` does, that may create arrays."""
    return _compiled(function)


def _compiled(function: Callable[P, R], **options: bool) -> Callable[P, R]:
    if numba is None:
        return _missing(function)
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = before or str(cache_folder())  # numba reads it while it decorates
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    finally:
        numba.config.CACHE_DIR = before


def _missing(function: Callable[P, R]) -> Callable[P, R]:
    def refuse(*_args: P.args, **_named: P.kwargs) -> R:
        raise ConfigError(
            f"{function.__module__} needs numba for its compiled functions: pip install 'mlperf-suite[minigo]'"
        )

    return refuse


def compiled_sources() -> list[Path]:
    """Return the modules of this package whose changes change compiled code, sorted."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in _SOURCES.glob("*.py")}
    imports = {name: set(re.findall(rf"^from {__package__}\.(\w+) import", text, re.M)) for name, text in texts.items()}
    found = {Path(__file__).stem} | {name for name, imported in imports.items() if Path(__file__).stem in imported}
    while added := set().union(*(imports[name] for name in found)) - found:
        found |= added
    return [_SOURCES / f"{name}.py" for name in sorted(found)]


def cache_folder() -> Path:
    """Return the folder of compiled functions: NUMBA_CACHE_DIR if set, else one below the user's cache folder.

    The package may be installed read-only, so the folder is not beside the sources. If the user's cache folder cannot
    be written, as in a container without a home, a folder below the folder of temporary files replaces it. There
    only this user may be able to write, because numba executes what the files contain.
    """
    digest = hashlib.sha256()
    for path in compiled_sources():
        digest.update(path.read_bytes())
    name = f"minigo-{digest.hexdigest()[:16]}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache"))
    temporary = Path(tempfile.gettempdir(), f"mlperf-suite-{os.getuid()}")
    for parent in (home / "mlperf-suite", temporary):
        folder = parent / name
        try:
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if parent == temporary and not _private(parent):
                continue
            folder.mkdir(exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise ConfigError(
        f"no folder for compiled functions in {home} or {temporary} can be written, or others can write there too: "
        "set NUMBA_CACHE_DIR"
    )


def _private(folder: Path) -> bool:
    """Return whether ``folder`` is a folder of this user, no link, in which no other user can write."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
