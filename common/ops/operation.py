"""Operations: one declaration each, and the choice among their implementations.

The ``__init__`` of an operation's package declares an :class:`Operation`. Its reference is plain PyTorch and runs on
every device; tests compare the other implementations with it. The faster implementations follow in order of preference.
The choice is made once, when a model is built, and an implementation's module is imported only then.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch

from common.errors import ConfigError, UnsupportedImplementation

AUTO = "auto"
REFERENCE = "reference"


MOST_COMPILATIONS = 256
"""Largest number of sets of shapes for which :func:`compiled_references` compiles a function."""

_compiling = ContextVar("compiled references", default=False)


@dataclass(frozen=True)
class OperationRequest:
    """Device, dtype and sizes for which a model needs an operation.

    Attributes:
        sizes: sizes of the tensors, by the names that the operation's docstring lists.
    """

    device: torch.device
    dtype: torch.dtype
    sizes: Mapping[str, int] = field(default_factory=dict)


def runs_anywhere(request: OperationRequest) -> None:
    """Return None: the ``unsupported`` function of an implementation that supports every request."""


@dataclass(frozen=True)
class Implementation:
    """A faster implementation of an operation.

    Attributes:
        source: a function, or a named tuple of functions of the same type as the reference. A string
            ``module:attribute`` is imported when the implementation is chosen. For ``module`` alone, the module defines
            a function for each field of the named tuple.
        unsupported: function that returns why the implementation cannot serve a request, or None if it can.
        automatic: whether ``auto`` may choose it. False if the precision differs or results vary from run to run.
    """

    source: Any
    unsupported: Callable[[OperationRequest], str | None] = runs_anywhere
    automatic: bool = True


class Choice(NamedTuple):
    """The implementation that a model uses.

    Attributes:
        name: ``reference``, or a name in :attr:`Operation.fast`.
        function: the function or named tuple of functions.
    """

    name: str
    function: Any


@dataclass(frozen=True)
class Operation:
    """An operation and its implementations, which all have the signatures of the reference.

    Attributes:
        name: name of the operation in messages. A workload's ``OPERATIONS`` has the keys of the configuration.
        reference: a function, or a named tuple of functions that belong together, such as forward and backward.
        fast: faster implementations by name, in order of preference.
        kernel_names: pairs of a kind of work and a regular expression that matches the names of its kernels, for the
            breakdown of a step.
        former: current names of implementations by former name, for error messages. ``plain`` and ``torch`` are former
            names of the reference unless listed here.
        cases: ``module:attribute`` of the :class:`common.ops.cases.Case` tuple for tests, bench and sweep; the default
            attribute is ``CASES``. The module is imported on demand.
    """

    name: str
    reference: Any
    fast: dict[str, Implementation] = field(default_factory=dict)
    kernel_names: tuple[tuple[str, str], ...] = ()
    former: Mapping[str, str] = field(default_factory=dict)
    cases: str = ""

    def __post_init__(self) -> None:
        for name in (AUTO, REFERENCE):
            if name in self.fast:
                raise ValueError(f"{self.name}: {name} cannot name a faster implementation")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all implementations, the reference last."""
        return (*self.fast, REFERENCE)

    def require(self, name: str) -> None:
        """Check that an implementation exists.

        Raises:
            UnsupportedImplementation: ``name`` is neither ``auto`` nor one of :attr:`names`.
        """
        if name not in (AUTO, *self.names):
            known = ", ".join((AUTO, *self.names))
            now = {"plain": REFERENCE, "torch": REFERENCE, **self.former}.get(name)
            hint = f" ({name!r} is {now!r} now)" if now else ""
            raise UnsupportedImplementation(f"{self.name} has no implementation {name!r}{hint}; choose one of {known}")

    def unsupported(self, name: str, request: OperationRequest) -> str | None:
        """Return why the implementation ``name`` cannot serve ``request``, or None if it can."""
        return None if name == REFERENCE else self.fast[name].unsupported(request)

    def function(self, name: str) -> Any:
        """Import an implementation, whether or not this machine can run it.

        Returns:
            A function, or a named tuple of functions of the type of the reference.

        Raises:
            KeyError: there is no such implementation.
        """
        if name == REFERENCE:
            return compiled(self.reference) if _compiling.get() else self.reference
        source = self.fast[name].source
        if not isinstance(source, str):
            return source
        module, _, attribute = source.partition(":")
        imported = importlib.import_module(module)
        if attribute:
            return getattr(imported, attribute)
        return type(self.reference)(*(getattr(imported, part) for part in self.reference._fields))

    def choice(self, name: str) -> Choice:
        """Return the implementation ``name`` without checking a request; see :meth:`function`."""
        return Choice(name, self.function(name))

    def select(self, requested: str, request: OperationRequest) -> Choice:
        """Choose an implementation and import it.

        Args:
            requested: one of :attr:`names`, or ``auto`` for the first automatic one that supports the request.

        Raises:
            UnsupportedImplementation: the requested implementation does not exist or cannot serve the request.
        """
        self.require(requested)
        if requested != AUTO:
            reason = self.unsupported(requested, request)
            if reason is not None:
                raise UnsupportedImplementation(f"implementation {requested!r} of {self.name} cannot be used: {reason}")
            return self.choice(requested)
        for name, implementation in self.fast.items():
            if implementation.automatic and implementation.unsupported(request) is None:
                return self.choice(name)
        return self.choice(REFERENCE)


