"""How the halves of a frozen decoder run: one implementation of each operation, chosen by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from common.distributed.context_parallel.split import ContextSplit
from common.nn.decoder import DecoderArchitecture
from common.nn.decoder_operations import DECODER_OPERATIONS, DecoderOperations, choose_operations
from common.ops.lora_input import LORA_INPUT
from common.ops.operation import Operation

FROZEN_DECODER_OPERATIONS: dict[str, Operation] = {**DECODER_OPERATIONS, "lora_input": LORA_INPUT}
"""Operations of a frozen decoder, by their names in ``model.implementations``."""


@dataclass(frozen=True)
class Operations(DecoderOperations):
    """The chosen implementations; signatures in :mod:`common.ops`."""

    lora_input: Any


def choose(
    requested: Mapping[str, str],
    architecture: DecoderArchitecture,
    split: ContextSplit,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Operations, dict[str, str]]:
    """The operations for a decoder, and the names chosen.

    Args:
        requested: ``model.implementations``.
        architecture: sizes.
        split: of the rows over the ranks of cp.
        device, dtype: of activations.

    Raises:
        UnsupportedImplementation: naming ``model.implementations.<operation>``.
    """
    functions, names = choose_operations(FROZEN_DECODER_OPERATIONS, requested, architecture, split, device, dtype)
    return Operations(**functions), names
