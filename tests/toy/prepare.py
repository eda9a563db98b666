"""Generate, prepare and verify volumes and their parameters; raw data are one ``npz`` file for each split."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.data import manifest, synthetic
from common.data.commands import DataCommands
from common.data.manifest import Manifest
from common.data.preparation import preparing
from common.data.published import Published
from common.errors import DataError
from tests.toy.data import FORMAT, PREPARE_COMMAND

SPLITS = ("train", "eval")
PUBLISHED = Published({"train_samples": 524_288, "eval_samples": 65_536})


def generate(raw_dir: Path, train: int, eval: int, size: int) -> str:
    """Write synthetic volumes; each parameter scales a pattern, and both splits have the same patterns."""
    generator = np.random.default_rng(0)
    patterns_PV = generator.normal(size=(4, size**3))
    with synthetic.generated(raw_dir) as partial:
        for split, count in zip(SPLITS, (train, eval), strict=True):
            parameters_NP = generator.uniform(-1, 1, size=(count, 4))
            volumes = np.exp(0.5 * parameters_NP @ patterns_PV).astype(np.float32)
            np.savez(partial / f"{split}.npz", volumes=volumes, parameters=parameters_NP.astype(np.float32))
        synthetic.mark(partial, {"train": train, "eval": eval, "size": size})
    return f"{train} and {eval} volumes of {size} x {size} x {size}"


def prepare(raw_dir: Path, data_dir: Path) -> Manifest:
    """Write the logarithms of the densities; do nothing if the prepared data exist."""
    counts, names = {}, []
    missing = [split for split in SPLITS if not (raw_dir / f"{split}.npz").exists()]
    if missing:
        raise DataError(f"{raw_dir / missing[0]}.npz is missing; run 'mlperf-suite generate benchmark=toy'")
    wanted = {"fingerprint": " ".join(manifest.digest(raw_dir / f"{split}.npz", "sha256") for split in SPLITS)}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, synthetic.description_of(raw_dir)) as job:
        if job.found is not None:
            return job.found
        for split in SPLITS:
            with np.load(raw_dir / f"{split}.npz") as raw:
                np.save(data_dir / f"{split}_volumes.npy", np.log(raw["volumes"]))
                np.save(data_dir / f"{split}_parameters.npy", raw["parameters"])
                counts[f"{split}_samples"] = len(raw["volumes"])
            names += [f"{split}_volumes.npy", f"{split}_parameters.npy"]
        return job.finish(manifest.describe_files(data_dir, names), counts, "volumes")


def verify(data_dir: Path) -> Manifest:
    """Check every checksum."""
    return manifest.verify(data_dir, FORMAT, PREPARE_COMMAND)


COMMANDS = DataCommands(
    "toy",
    raw="volumes and their parameters",
    prepared="prepared volumes",
    real="volumes",
    generate=generate,
    prepare=prepare,
    verify=verify,
    published=PUBLISHED,
)
