"""Caption encoders: the frozen text tower, used before training or next to it.

Legend: N captions, T tokens of a caption, K features of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.stable_diffusion.frozen.clip import TextTower
from benchmarks.stable_diffusion.frozen.clip_tokenizer import ClipTokenizer
from benchmarks.stable_diffusion.frozen.inference import tf32_products
from benchmarks.stable_diffusion.frozen.published import load_text
from benchmarks.stable_diffusion.frozen.sizes import TextSizes


class TokenEncoder:
    """The text tower with published weights.

    Args:
        checkpoint: file with the weights.
        digest: expected digest of the file; None accepts any.
        device, dtype: where and in which precision the tower runs.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has another digest or other tensors.
    """

    def __init__(
        self, sizes: TextSizes, checkpoint: Path, digest: str | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._tower = TextTower(sizes).to(device, dtype)
        load_text(checkpoint, digest, self._tower)

    @torch.no_grad()
    def __call__(self, tokens_NT: Tensor) -> Tensor:
        """Encode rows of token ids as (N, T, K)."""
        return self._tower.encode(tokens_NT)


class CaptionEncoder:
    """Tokenizer and fp32 text tower. On a GPU its matrix products use TF32, whose mantissa is as long as that of fp16.

    Args:
        sizes, checkpoint, digest, device: see :class:`TokenEncoder`.
        vocabulary: file with the tokenizer's merges.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has another digest or other tensors.
        DataError: the file of merges is missing or damaged.
    """

    def __init__(
        self, sizes: TextSizes, checkpoint: Path, digest: str | None, vocabulary: Path, device: torch.device
    ) -> None:
        self._tokenize = ClipTokenizer(vocabulary, sizes.vocabulary, sizes.context)
        self._encode, self._device = TokenEncoder(sizes, checkpoint, digest, device, torch.float32), device

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Encode captions as (N, T, K) float32 on the CPU; T is the tower's context length, padding included."""
        with tf32_products():
            return self._encode(self._tokenize(captions).to(self._device, non_blocking=True)).cpu()
