"""The prepared format: tars of samples, each with an index, and captions and statistics of the evaluation.

- ``train/00000.tar`` ...: samples in webdataset's layout, where names of members start with the sample's key, up to
  the first dot (:mod:`benchmarks.stable_diffusion.formats`); all tars have the same kind of members;
- ``train/00000.index.npy`` ...: int64 (S, 4): offset and size of the picture's member, offset and size of the
  caption, for each sample in the order of the tar. It gives random access to samples;
- ``validation/val2014_30k.tsv`` and ``validation/val2014_30k_stats.npz``;
- ``manifest.json``: counts of training and evaluation samples, of tars, and of the samples of each tar by name;
  ``members`` in ``source`` is the suffix of the picture's member.

Legend: S samples of a tar.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.stable_diffusion.fid import FeatureStatistics
from benchmarks.stable_diffusion.formats import CAPTION, MEMBERS
from common.data import atomic, manifest
from common.data.manifest import Manifest
from common.errors import DataError
from common.formats import npy
from common.formats.tar_index import index_tar
from common.untrusted.array_file import read_npz
from common.untrusted.regular_file import TEXT_BYTES, line_not_utf8, open_file
from common.untrusted.strict_json import DIGITS

FORMAT = "stable-diffusion-moments/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=stable_diffusion --raw-dir RAW --data-dir DATA"
TRAIN = "train"
PROMPTS = "validation/val2014_30k.tsv"
STATISTICS = "validation/val2014_30k_stats.npz"
COUNTS = ("train_samples", "eval_samples", "tars")
KIND = "members"
"""Key in the manifest's ``source`` of the suffix of the picture's member."""
INDEX_COLUMNS = 4


@dataclass(frozen=True)
class PreparedLatents:
    """A prepared folder.

    Attributes:
        kind: suffix of the picture's member.
        tars: names of the tars relative to ``root``, in order.
        samples: number of samples of each tar.
    """

    root: Path
    manifest: Manifest
    kind: str
    tars: tuple[str, ...]
    samples: tuple[int, ...]

    def index(self, tar: int) -> NDArray[np.int64]:
        """Return the index of a tar, (S, 4), as :func:`index_of` made it.

        Raises:
            DataError: the index is missing or damaged, or does not match the tar.
        """
        name = self.tars[tar]
        path, shape = self.root / index_name(name), (self.samples[tar], INDEX_COLUMNS)
        index: NDArray[np.int64] = npy.required(path, np.dtype(np.int64), shape, f"run '{PREPARE_COMMAND}'")
        ends = index[:, ::2] + index[:, 1::2]
        if index.min() < 0 or ends.max() > self.manifest.files[name].bytes:
            raise DataError(f"{path} has members outside of {name}; run '{PREPARE_COMMAND}'")
        return index


def index_name(tar: str) -> str:
    """Return the name of the index of ``tar``, in the same folder."""
    return f"{tar.removesuffix('.tar')}.index.npy"


def counts_of(samples: Mapping[str, int], eval_samples: int) -> dict[str, int]:
    """Return the ``counts`` of a manifest from the samples by tar name, and the captions of the evaluation."""
    return {"train_samples": sum(samples.values()), "eval_samples": eval_samples, "tars": len(samples), **samples}


def index_of(path: Path, kind: str) -> NDArray[np.int64]:
    """Return the offsets and sizes of all members in a tar; this reads only its headers.

    Args:
        kind: suffix of the picture's member.

    Returns:
        (S, 4): offset and size of ``KEY.kind``, offset and size of ``KEY.txt``, in bytes.

    Raises:
        DataError: as :func:`common.formats.tar_index.index_tar`.
    """
    return index_tar(path, (kind, CAPTION))[1].reshape(-1, INDEX_COLUMNS)


def write_index(root: Path, tar: str, kind: str) -> int:
    """Write the index of ``tar`` below ``root``; return its number of samples.

    Raises:
        DataError: the tar is missing, truncated, damaged or empty, or a sample has none or two of a member.
    """
    index = index_of(root / tar, kind)
    atomic.save(root / index_name(tar), index)
    return len(index)


def open_prepared(root: Path) -> PreparedLatents:
    """Open the prepared folder ``root``; this reads only the manifest.

    Raises:
        DataError: the folder is not completely prepared, or the size of a file differs from the manifest.
    """
    found = manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS)
    where = root / manifest.NAME
    kind = found.source.get(KIND, "")
    if kind not in MEMBERS:
        raise DataError(f"{where}: samples of kind {kind!r}; known kinds are {', '.join(MEMBERS)}")
    names = sorted(name for name in found.files if name.startswith(f"{TRAIN}/") and name.endswith(".tar"))
    samples = tuple(found.counts.get(name, 0) for name in names)
    if len(names) != found.counts["tars"] or min(samples) < 1 or sum(samples) != found.counts["train_samples"]:
        raise DataError(
            f"{where} names {len(names)} tars of {sum(samples):,} samples, and counts {found.counts['tars']} of "
            f"{found.counts['train_samples']:,}; run '{PREPARE_COMMAND}'"
        )
    needed = [*map(index_name, names), PROMPTS, STATISTICS]
    for name in needed:
        if name not in found.files:
            raise DataError(f"{where} does not list {name}; run '{PREPARE_COMMAND}'")
    return PreparedLatents(root, found, kind, tuple(names), samples)


COLUMNS = ("image_id", "id", "caption")
"""Columns of the captions' table, which is sorted by ``id``."""
MEAN, COVARIANCE = "mu", "sigma"
"""Names of the arrays of the statistics, float64 (F,) and (F, F)."""
MOST_BYTES = 2**28
"""Largest accepted array in bytes; the covariance of 2,048 features has 34 MB."""


