"""The frozen encoders: T5 and CLIP for captions, and FLUX's autoencoder for pictures.

The encoders are read from a copy of the repository black-forest-labs/FLUX.1-schnell, with the packages transformers and
diffusers. As in the reference, captions are padded to a fixed length, padding is not masked, and all networks compute
in bf16. SentencePiece itself splits captions for T5, because transformers needs further packages to read its model.

Legend: N captions or pictures, T tokens of a caption, K and P features of T5 and CLIP, S side of a picture in pixels,
C channels of a latent, H its height, W its width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from benchmarks.flux1.encodings import EncodingSizes
from common.data.sources import read_sources
from common.errors import CheckpointError, ConfigError, DataError
from common.optional_packages import OptionalPackage
from common.untrusted.safetensors_header import read_header
from common.untrusted.strict_json import read_json_object

TRANSFORMERS = OptionalPackage("transformers", ("transformers:T5EncoderModel", "transformers:CLIPTextModel"))
DIFFUSERS = OptionalPackage("diffusers", ("diffusers:AutoencoderKL",))
CLIP, CLIP_TOKENIZER, T5, T5_TOKENIZER, VAE = "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "vae"
"""Folders of the repository."""
PIECES = "spiece.model"
CLIP_TOKENS = 77


def files_of(folder: Path, sizes: EncodingSizes) -> list[Path]:
    """Return the files in a copy of the repository that the encoders need: those that ``sources.yaml`` lists.

    Args:
        sizes: required sizes of the encodings.

    Raises:
        CheckpointError: a file is missing, no JSON, or no complete safetensors file, and the message names the first;
            or the networks have other sizes.
    """
    source = read_sources("flux1")["encoders"]
    paths = [folder / PurePosixPath(file.name).relative_to(source.folder) for file in source.files]
    described: dict[Path, dict[str, Any]] = {}
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: see 'mlperf-suite download benchmark=flux1 --list'")
        if path.suffix == ".safetensors":
            read_header(path)
        elif path.suffix == ".json":
            try:
                described[path] = read_json_object(path)
            except DataError as error:
                raise CheckpointError(str(error)) from error
    keys = {T5: "d_model", CLIP: "hidden_size", VAE: "latent_channels"}
    widths = tuple(described[folder / name / "config.json"].get(key) for name, key in keys.items())
    wanted = (sizes.text_width, sizes.caption_width, sizes.latent_channels)
    if widths != wanted:
        raise CheckpointError(f"{folder}: the encoders are {widths} wide, but the encodings are {wanted} wide")
    return paths


def require_packages() -> None:
    """Raise ConfigError if transformers or diffusers are not installed."""
    for package in (TRANSFORMERS, DIFFUSERS):
        if (reason := package.unavailable()) is not None:
            raise ConfigError(f"pictures are to be encoded, but {reason}: pip install 'mlperf-suite[flux-prepare]'")


class Encoders:
    """The three encoders with their tokenizers.

    Args:
        folder: copy of the repository; nothing is fetched.
        sizes: required sizes of the encodings, whose latents have one value per 8 x 8 pixels.
        dtype: bf16 for the benchmark's data.

    Raises:
        ConfigError: transformers or diffusers are not installed.
        CheckpointError: as :func:`files_of`; or a network or tokenizer is damaged.
    """

    def __init__(self, folder: Path, sizes: EncodingSizes, device: torch.device, dtype: torch.dtype) -> None:
        require_packages()
        files_of(folder, sizes)  # transformers replaces a missing vocabulary by an empty one
        import diffusers
        import transformers

        self._sizes, self._device, self._dtype = sizes, device, dtype
        self._pieces = _loaded(folder / T5_TOKENIZER / PIECES, SentencePieceProcessor)
        self._clip_tokens = _loaded(folder / CLIP_TOKENIZER, _local(transformers.CLIPTokenizer))
        self._t5 = _loaded(folder / T5, _local(transformers.T5EncoderModel)).to(device, dtype).eval()
        self._clip = _loaded(folder / CLIP, _local(transformers.CLIPTextModel)).to(device, dtype).eval()
        self._vae = _loaded(folder / VAE, _local(diffusers.AutoencoderKL, torch_dtype=dtype)).to(device).eval()

    @torch.no_grad()
    def captions(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return ``t5`` (N, T, K) and ``clip`` (N, P) on the CPU."""
        t5 = self._t5(input_ids=self.t5_tokens(captions).to(self._device))
        clip = self._clip(input_ids=self.clip_tokens(captions).to(self._device))
        return {"t5": t5.last_hidden_state.cpu(), "clip": clip.pooler_output.cpu()}

    def t5_tokens(self, captions: Sequence[str]) -> Tensor:
        """Return (N, T): pieces of each caption, which may be cut, the end of the text, and padding.

        Names of special tokens in a caption, such as ``</s>``, are text like any other.
        """
        length, end, padding = self._sizes.text_length, self._pieces.eos_id(), self._pieces.pad_id()
        rows = [[*pieces[: length - 1], end] for pieces in self._pieces.encode(list(captions))]
        return torch.tensor([row + [padding] * (length - len(row)) for row in rows])

    def clip_tokens(self, captions: Sequence[str]) -> Tensor:
        """Return (N, 77): the start, tokens of each caption, which may be cut, the end, and padding."""
        found = self._clip_tokens(
            list(captions), truncation=True, max_length=CLIP_TOKENS, padding="max_length", return_tensors="pt"
        )
        tokens: Tensor = found["input_ids"]
        return tokens

    @torch.no_grad()
    def pictures(self, pictures_N3SS: Tensor) -> dict[str, Tensor]:
        """Return ``mean`` and ``logvar`` (N, C, H, W) of pictures with values from -1 to 1, on the CPU."""
        encoded = self._vae.encode(pictures_N3SS.to(self._device, self._dtype)).latent_dist
        mean, logvar = encoded.parameters.chunk(2, 1)  # ``encoded.logvar`` is clamped, unlike the reference's
        return {"mean": mean.cpu(), "logvar": logvar.cpu()}

    def empty(self) -> dict[str, NDArray[np.float16]]:
        """Return ``t5`` (1, T, K) and ``clip`` (1, P) of the empty caption, as they are published."""
        return {name: values.float().numpy().astype(np.float16) for name, values in self.captions([""]).items()}


def _local(kind: Any, **options: Any) -> Callable[[str], Any]:
    """Return the function that reads a network or tokenizer from a folder."""
    return functools.partial(kind.from_pretrained, local_files_only=True, **options)


def _loaded(path: Path, load: Callable[[str], Any]) -> Any:
    try:
        return load(str(path))
    except (OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
