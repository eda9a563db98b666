"""Encodings of captions and pictures: the published formats, and the prepared format, which reads them in place.

A sample has four arrays in bf16: the caption encoded by T5 (``t5``, (T, K)) and by CLIP (``clip``, (P,)), and mean and
log-variance of the picture's latent (``mean``, ``logvar``, (C, H, W)). Each is stored as a ``.npy`` of the bits as
uint16. Validation samples also have a ``timestep``. Two forms of files are published:

- ``arrow``: MLCommons' data sets, as Hugging Face's library saves them to disk, with the columns of :data:`COLUMNS`;
- ``tar``: NVIDIA's ``shard_000000.tar`` ..., with ``KEY.t5.bytes`` and so on, and ``KEY.json`` with the timestep.

The encodings of the empty caption are ``t5_empty.npy`` and ``clip_empty.npy``, float16 with a leading axis of size 1.

A prepared folder has

- ``train/00000.arrow`` ..., ``validation/00000.arrow`` ... (or ``.tar``): the published files, unchanged, in order;
- ``train/index.npy``, ``validation/index.npy``, int64 (S, 5): number of the file, and offsets of the four arrays in it;
- ``validation/timesteps.npy``, int64 (S,);
- ``t5_empty.npy``, ``clip_empty.npy``, and ``manifest.json``, with the numbers of samples and the sizes of the arrays.

Legend: S samples, T tokens of a caption, K and P features of T5 and CLIP, C channels of a latent, H its height, W its
width.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data import manifest
from common.data.manifest import Manifest
from common.errors import DataError
from common.formats import bf16_npy, npy, saved_dataset
from common.formats.tar_index import index_tar
from common.mlperf.fixed import benchmark_settings
from common.untrusted.strict_json import StrictJsonError, parse_object

FORMAT = "flux-encodings/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=flux1 --raw-dir RAW --data-dir DATA"
SPLITS = {"train": "train", "eval": "validation"}
"""Folder of each split."""
COLUMNS = {"t5": "t5_encodings", "clip": "clip_encodings", "mean": "mean", "logvar": "logvar"}
"""Columns of the arrow files by name of the array."""
TIMESTEP, KEY = "timestep", "__key__"
SCHEMA = pyarrow.schema(
    [
        (KEY, pyarrow.string()),
        *((column, pyarrow.binary()) for column in COLUMNS.values()),
        (TIMESTEP, pyarrow.int32()),
    ]
)
"""Columns of the published data sets; training samples have no timesteps."""
EMPTY = {"t5": "t5_empty.npy", "clip": "clip_empty.npy"}
INDEX, TIMESTEPS = "index.npy", "timesteps.npy"
BINS: int = benchmark_settings("flux1")["facts"]["eval_timesteps"]
"""Number of the benchmark's timesteps."""
_HALF = np.dtype("<f2")


@dataclass(frozen=True, kw_only=True)
class EncodingSizes:
    """Sizes of the arrays.

    Attributes:
        text_length, text_width: T and K.
        caption_width: P.
        latent_channels: C.
        latent_size: H and W.
    """

    text_length: int
    text_width: int
    caption_width: int
    latent_channels: int
    latent_size: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each array by name."""
        latent = (self.latent_channels, self.latent_size, self.latent_size)
        return {
            "t5": (self.text_length, self.text_width),
            "clip": (self.caption_width,),
            "mean": latent,
            "logvar": latent,
        }

    @property
    def sample_bytes(self) -> int:
        """Return the bytes of the arrays of a sample."""
        return sum(2 * math.prod(shape) for shape in self.shapes.values())


PUBLISHED_SIZES = EncodingSizes(text_length=256, text_width=4096, caption_width=768, latent_channels=16, latent_size=32)
"""Sizes of the benchmark's encodings."""


def index_shard(path: Path, sizes: EncodingSizes) -> NDArray[np.int64]:
    """Return (S, 4): offsets of the values of the four arrays of each sample of a published file.

    Raises:
        DataError: the file is truncated or damaged, or an array is missing or has another dtype or shape.
    """
    if path.suffix == ".tar":
        ranges = index_tar(path, [f"{name}.bytes" for name in COLUMNS])[1]
    else:
        ranges = saved_dataset.value_ranges(path, list(COLUMNS.values()))
    with open(path, "rb") as file:
        for column, (name, shape) in enumerate(sizes.shapes.items()):
            for row, (offset, size) in enumerate(ranges[:, column].tolist()):
                where = f"{path}: {name} of sample {row}"
                begins = os.pread(file.fileno(), bf16_npy.LONGEST_HEADER, offset)
                ranges[row, column, 0] += bf16_npy.values_offset(begins, size, shape, where)
    return ranges[:, :, 0]


