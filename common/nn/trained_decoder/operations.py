"""How the halves of a trained decoder run: one implementation of each operation, chosen by name."""

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
    """The operations for a decoder, and the names chosen; see :func:`common.nn.decoder_operations.choose_operations`.

    Raises:
        UnsupportedImplementation: naming ``model.implementations.<operation>``.
    """
    functions, names = choose_operations(DECODER_OPERATIONS, requested, architecture, split, device, dtype)
    return DecoderOperations(**functions), names
