"""Operations with more than one implementation, and how one of them is chosen.

Every operation's ``__init__`` holds a visible ``IMPLEMENTATIONS`` dict, fastest first; the plain PyTorch version comes
last, runs anywhere and is what the others are tested against. A choice is made once, when a model is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from common.errors import UnsupportedImplementation

AUTO = "auto"


@dataclass(frozen=True)
class OperationRequest:
    """What an operation is going to be asked for.

    Attributes:
        device: where its tensors will live.
        dtype: dtype of its activations.
        sizes: sizes of its tensors by the names that the operation gives them.
    """

    device: torch.device
    dtype: torch.dtype
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation.

    Attributes:
        name: what the configuration calls it.
        function: the callable, or a named tuple of several that belong together, such as a forward and a backward
            pass; all implementations of an operation share their signatures.
        unsupported: the reason why it cannot serve a request, or None if it can.
    """

    name: str
    function: Any
    unsupported: Callable[[OperationRequest], str | None]


def select(implementations: Mapping[str, Implementation], requested: str, request: OperationRequest) -> Implementation:
    """Choose an implementation.

    Args:
        implementations: the operation's ``IMPLEMENTATIONS``, in order of preference.
        requested: a name out of it, or ``auto`` for the first that supports the request.
        request: what it will be asked for.

    Raises:
        UnsupportedImplementation: the named one is unknown or cannot serve the request, or none can.
    """
    if requested != AUTO:
        chosen = implementations.get(requested)
        if chosen is None:
            names = ", ".join([AUTO, *implementations])
            raise UnsupportedImplementation(f"unknown implementation {requested!r}; choose one of {names}")
        reason = chosen.unsupported(request)
        if reason is not None:
            raise UnsupportedImplementation(f"implementation {requested!r} cannot be used: {reason}")
        return chosen
    reasons = []
    for implementation in implementations.values():
        reason = implementation.unsupported(request)
        if reason is None:
            return implementation
        reasons.append(f"{implementation.name}: {reason}")
    raise UnsupportedImplementation(f"no implementation serves {request}: {'; '.join(reasons)}")


@contextlib.contextmanager
def asked_for(option: str, name: str) -> Iterator[None]:
    """Name the option of the configuration in the refusal of the ``name`` that it asks for."""
    try:
        yield
    except UnsupportedImplementation as error:
        raise UnsupportedImplementation(f"{option}={name}: {error}") from error


def always(request: OperationRequest) -> None:
    """``unsupported`` of an implementation that runs anywhere."""
