"""Choice of the implementations of a trained decoder's operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.distributed.context_parallel.split import ContextSplit
from common.nn.decoder import DecoderArchitecture
from common.nn.decoder_operations import DECODER_OPERATIONS, DecoderOperations, choose_operations


def choose(
    requested: Mapping[str, str],
    architecture: DecoderArchitecture,
    split: ContextSplit,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[DecoderOperations, dict[str, str]]:
    """Return the operations and their implementations' names; see :mod:`common.nn.decoder_operations`.

    Raises:
        UnsupportedImplementation: the message names ``model.implementations.<operation>``.
    """
    functions, names = choose_operations(DECODER_OPERATIONS, requested, architecture, split, device, dtype)
    return DecoderOperations(**functions), names
