"""Optional packages: check that this process can import the parts of a package that the suite uses.

That a package is installed says little: it may have been built for another PyTorch, lack one of its own requirements or
be half removed. An implementation that uses an optional package therefore imports it before it is chosen, and the
error of the import is the reason for the next choice.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from dataclasses import dataclass

_broken: dict[str, str] = {}


@dataclass(frozen=True)
class OptionalPackage:
    """A package that users install if they want it.

    Attributes:
        name: its name in the package registry.
        imports: what the suite imports from it, each ``module`` or ``module:attribute``.
        version: the only version that works; None if no version is known to fail.
    """

    name: str
    imports: tuple[str, ...]
    version: str | None = None

    def unavailable(self) -> str | None:
        """Return why this process cannot use the package, or None if it can.

        The first call imports the package, which can take seconds; later calls return the same answer.
        """
        return _import_all(self)


@functools.cache
def _import_all(package: OptionalPackage) -> str | None:
    if package.version is not None:
        try:
            installed = importlib.metadata.version(package.name)
        except importlib.metadata.PackageNotFoundError:
            return f"{package.name} is not installed"
        if installed != package.version:
            return f"{package.name} {installed} is installed, and the suite works with {package.version} only"
    for wanted in package.imports:
        module, _, attribute = wanted.partition(":")
        try:
            found = importlib.import_module(module)
            if attribute:
                getattr(found, attribute)
        except Exception as error:  # noqa: BLE001  a broken package may raise anything while it is imported
            if isinstance(error, ModuleNotFoundError) and _is_absent(package, module, error.name):
                return f"{package.name} is not installed"
            lines = str(error).strip().splitlines() or ["no message"]
            reason = f"{package.name} is installed, but importing {module} fails: {type(error).__name__}: {lines[0]}"
            _broken[package.name] = reason
            return reason
    return None


def _is_absent(package: OptionalPackage, module: str, not_found: str | None) -> bool:
    """Return whether the package is not there at all, rather than without one of its parts."""
    if not_found is None or not f"{module}.".startswith(f"{not_found}."):
        return False
    try:
        importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def broken_packages() -> list[str]:
    """Return why each installed package that this process failed to import cannot be imported."""
    return list(_broken.values())
