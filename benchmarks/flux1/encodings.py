"""Encodings of captions and pictures: the published files, and the prepared format, which reads them in place.

A sample has four arrays in bf16: the caption encoded by T5 (``t5``, (T, K)) and by CLIP (``clip``, (P,)), and mean and
log-variance of the picture's latent (``mean``, ``logvar``, (C, H, W)). Validation samples also have a ``timestep``. Two
forms of files are published (:mod:`common.formats.array_shards`): arrow by MLCommons, and tars by NVIDIA.

The encodings of the empty caption are ``t5_empty.npy`` and ``clip_empty.npy``, float16 with a leading axis of size 1.

A prepared folder has

- ``train/00000.arrow`` ..., ``validation/00000.arrow`` ... (or ``.tar``): the published files, unchanged, in order;
- ``train/index.npy``, ``validation/index.npy``: positions of the arrays (:mod:`common.data.indexed_arrays`);
- ``validation/timesteps.npy``, int64 (S,);
- ``t5_empty.npy``, ``clip_empty.npy``, and ``manifest.json``, with the numbers of samples and the sizes of the arrays.

Legend: S samples, T tokens of a caption, K and P features of T5 and CLIP, C channels of a latent, H its height, W its
width.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data import manifest
from common.data.manifest import Manifest
from common.data.options import Option, Options
from common.errors import DataError
from common.formats import npy
from common.formats.array_shards import ArrayShards
from common.mlperf.fixed import benchmark_settings

FORMAT = "flux-encodings/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=flux1 --raw-dir RAW --data-dir DATA"
REMEDY = f"run '{PREPARE_COMMAND}'"
SPLITS = {"train": "train", "eval": "validation"}
"""Folder of each split."""
SHARDS = ArrayShards({"t5": "t5_encodings", "clip": "clip_encodings", "mean": "mean", "logvar": "logvar"}, "timestep")
EMPTY = {"t5": "t5_empty.npy", "clip": "clip_empty.npy"}
TIMESTEPS = "timesteps.npy"
BINS: int = benchmark_settings("flux1")["facts"]["eval_timesteps"]
"""Number of the benchmark's timesteps."""


@dataclass(frozen=True)
class EncodingSizes(Options):
    """Sizes of the arrays, by default those of the benchmark: T, K, P, C, and H, which is W."""

    text_length: Annotated[int, Option("tokens of a caption", least=1)] = 256
    text_width: Annotated[int, Option("features of T5", least=1)] = 4096
    caption_width: Annotated[int, Option("features of CLIP", least=1)] = 768
    latent_channels: Annotated[int, Option("channels of a latent", least=1)] = 16
    latent_size: Annotated[int, Option("height and width of a latent, a multiple of 2", least=2)] = 32

    @classmethod
    def of(cls, facts: object) -> EncodingSizes:
        """Return the sizes that an object has as attributes."""
        return EncodingSizes(**{each.name: getattr(facts, each.name) for each in fields(EncodingSizes)})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each array by name."""
        latent = (self.latent_channels, self.latent_size, self.latent_size)
        captions = {"t5": (self.text_length, self.text_width), "clip": (self.caption_width,)}
        return {**captions, "mean": latent, "logvar": latent}

    @property
    def sample_elements(self) -> int:
        """Return the number of values of a sample."""
        return sum(map(math.prod, self.shapes.values()))


def read_empty(folder: Path, sizes: EncodingSizes, remedy: str) -> dict[str, Tensor]:
    """Return ``t5`` (T, K) and ``clip`` (P,) of the empty caption, in bf16.

    Raises:
        DataError: a file is missing or damaged, or has another dtype or shape or values that are not finite.
    """
    found = {}
    for name, file in EMPTY.items():
        array = npy.required(folder / file, np.dtype("<f2"), (1, *sizes.shapes[name]), remedy)
        found[name] = torch.from_numpy(np.array(array[0])).to(torch.bfloat16)
        if not found[name].isfinite().all():
            raise DataError(f"{folder / file} has values that are not finite; {remedy}")
    return found


def counts_of(train: int, eval_samples: int, sizes: EncodingSizes) -> dict[str, int]:
    """Return the ``counts`` of a manifest."""
    return {"train_samples": train, "eval_samples": eval_samples, **asdict(sizes)}


def read_manifest(root: Path, sizes: EncodingSizes) -> Manifest:
    """Return the manifest of the prepared folder ``root``.

    Args:
        sizes: required sizes of the arrays.

    Raises:
        DataError: the folder is not completely prepared, or the arrays have other sizes.
    """
    found = manifest.read(root, FORMAT, PREPARE_COMMAND, ("train_samples", "eval_samples"))
    for name, wanted in asdict(sizes).items():
        if found.counts[name] != wanted:
            raise DataError(
                f"{root}: {name} of the encodings is {found.counts[name]}, but benchmark.facts has {wanted}: they are "
                "of another recipe"
            )
    return found


def read_timesteps(root: Path, found: Manifest, bins: int) -> NDArray[np.int64]:
    """Return (S,) the timesteps of the prepared validation samples.

    Args:
        bins: required number of timesteps.

    Raises:
        DataError: the file is missing or damaged, or as :func:`require_timesteps`.
    """
    path = root / SPLITS["eval"] / TIMESTEPS
    timesteps_S = npy.required(path, np.dtype(np.int64), (found.counts["eval_samples"],), REMEDY)
    require_timesteps(timesteps_S, bins, path)
    return timesteps_S


def require_timesteps(timesteps_S: NDArray[np.int64], bins: int, path: Path) -> None:
    """Check the timesteps of the whole validation set.

    Raises:
        DataError: a timestep is outside of 0 to ``bins - 1``, or no sample has one of them; the message names ``path``.
    """
    if timesteps_S.min() < 0 or timesteps_S.max() >= bins:
        raise DataError(f"{path} has timesteps outside of 0 to {bins - 1}; {REMEDY}")
    counts = np.bincount(timesteps_S, minlength=bins)
    if not counts.all():
        raise DataError(f"{path}: no validation sample has the timestep {counts.argmin()}; each of {bins} needs some")