def can_compile(reference: Any) -> bool:
    """Return whether :func:`compiled` can compile a reference; classes, such as those of update rules, it cannot."""
    return isinstance(reference, FunctionType | tuple)


def compiled(reference: Any) -> Any:
    """Return a reference compiled by ``torch.compile``; a class is returned as it is."""
    if not can_compile(reference):
        return reference
    if not isinstance(reference, tuple):
        return torch.compile(reference, dynamic=False)
    functions: Any = type(reference)
    return functions(*(torch.compile(function, dynamic=False) for function in reference))


@contextlib.contextmanager
def compiled_references() -> Iterator[None]:
    """Compile the references that are chosen in the context.

    Within the context, a function that would be compiled for too many sets of shapes raises an error; by default,
    PyTorch would run it uncompiled.
    """
    token = _compiling.set(True)
    try:
        with torch._dynamo.config.patch(recompile_limit=MOST_COMPILATIONS, fail_on_recompile_limit_hit=True):
            yield
    finally:
        _compiling.reset(token)


OPTION = "model.implementations"
"""Configuration key of the mapping from operations to implementations."""


@contextlib.contextmanager
def asked_for(option: str, name: str) -> Iterator[None]:
    """Add ``option=name`` to the message of an :class:`UnsupportedImplementation` that is raised inside."""
    try:
        yield
    except UnsupportedImplementation as error:
        raise UnsupportedImplementation(f"{option}={name}: {error}") from error


def select(requested: Mapping[str, str], name: str, operation: Operation, request: OperationRequest) -> Choice:
    """Choose the implementation of an operation.

    Args:
        requested: ``model.implementations``; operations that are not in it are ``auto``.
        name: key of the operation in ``requested``.

    Raises:
        UnsupportedImplementation: see :meth:`Operation.select`; the message names the key of the configuration.
    """
    implementation = requested.get(name, AUTO)
    with asked_for(f"{OPTION}.{name}", implementation):
        return operation.select(implementation, request)


def choose(
    requested: Mapping[str, str], operations: Mapping[str, Operation], request: OperationRequest
) -> dict[str, Choice]:
    """Choose the implementations of several operations for one request; see :func:`select`."""
    return {name: select(requested, name, operation, request) for name, operation in operations.items()}


def all_implementations(requested: Mapping[str, str], operations: Mapping[str, Operation]) -> dict[str, str]:
    """Check ``model.implementations`` against the operations that a workload uses.

    Returns:
        The requested implementation of each operation, ``auto`` if the user requests none.

    Raises:
        ConfigError: the workload does not have the operation, or the operation does not have the implementation.
    """
    for name, implementation in requested.items():
        if name not in operations:
            raise ConfigError(f"implementations.{name}: unknown operation; there are {', '.join(operations)}")
        try:
            operations[name].require(implementation)
        except UnsupportedImplementation as error:
            raise ConfigError(f"implementations.{name}={implementation}: {error}") from error
    return {name: requested.get(name, AUTO) for name in operations}
