"""Encodings of captions and pictures: the published files, and the prepared format, which reads them in place.

A sample has four arrays in bf16: the caption encoded by T5 (``t5``, (T, K)) and by CLIP (``clip``, (P,)), and mean and
log-variance of the picture's latent (``mean``, ``logvar``, (C, H, W)). Validation samples also have a ``timestep``. Two
forms of files are published (:mod:`common.formats.array_shards`): arrow by MLCommons, and tars by NVIDIA.

The raw folder has

- ``cc12m_preprocessed/`` and ``coco_preprocessed/`` (or ``train/`` and ``val/``, as NVIDIA names them): the data sets
  for training and validation;
- ``empty_encodings/t5_empty.npy`` and ``clip_empty.npy``: the encodings of the empty caption, float16 with a leading
  axis of size 1.

A prepared folder has

- ``train/00000.arrow`` ..., ``validation/00000.arrow`` ... (or ``.tar``): the published files, unchanged, in order;
- ``train/index.npy``, ``validation/index.npy``: positions of the arrays, and timesteps of the validation samples
  (:mod:`common.data.indexed_arrays`);
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
from common.data.manifest import Manifest, digest
from common.data.options import Option, Options
from common.data.raw_layout import RawSplits, find_file
from common.data.synthetic import description_of
from common.errors import DataError
from common.formats import npy
from common.formats.array_shards import PATTERNS, ArrayShards, shards_of
from common.mlperf.fixed import benchmark_settings

FORMAT = "flux-encodings/2"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=flux1 --raw-dir RAW --data-dir DATA"
REMEDY = f"run '{PREPARE_COMMAND}'"
SPLITS = {"train": "train", "eval": "validation"}
"""Prepared folder of each split."""
RAW_FOLDERS = {"train": ("cc12m_preprocessed", "train"), "eval": ("coco_preprocessed", "val")}
"""Raw folders of each split: that of MLCommons' downloader, and that of NVIDIA's tars."""
EMPTY_FOLDER = "empty_encodings"
SHARDS = ArrayShards({"t5": "t5_encodings", "clip": "clip_encodings", "mean": "mean", "logvar": "logvar"}, "timestep")
EMPTY = {"t5": "t5_empty.npy", "clip": "clip_empty.npy"}
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


@dataclass(frozen=True, kw_only=True)
class RawEncodings(RawSplits):
    """Published encodings; ``content`` has the checksums of those of the empty caption.

    Attributes:
        empty: folder with the encodings of the empty caption.
    """

    empty: Path


def open_raw(raw_dir: Path) -> RawEncodings:
    """Find the published encodings in ``raw_dir`` without reading samples.

    Raises:
        DataError: the folder, a split, one of its files or the encodings of the empty caption are missing, or a tar has
            a foreign name.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; download the data there or generate synthetic data")
    splits = {}
    for split, folders in RAW_FOLDERS.items():
        found = find_file(raw_dir, *(f"{folder}/{pattern}" for pattern in PATTERNS for folder in folders))
        if found is None:
            raise DataError(
                f"{raw_dir / folders[0]} has neither {' nor '.join(PATTERNS)}; 'mlperf-suite download benchmark=flux1' "
                "fetches it"
            )
        splits[split] = shards_of(found)
    empty = find_file(raw_dir, f"{EMPTY_FOLDER}/{EMPTY['t5']}", EMPTY["t5"])
    folder = raw_dir / EMPTY_FOLDER if empty is None else empty.parent
    for name in EMPTY.values():
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing: training needs it for dropped captions")
    content = "".join(digest(folder / name, "sha256") for name in EMPTY.values()).encode()
    synthetic = description_of(raw_dir, folder / EMPTY["t5"], *(paths[0] for paths in splits.values()))
    return RawEncodings(splits=splits, synthetic=synthetic, content=content, empty=folder)


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