def timesteps_of(path: Path) -> NDArray[np.int64]:
    """Return (S,) the timesteps of a published file of validation samples.

    Raises:
        DataError: the file is truncated or damaged, or a timestep is missing, no integer, or outside of 0 to 7.
    """
    found = _tar_timesteps(path) if path.suffix == ".tar" else saved_dataset.column_values(path, TIMESTEP)
    for row, value in enumerate(found):
        if value is None:
            raise DataError(f"{path}: sample {row} has no timestep, which every validation sample needs")
        if type(value) is not int:
            raise DataError(f"{path}: sample {row} has the timestep {value!r}, which is not an integer")
        if not 0 <= value < BINS:
            raise DataError(f"{path}: sample {row} has the timestep {value}, outside of 0 to {BINS - 1}")
    return np.array(found, np.int64)


def read_empty(folder: Path, sizes: EncodingSizes) -> dict[str, Tensor]:
    """Return ``t5`` (T, K) and ``clip`` (P,) of the empty caption, in bf16.

    Raises:
        DataError: a file is missing or damaged, or has another dtype or shape or values that are not finite.
    """
    found = {}
    for name, file in EMPTY.items():
        path, shape = folder / file, (1, *sizes.shapes[name])
        if not path.is_file():
            raise DataError(f"{path} is missing: training replaces captions by the encodings of the empty caption")
        try:
            array = npy.load(path, _HALF, shape)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if array.dtype != _HALF or array.shape != shape:
            raise DataError(f"{path}: {array.dtype} {array.shape}, expected float16 {shape}")
        found[name] = torch.from_numpy(np.array(array[0])).to(torch.bfloat16)
        if not found[name].isfinite().all():
            raise DataError(f"{path} has values that are not finite; fetch it again")
    return found


@dataclass(frozen=True)
class Split:
    """The training or validation samples of a prepared folder.

    Attributes:
        files: published files, in order.
        index_S5: number of the file and offsets of the arrays.
    """

    files: tuple[Path, ...]
    index_S5: NDArray[np.int64]


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
    for each in fields(EncodingSizes):
        if found.counts[each.name] != (wanted := getattr(sizes, each.name)):
            raise DataError(
                f"{root}: {each.name} of the encodings is {found.counts[each.name]}, but benchmark.facts has "
                f"{wanted}: they are of another recipe"
            )
    return found


def open_split(root: Path, found: Manifest, split: str) -> Split:
    """Open ``train`` or ``eval`` of a prepared folder.

    Raises:
        DataError: the index is missing or damaged, or does not match the files.
    """
    folder = SPLITS[split]
    names = sorted(name for name in found.files if name.startswith(f"{folder}/") and name.endswith((".arrow", ".tar")))
    index_S5 = _loaded(root / folder / INDEX, (found.counts[f"{split}_samples"], 1 + len(COLUMNS)))
    sizes = np.array([found.files[name].bytes for name in names])
    numbers, offsets = index_S5[:, 0], index_S5[:, 1:]
    if numbers.min() < 0 or numbers.max() >= len(names) or (offsets >= sizes[numbers][:, None]).any():
        raise DataError(f"{root / folder / INDEX} has positions outside of the files; run '{PREPARE_COMMAND}'")
    return Split(tuple(root / name for name in names), index_S5)


def read_timesteps(root: Path, found: Manifest, bins: int) -> NDArray[np.int64]:
    """Return (S,) the timesteps of the prepared validation samples.

    Args:
        bins: required number of timesteps.

    Raises:
        DataError: the file is missing or damaged, or as :func:`require_timesteps`.
    """
    path = root / SPLITS["eval"] / TIMESTEPS
    timesteps_S = _loaded(path, (found.counts["eval_samples"],))
    require_timesteps(timesteps_S, bins, path)
    return timesteps_S


def require_timesteps(timesteps_S: NDArray[np.int64], bins: int, path: Path) -> None:
    """Check the timesteps of the whole validation set.

    Raises:
        DataError: a timestep is outside of 0 to ``bins - 1``, or no sample has one of them; the message names ``path``.
    """
    if timesteps_S.min() < 0 or timesteps_S.max() >= bins:
        raise DataError(f"{path} has timesteps outside of 0 to {bins - 1}; run '{PREPARE_COMMAND}'")
    counts = np.bincount(timesteps_S, minlength=bins)
    if not counts.all():
        raise DataError(f"{path}: no validation sample has the timestep {counts.argmin()}; each of {bins} needs some")


def _loaded(path: Path, shape: tuple[int, ...]) -> NDArray[np.int64]:
    try:
        array = npy.load(path, np.dtype(np.int64), shape)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; run '{PREPARE_COMMAND}'") from error
    if array.dtype != np.int64 or array.shape != shape:
        raise DataError(f"{path}: {array.dtype} {array.shape}, expected int64 {shape}; run '{PREPARE_COMMAND}'")
    return array


def _tar_timesteps(path: Path) -> Sequence[object]:
    keys, ranges = index_tar(path, ["json"])
    found: list[object] = []
    with open(path, "rb") as file:
        for key, (offset, size) in zip(keys, ranges[:, 0].tolist(), strict=True):
            content = os.pread(file.fileno(), size, offset).decode("utf-8", "replace")
            try:
                found.append(parse_object(content).get(TIMESTEP))
            except StrictJsonError as error:
                raise DataError(f"{path}: {key}.json is {error}") from error
    return found
