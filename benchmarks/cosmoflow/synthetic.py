"""Synthetic samples in the published layout, gzipped TFRecords: counts of a Poisson field that depend on the targets.

A voxel of channel c has Poisson's distribution with the mean ``MEAN * exp(CONTRAST * y_c) * g`` for the first three
channels, and ``MEAN * g`` for the last one. The field g has the mean 1 over a cube. It is log-normal, constant in
blocks of 2^3 voxels, and the same for all channels, as the structures of a universe are. Its deviation grows with the
last target, so that the mean of log(1 + x) falls with it. Each target is therefore nearly linear in the means and
deviations of log(1 + x) in the channels.

Axes: D, H, W in voxels; C redshifts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from benchmarks.cosmoflow.samples import PARAMETERS, RECORD_SUFFIX, REDSHIFTS, SPLITS, encode
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError
from common.formats import tfrecord

MEAN = 4.0
"""Mean count per voxel for targets of 0."""
CONTRAST = 1.2
DEVIATIONS = (0.3, 1.3)
"""Standard deviation of log g for a last target of -1 and of 1."""
BLOCK = 2
VOXELS_PER_WORKER = 16 << 20


@dataclass(frozen=True)
class SyntheticCubes(Options):
    """Options of ``generate``."""

    train: Annotated[int, Option("number of training samples", least=1)] = 64
    eval: Annotated[int, Option("number of evaluation samples", least=1)] = 16
    size: Annotated[int, Option("edge of a cube in voxels, an even number", least=4, most=128)] = 128
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % BLOCK:
            raise ConfigError(f"--size={self.size}: must be an even number")


def generate(raw_dir: Path, options: SyntheticCubes = SyntheticCubes(), workers: int = 1) -> str:
    """Write synthetic samples to ``raw_dir``, an empty or new folder, and mark it as synthetic.

    Returns:
        A summary for the user.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    counts = {"train": options.train, "eval": options.eval}
    plans = [(split, number) for split, count in counts.items() for number in range(count)]
    per_worker = max(1, VOXELS_PER_WORKER // options.size**3)
    with synthetic.generated_folders(raw_dir, "clustered Poisson field", options, SPLITS.values()) as folder:
        list(synthetic.drawn(functools.partial(_write, folder, options), plans, workers, per_worker))
    return f"{options.train} samples to train and {options.eval} to evaluate, of {options.size}^3 voxels"


def draw(size: int, random: np.random.Generator) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Return a cube (D, H, W, C) and its targets, uniform in [-1, 1]."""
    y = random.uniform(-1, 1, PARAMETERS).astype(np.float32)
    low, high = DEVIATIONS
    deviation = low + (high - low) * (y[-1] + 1) / 2
    field = np.exp(deviation * random.standard_normal((size // BLOCK,) * 3))
    for axis in range(3):
        field = field.repeat(BLOCK, axis)
    rate_C = MEAN * np.exp(CONTRAST * y)
    rate_C[REDSHIFTS - 1] = MEAN
    counts_DHWC = random.poisson(rate_C * (field / field.mean())[..., None])
    return np.minimum(counts_DHWC, np.iinfo(np.int16).max).astype(np.int16), y


def _write(folder: Path, options: SyntheticCubes, plan: tuple[str, int]) -> None:
    split, number = plan
    random = np.random.default_rng((options.seed, list(SPLITS).index(split), number))
    name = f"synthetic_{number // 64:05d}_{number % 64:03d}{RECORD_SUFFIX}"
    (folder / SPLITS[split] / name).write_bytes(tfrecord.deflate(encode(*draw(options.size, random))))
