"""Choice of the implementations of a frozen decoder's operations."""

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
"""Operations of a frozen decoder by name, as in ``model.implementations``."""


@dataclass(frozen=True)
class Operations(DecoderOperations):
    """The chosen implementations. :mod:`common.ops` documents the signatures."""

    lora_input: Any


def choose(
    requested: Mapping[str, str],
    architecture: DecoderArchitecture,
    split: ContextSplit,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Operations, dict[str, str]]:
    """Return the chosen operations of a decoder, and the names of their implementations.

    Args:
        requested: ``model.implementations``.
        split: how rows are split over the cp ranks.
        device, dtype: device and dtype of the activations.

    Raises:
        UnsupportedImplementation: the message names ``model.implementations.<operation>``.
    """
    functions, names = choose_operations(FROZEN_DECODER_OPERATIONS, requested, architecture, split, device, dtype)
    return Operations(**functions), names
