"""Synthetic images in the published layout: smooth Gaussian fields, and classes that depend on four of them.

Variable c is ``OFFSETS[c] + SPREADS[c] * f_c`` with independent fields f_c of mean 0 and variance 1, with
wavelengths above a third of the height. A pixel is a cyclone where ``(f_0 + f_1) / sqrt(2)`` exceeds a threshold, or
else part of a river where ``(f_2 + f_3) / sqrt(2)`` exceeds another. The thresholds follow from the expected shares.

Axes: H, W pixels; C variables.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import h5py
import numpy as np
from numpy.typing import NDArray

from benchmarks.deepcam.raw import IMAGES, LABELS
from benchmarks.deepcam.samples import CHANNELS, SPLITS, STATISTICS
from common.data import synthetic
from common.data.options import Option, Options

WAVES = 3
"""Largest number of waves along the height of an image."""
SPREADS = np.geomspace(1e-3, 1000, CHANNELS)
OFFSETS = SPREADS * np.linspace(-100, 100, CHANNELS)
"""Deviations and means of the variables, as different as those of humidities, wind speeds and pressures."""
PIXELS_PER_WORKER = 1 << 22


@dataclass(frozen=True)
class SyntheticImages(Options):
    """Options of ``generate``."""

    train: Annotated[int, Option("number of training samples", least=1)] = 32
    eval: Annotated[int, Option("number of evaluation samples", least=1)] = 8
    height: Annotated[int, Option("pixels", least=16, most=768)] = 768
    width: Annotated[int, Option("pixels", least=16, most=1152)] = 1152
    cyclones: Annotated[float, Option("expected share of pixels of cyclones", least=1e-4, most=0.5)] = 0.0005
    rivers: Annotated[float, Option("expected share of pixels of rivers", least=1e-4, most=0.5)] = 0.0133
    seed: Annotated[int, Option(least=0)] = 0


def generate(raw_dir: Path, options: SyntheticImages = SyntheticImages(), workers: int = 1) -> str:
    """Write synthetic samples to ``raw_dir``, an empty or new folder, and mark it as synthetic.

    Returns:
        A summary for the user.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    counts = {"train": options.train, "eval": options.eval}
    plans = [(split, number) for split, count in counts.items() for number in range(count)]
    per_worker = max(1, PIXELS_PER_WORKER // (options.height * options.width))
    with synthetic.generated_folders(raw_dir, "smooth Gaussian fields", options, SPLITS.values()) as folder:
        write = functools.partial(_write, folder, options)
        moments_SMC = np.stack(list(synthetic.drawn(write, plans, workers, per_worker))[: options.train])
        with h5py.File(folder / STATISTICS, "w") as file:
            group = file.create_group("climate")
            group["count"] = options.train * options.height * options.width
            group["mean"], group["sqmean"] = moments_SMC[:, :2].mean(0)
            group["minval"], group["maxval"] = moments_SMC[:, 2].min(0), moments_SMC[:, 3].max(0)
    return (
        f"{options.train} samples to train and {options.eval} to evaluate, of {options.height} x {options.width} pixels"
    )


def draw(options: SyntheticImages, random: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return an image (H, W, C) and its labels (H, W)."""
    height, width = options.height, options.width
    waves_HK = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)) * height
    filter_HK = (waves_HK > 0) & (waves_HK <= WAVES)
    noise_CHW = random.standard_normal((CHANNELS, height, width))
    field_CHW = np.fft.irfft2(np.fft.rfft2(noise_CHW) * filter_HK, (height, width))
    kept = 2 * filter_HK.sum() - filter_HK[:, 0].sum()  # coefficients; a column of rfft2 stands for two, but the first
    field_CHW /= np.sqrt(kept / (height * width))
    labels_HW = np.zeros((height, width), np.int32)
    for value, share, first in ((2, options.rivers, 2), (1, options.cyclones, 0)):
        labels_HW[field_CHW[first : first + 2].sum(0) / np.sqrt(2) > NormalDist().inv_cdf(1 - share)] = value
    return (OFFSETS + SPREADS * np.moveaxis(field_CHW, 0, -1)).astype(np.float32), labels_HW


def _write(folder: Path, options: SyntheticImages, plan: tuple[str, int]) -> NDArray[np.float64]:
    """Write a sample; return mean, mean of squares, minimum and maximum of each variable, (4, C)."""
    split, number = plan
    random = np.random.default_rng((options.seed, list(SPLITS).index(split), number))
    x_HWC, labels_HW = draw(options, random)
    with h5py.File(folder / SPLITS[split] / f"data-{number:06d}.h5", "w") as file:
        file[IMAGES], file[LABELS] = x_HWC, labels_HW
    values_PC = x_HWC.reshape(-1, CHANNELS).astype(np.float64)
    return np.stack([values_PC.mean(0), (values_PC**2).mean(0), values_PC.min(0), values_PC.max(0)])
