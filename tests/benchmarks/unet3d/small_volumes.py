"""Prepared folders of small synthetic volumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.unet3d.config import Facts, VolumeReaderSettings
from benchmarks.unet3d.data import VolumeDataSettings
from benchmarks.unet3d.volumes import CASES, FORMAT
from common.data import manifest
from common.data.manifest import FileEntry, Manifest
from common.mlperf.fixed import fixed_facts

SIZE = (8, 12, 10)
SHAPES = [(8, 12, 10), (13, 12, 17), (9, 20, 10), (16, 24, 20), (11, 13, 23), (8, 15, 11)]
EVALUATION = (24, 24, 24)
PERIOD = 251
"""The label of voxel i is i % PERIOD, a prime, so each position has a different pair of image and label values."""


def facts(size: tuple[int, int, int] = SIZE, **changes: object) -> Facts:
    """Return the rules' facts, with crops of ``size``, which need not fit the network."""
    return replace(fixed_facts(Facts, "unet3d"), input_shape=size, **changes)


def settings(
    dtype: torch.dtype = torch.float32,
    size: tuple[int, int, int] = SIZE,
    augment: str = "reference",
    **changes: object,
) -> VolumeDataSettings:
    """Return settings of the reader; ``changes`` are of facts or of the section ``reader``."""
    reader, implementations = VolumeReaderSettings(0, "auto", 2), {"augment": augment}
    of_reader = {name: value for name, value in changes.items() if name in vars(reader)}
    others = {name: value for name, value in changes.items() if name not in of_reader}
    return VolumeDataSettings(facts(size, **others), replace(reader, **of_reader), "reference", dtype, implementations)


def numbered(shape: tuple[int, int, int], number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an image whose voxel i has the value 10000 * number + i, and labels i % PERIOD."""
    index = np.arange(np.prod(shape)).reshape(shape)
    return (10_000 * number + index).astype(np.float32), (index % PERIOD).astype(np.uint8)


def with_objects(shape: tuple[int, int, int], number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random intensities, and labels: a box of class 1, which contains one of class 2."""
    label = np.zeros(shape, np.uint8)
    label[2:6, 3:9, 1:7] = 1
    label[3:5, 4:6, 2:5] = 2
    return np.random.default_rng(number).normal(size=shape).astype(np.float32), label


def write_volumes(
    root: Path, train: Sequence[tuple[np.ndarray, np.ndarray]], evaluation: tuple[int, int, int] = EVALUATION
) -> Path:
    """Write a prepared folder of these training volumes, and one evaluation volume of the shape ``evaluation``."""
    root.mkdir()
    cases, files = {}, {}
    for number, (image, label) in enumerate([*train, numbered(evaluation, 0)]):
        name = f"case_{number:05d}"
        cases[name] = {"shape": list(image.shape), "split": "train" if number < len(train) else "eval"}
        for kind, array in (("x", image), ("y", label)):
            np.save(root / f"{name}_{kind}.npy", array[None])
            files[f"{name}_{kind}.npy"] = FileEntry((root / f"{name}_{kind}.npy").stat().st_size, "")
    (root / CASES).write_text(json.dumps(cases))
    files[CASES] = FileEntry((root / CASES).stat().st_size, "")
    counts = {"train_samples": len(train), "eval_samples": 1}
    manifest.write(root, Manifest(FORMAT, files, counts, True, {}))
    return root