def read_prompts(root: Path) -> list[str]:
    """Read the captions of the evaluation from prepared data, in order.

    The table is tab-separated; captions with quotation marks are quoted as pandas does.

    Raises:
        DataError: the table is missing or damaged, has other columns, is not sorted by id, or has an empty caption.
    """
    path = root / PROMPTS
    captions: list[str] = []
    before = -1
    try:
        with open_file(path) as whole:
            content = whole.read(TEXT_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    try:
        rows = csv.reader(io.StringIO(content.decode("utf-8"), newline=""), delimiter="\t", strict=True)
        if tuple(found := next(rows, [])) != COLUMNS:
            raise DataError(f"{path} begins with the columns {found}, not {list(COLUMNS)}")
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if len(row) != len(COLUMNS):
                raise DataError(f"{where}: {len(row)} columns, not {len(COLUMNS)}")
            picture, number, caption = row
            if not (picture.isdecimal() and number.isdecimal() and len(number) <= DIGITS):
                raise DataError(f"{where}: the ids {picture!r} and {number!r} must be numbers")
            if int(number) <= before:
                raise DataError(f"{where}: id {number} follows {before}, but ids must increase")
            if not caption.strip():
                raise DataError(f"{where}: the caption of picture {picture} is empty")
            before = int(number)
            captions.append(caption)
    except UnicodeDecodeError as error:
        line = line_not_utf8(io.BytesIO(content))
        raise DataError(f"{path} cannot be read: {error}, in line {line}") from error
    except csv.Error as error:
        raise DataError(f"{path} cannot be read: {error}, in line {rows.line_num}") from error
    return captions


def read_reference(root: Path) -> FeatureStatistics:
    """Read mean and covariance of the features of the real pictures from prepared data.

    Raises:
        DataError: the file is missing or damaged, or its arrays have wrong shapes or dtypes or values that are not
            finite.
    """
    path = root / STATISTICS
    try:
        mean_F, covariance_FF = read_npz(path, (MEAN, COVARIANCE), MOST_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as arrays {MEAN} and {COVARIANCE}: {error}") from error
    features = mean_F.size
    for name, array, shape in ((MEAN, mean_F, (features,)), (COVARIANCE, covariance_FF, (features, features))):
        if array.dtype != np.float64 or array.shape != shape:
            raise DataError(f"{path}: {name} is {array.dtype} {array.shape}, expected float64 {shape}")
        if not np.isfinite(array).all():
            raise DataError(f"{path}: {name} has values that are not finite")
    return FeatureStatistics(mean_F, covariance_FF)
