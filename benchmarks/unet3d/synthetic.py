"""Synthetic CT scans in KiTS19's layout: kidneys and tumours as ellipsoids in a body, with noise.

Shapes are defined in the millimetres of the prepared volume and sampled at the scan's spacing, so resampling is
exercised. Axes: D slices, H from front to back, W from side to side, as in KiTS19's arrays.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import nibabel
import numpy as np
from numpy.typing import NDArray

from benchmarks.unet3d import raw
from benchmarks.unet3d.preprocess import TARGET_SPACING
from benchmarks.unet3d.raw import EVALUATION_CASES, LABELLED_CASES, ScanSettings
from benchmarks.unet3d.sliding_window import cover
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError

AIR, TISSUE, KIDNEY, TUMOUR, BONE = -1000, 24, 137, 188, 420
"""Hounsfield units. After preparation, tissue is -1, kidneys 0.5, tumours 1.1; air and bone are clipped."""
NOISE = 15
SLICE_SPACINGS = (1.0, 1.25, 2.0, 2.5, 3.0)
PIXEL_SPACINGS = (0.66, 0.74, 0.78, 0.86, 0.94)
SMALLEST = 32
"""Voxels of an axis below which a tumour has hardly any."""
LARGEST = 512
VOXELS_PER_WORKER = 64 << 20
# Kidneys of a case: 1 with, 0 without a tumour. The cases of a split use the entries in turn.
_ANATOMIES = {
    "train": ((1, 1), (0, 0), (1, 0), (0, 1), (1,), (1, 0), (0, 1), (1, 0)),
    "eval": ((1, 0), (1, 1), (0, 1), (1,)),
}


@dataclass(frozen=True)
class SyntheticScans(Options):
    """Options of ``generate``. Evaluation cases are from the benchmark's list. Sizes are before padding to the crop."""

    train: Annotated[int, Option("number of training cases", least=1, most=LABELLED_CASES - len(EVALUATION_CASES))] = 24
    eval: Annotated[int, Option("number of evaluation cases", least=1, most=len(EVALUATION_CASES))] = 6
    patch: Annotated[tuple[int, ...], Option("voxels of a crop: one number, or depth, height and width")] = (128,)
    smallest: Annotated[int, Option("smallest side of a prepared volume, in voxels", least=SMALLEST)] = 128
    largest: Annotated[int, Option("largest side of a prepared volume, in voxels", least=SMALLEST, most=LARGEST)] = 200
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.smallest > self.largest:
            raise ConfigError(f"--smallest={self.smallest} --largest={self.largest}: the first must not be larger")
        if len(self.patch) not in (1, 3):
            raise ConfigError(f"--patch {' '.join(map(str, self.patch))}: must be one number or three")
        _ = self.settings  # raises an error for an impossible crop

    @property
    def settings(self) -> ScanSettings:
        """ScanSettings of the preparation that the scans are for."""
        depth, height, width = self.patch if len(self.patch) == 3 else self.patch * 3
        return ScanSettings((depth, height, width))


@dataclass(frozen=True)
class ScanPlan:
    """A scan: its name, kidneys, and seed; shape of the prepared volume; shape and spacing (mm) of the scan."""

    name: str
    anatomy: tuple[int, ...]
    shape: tuple[int, ...]
    scan_shape: tuple[int, ...]
    spacing: tuple[float, ...]
    seed: tuple[int, int]


def generate(raw_dir: Path, options: SyntheticScans = SyntheticScans(), workers: int = 1) -> str:
    """Write synthetic scans to ``raw_dir``, an empty or new folder, and mark it as synthetic.

    Returns:
        a summary: cases, voxels of all scans, and how many axes windows crop and pad in the prepared volumes.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    plans, patch = plan(options), options.settings.patch
    voxels = sum(int(np.prod(entry.scan_shape)) for entry in plans)
    described = {"kind": "ellipsoids in noise", **asdict(options), "settings": asdict(options.settings)}
    del described["patch"]
    with synthetic.generated(raw_dir) as folder:
        synthetic.mark(folder, described)
        processes = min(workers, 1 + voxels // VOXELS_PER_WORKER)
        for _ in synthetic.drawn(functools.partial(write_scan, folder), plans, processes):
            pass
    branches = [
        branch(max(size, least), least) for entry in plans for size, least in zip(entry.shape, patch, strict=True)
    ]
    return (
        f"{options.train} cases to train and {options.eval} to evaluate, {voxels / 1e6:.1f} million voxels; "
        f"of the axes of their volumes windows crop {branches.count('crop')} and pad {branches.count('pad')}"
    )


def branch(size: int, patch: int) -> str | None:
    """Return how sliding windows of ``patch`` voxels with half overlap change an axis: ``crop``, ``pad`` or None."""
    axis = cover(size, patch, max(1, patch // 2))
    return "crop" if axis.kept < size else "pad" if axis.padded > size else None


def plan(options: SyntheticScans) -> list[ScanPlan]:
    """Return all scans of ``options``, sorted by name; evaluation uses the first cases of the benchmark's list."""
    training = [number for number in range(LABELLED_CASES) if number not in EVALUATION_CASES]
    chosen = {"train": training[: options.train], "eval": list(EVALUATION_CASES[: options.eval])}
    plans = []
    for split, numbers in chosen.items():
        anatomies = itertools.cycle(_ANATOMIES[split])
        for index, (number, anatomy) in enumerate(zip(numbers, anatomies, strict=False)):
            random = np.random.default_rng((options.seed, number))
            shape = tuple(_size(options, axis, index, random) for axis in range(3))
            spacings = [random.choice(SLICE_SPACINGS), *([random.choice(PIXEL_SPACINGS)] * 2)]
            scan_shape = tuple(
                round((size + 0.5) * target / spacing)
                for size, target, spacing in zip(shape, TARGET_SPACING, spacings, strict=True)
            )
            # Half a voxel is added, so that resampling, which rounds down, gives exactly this shape.
            spacing = tuple(
                float((size + 0.5) * target / count)
                for size, target, count in zip(shape, TARGET_SPACING, scan_shape, strict=True)
            )
            plans.append(ScanPlan(raw.case_name(number), anatomy, shape, scan_shape, spacing, (options.seed, number)))
    return sorted(plans, key=lambda entry: entry.name)


