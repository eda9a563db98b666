"""Captions as the frozen text tower encodes them for the U-Net, ahead of training or beside it.

Legend: N captions, T tokens of one, K features of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.stable_diffusion.frozen.published import load_text
from benchmarks.stable_diffusion.frozen.sizes import TextSizes
from benchmarks.stable_diffusion.frozen.text import TextTower
from benchmarks.stable_diffusion.frozen.tf32 import tf32_products
from benchmarks.stable_diffusion.frozen.tokenizer import Tokenizer


class TokenEncoder:
    """The text tower with published weights.

    Args:
        sizes: of the tower.
        checkpoint: the file that has it.
        digest: that this must have; None for any.
        device, dtype: of the tower.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or another.
    """

    def __init__(
        self, sizes: TextSizes, checkpoint: Path, digest: str | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._tower = TextTower(sizes).to(device, dtype)
        load_text(checkpoint, digest, self._tower)

    @torch.no_grad()
    def __call__(self, tokens_NT: Tensor) -> Tensor:
        """(N, T, K) of rows of token ids."""
        return self._tower.encode(tokens_NT)


class CaptionEncoder:
    """Tokenizer and text tower in fp32; on a GPU its products have TF32's mantissa, that of fp16.

    Args:
        sizes, checkpoint, digest, device: see :class:`TokenEncoder`.
        vocabulary: merges of the tokenizer.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or another.
        DataError: the merges are.
    """

    def __init__(
        self, sizes: TextSizes, checkpoint: Path, digest: str | None, vocabulary: Path, device: torch.device
    ) -> None:
        self._tokenize = Tokenizer(vocabulary, sizes.vocabulary, sizes.context)
        self._encode, self._device = TokenEncoder(sizes, checkpoint, digest, device, torch.float32), device

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """(N, T, K) float32 in the memory of the host; T is the tower's context, padding included."""
        with tf32_products():
            return self._encode(self._tokenize(captions).to(self._device, non_blocking=True)).cpu()
