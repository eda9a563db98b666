"""How the halves of a frozen decoder run: one implementation of each operation, chosen by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from common.distributed.context_parallel.split import ContextSplit
from common.nn.decoder import DecoderArchitecture
from common.nn.decoder_operations import DECODER_OPERATIONS, DecoderOperations, Requested, choose_operations
from common.ops import lora_input


@dataclass(frozen=True)
class Operations(DecoderOperations):
    """The chosen implementations; signatures in :mod:`common.ops`."""

    lora_input: Any


class RequestedWithAdapters(Requested, Protocol):
    """Names of implementations, or ``auto``."""

    @property
    def lora_input(self) -> str: ...


def choose(
    requested: RequestedWithAdapters,
    architecture: DecoderArchitecture,
    split: ContextSplit,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Operations, dict[str, str]]:
    """The operations for a decoder, and the names chosen.

    Args:
        requested: what is asked for.
        architecture: sizes.
        split: of the rows over the ranks of cp.
        device, dtype: of activations.

    Raises:
        UnsupportedImplementation: naming ``model.<operation>``.
    """
    functions, names = choose_operations(
        {**DECODER_OPERATIONS, "lora_input": lora_input.IMPLEMENTATIONS}, requested, architecture, split, device, dtype
    )
    return Operations(**functions), names
