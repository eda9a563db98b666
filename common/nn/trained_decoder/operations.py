"""How the halves of a trained decoder run: one implementation of each operation, chosen by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from common.distributed.context_parallel.split import ContextSplit
from common.nn.decoder import DecoderArchitecture
from common.nn.decoder_operations import DECODER_OPERATIONS, Attending, choose_operations


@dataclass(frozen=True)
class Operations:
    """The chosen implementations; signatures in :mod:`common.ops`."""

    rms_norm: Any
    rope: Any
    swiglu: Any
    attention: Attending


class Requested(Protocol):
    """Names of implementations, or ``auto``."""

    @property
    def attention(self) -> str: ...
    @property
    def rms_norm(self) -> str: ...
    @property
    def rope(self) -> str: ...
    @property
    def swiglu(self) -> str: ...


def choose(
    requested: Requested,
    architecture: DecoderArchitecture,
    split: ContextSplit,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Operations, dict[str, str]]:
    """The operations for a decoder, and the names chosen; see :func:`common.nn.decoder_operations.choose_operations`.

    Raises:
        UnsupportedImplementation: naming ``model.<operation>``.
    """
    functions, names = choose_operations(DECODER_OPERATIONS, requested, architecture, split, device, dtype)
    return Operations(**functions), names