def write_scan(raw_dir: Path, entry: ScanPlan) -> None:
    """Draw one scan and write its two files to its folder in ``raw_dir``."""
    image, label = draw(entry)
    folder = raw_dir / entry.name
    folder.mkdir()
    depth, height, width = entry.spacing
    affine = np.array([[0, 0, -width, 0], [0, -height, 0, 0], [-depth, 0, 0, 0], [0, 0, 0, 1]])  # as in KiTS19
    nibabel.save(nibabel.Nifti1Image(image, affine), folder / raw.IMAGE)
    nibabel.save(nibabel.Nifti1Image(label, affine), folder / raw.LABEL)


def draw(entry: ScanPlan) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """Return image in Hounsfield units and labels, both (D, H, W) of the scan."""
    random = np.random.default_rng((*entry.seed, 1))
    label = np.zeros(entry.scan_shape, np.uint8)
    image = np.full(entry.scan_shape, AIR, np.float32)
    _fill(image, TISSUE, (0.5, 0.5, 0.5), (4.0, 0.46, 0.48))
    _fill(image, BONE, (0.5, 0.8, 0.5), (4.0, 0.06, 0.06))  # the spine
    sides = random.permutation([0.28, 0.72])
    for has_tumour, side in zip(entry.anatomy, sides, strict=False):
        centre = (random.uniform(0.4, 0.6), random.uniform(0.48, 0.58), side + random.uniform(-0.02, 0.02))
        axes = (random.uniform(0.17, 0.26), random.uniform(0.12, 0.17), random.uniform(0.11, 0.15))
        _fill(image, KIDNEY, centre, axes)
        _fill(label, 1, centre, axes)
        if has_tumour:
            share = random.uniform(0.45, 0.65)
            direction = random.normal(size=3)
            away = random.uniform(0, 0.9 - share) * direction / np.linalg.norm(direction)
            position = tuple(c + a * offset for c, a, offset in zip(centre, axes, away, strict=True))
            inner = tuple(share * axis for axis in axes)
            _fill(image, TUMOUR, position, inner)
            _fill(label, 2, position, inner)
    image += NOISE * random.standard_normal(entry.scan_shape, np.float32)
    return np.rint(image).astype(np.int16), label


def _fill(
    volume: NDArray[np.float32] | NDArray[np.uint8], value: int, centre: tuple[float, ...], axes: tuple[float, ...]
) -> None:
    """Set the voxels of an ellipsoid to ``value``; centre and half axes are fractions of the volume's size."""
    boxes, squares = [], []
    for axis, (size, middle, half) in enumerate(zip(volume.shape, centre, axes, strict=True)):
        positions = (np.arange(size) + 0.5) / size
        inside = np.flatnonzero(np.abs(positions - middle) <= half)
        boxes.append(slice(inside[0], inside[-1] + 1))
        shape = [1, 1, 1]
        shape[axis] = -1
        squares.append((((positions[boxes[-1]] - middle) / half) ** 2).astype(np.float32).reshape(shape))
    volume[tuple(boxes)][squares[0] + squares[1] + squares[2] <= 1] = value


def _size(options: SyntheticScans, axis: int, index: int, random: np.random.Generator) -> int:
    """Return an axis size: alternately one that windows crop and one that they pad; some D axes are below the patch.

    If the range has no such size, any size of the range is drawn.
    """
    every = range(options.smallest, options.largest + 1)
    patch = options.settings.patch[axis]
    if axis == 0 and index % 4 == 3:
        fitting = [size for size in every if size < patch]
    else:
        wanted = ("crop", "pad")[(index + axis) % 2]
        fitting = [size for size in every if size >= patch and branch(size, patch) == wanted]
    return int(random.choice(fitting or every))
