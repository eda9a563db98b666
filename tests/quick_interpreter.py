"""Let Triton's interpreter search the names that it replaces once per module, not in each call of a device function."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from triton.language import core
from triton.runtime import interpreter


@functools.cache
def _builtin_names(package: Any) -> tuple[str, ...]:
    """Return the names of the functions of a module or class that the interpreter replaces."""
    return tuple(name for name, member in inspect.getmembers(package) if core.is_builtin(member))


def _patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
    """Replace the functions that are not replaced yet, as the interpreter's function of this name does."""
    for name in _builtin_names(package):
        member = getattr(package, name)
        if core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, *scope)


def install() -> None:
    """Replace the interpreter's function in this process and in those that are forked off it.

    Versions of Triton without this private function keep their own.
    """
    known = getattr(interpreter, "_patch_builtin", None)
    if known is not None and list(inspect.signature(known).parameters) == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = _patch_builtin
