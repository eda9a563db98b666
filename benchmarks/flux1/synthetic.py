"""Synthetic encodings in the published formats: four patterns of latents, each with its own caption.

All tokens of a picture have the values of its pattern, so a small network can learn them from few samples. A sample
differs from its pattern by some noise, in the latent and in both encodings of the caption.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.flux1.encodings import BINS, EMPTY, EMPTY_FOLDER, RAW_FOLDERS, SHARDS, SPLITS, EncodingSizes
from common.data import synthetic
from common.data.options import Option
from common.errors import ConfigError
from common.formats import saved_dataset
from common.formats.array_shards import TAR, ArraySample

PATTERNS = 4
HADAMARD = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
"""Orthogonal rows: signs of the values of a patch, one row for each pattern."""
LATENT_SHIFT, LATENT_STD = 0.1159, 2.77
"""Mean and standard deviation of the autoencoder's latents, which training normalises to 0 and 1."""
LOG_VARIANCE = -4.0
NOISE = 0.1
"""Standard deviation of a sample around its pattern, relative to that of the patterns."""
PATCH = 2
BYTES_PER_WORKER = 1 << 28


@dataclass(frozen=True)
class SyntheticEncodings(EncodingSizes):
    """Options of ``generate``."""

    train: Annotated[int, Option("number of training samples", least=1)] = 256
    eval: Annotated[int, Option("number of validation samples", least=BINS)] = 64
    shards: Annotated[int, Option("number of files of each split", least=1)] = 2
    form: Annotated[Literal["arrow", "tar"], Option("published form of the files")] = "arrow"
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.latent_size % PATCH:
            raise ConfigError(f"--latent-size={self.latent_size}: must be a multiple of {PATCH}")
        if self.shards > min(self.train, self.eval):
            raise ConfigError(f"--shards={self.shards}: at most --train and --eval, one sample per file")


def generate(raw_dir: Path, options: SyntheticEncodings = SyntheticEncodings(), workers: int = 1) -> str:
    """Write synthetic encodings to ``raw_dir``, an empty or new folder, and mark it as synthetic.

    Returns:
        A summary for the user.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    sample_bytes = 2 * options.sample_elements
    plans = [(split, shard) for split in SPLITS for shard in range(options.shards)]
    per_worker = max(1, BYTES_PER_WORKER * options.shards // (options.train * sample_bytes))
    folders = {split: names[0] for split, names in RAW_FOLDERS.items()}
    with synthetic.generated_folders(raw_dir, "patterns", options, [*folders.values(), EMPTY_FOLDER]) as folder:
        if options.form == "arrow":
            for name in folders.values():
                saved_dataset.write_state(folder / name, SHARDS.schema, options.shards)
        for name, file in EMPTY.items():
            values = patterns(options)[PATTERNS][name]
            np.save(folder / EMPTY_FOLDER / file, values[None].numpy().astype(np.float16))
        for _ in synthetic.drawn(functools.partial(_write, folder, options), plans, workers, per_worker):
            pass
    return f"{options.train} samples to train and {options.eval} to evaluate, of {sample_bytes / 1e6:.3g} MB each"


def patterns(options: SyntheticEncodings) -> list[dict[str, Tensor]]:
    """Return the arrays of each pattern in fp32, and last those of the empty caption, which has no ``mean``.

    The four patterns of ``mean`` are orthogonal. The first feature of a text token, or of CLIP, is the number of the
    pattern less 2, so all encodings of captions differ, too.
    """
    random = np.random.default_rng((options.seed, 0))
    shapes, tiles = options.shapes, options.latent_size // PATCH
    found: list[dict[str, Tensor]] = [{} for _ in range(PATTERNS + 1)]
    for name in EMPTY:
        for number, pattern in enumerate(found):
            pattern[name] = torch.from_numpy(random.standard_normal(shapes[name], np.float32))
            pattern[name][..., 0] = number - PATTERNS // 2
    signs = random.choice((-1.0, 1.0), (options.latent_channels, PATCH, PATCH))
    for number, pattern in enumerate(found[:PATTERNS]):
        values = signs * HADAMARD[number].reshape(PATCH, PATCH)
        pattern["mean"] = torch.from_numpy(np.tile(values, (1, tiles, tiles))).float()
    return found


def sample(options: SyntheticEncodings, split: str, number: int) -> dict[str, Tensor]:
    """Return the arrays of a sample, in bf16; its pattern is random."""
    random = np.random.default_rng((options.seed, 1 + list(SPLITS).index(split), number))
    pattern = _patterns(options)[int(random.integers(PATTERNS))]
    noisy = {
        name: values + NOISE * torch.from_numpy(random.standard_normal(values.shape, np.float32))
        for name, values in pattern.items()
    }
    noisy["mean"] = LATENT_SHIFT + LATENT_STD * noisy["mean"]
    noisy["logvar"] = torch.full(options.shapes["logvar"], LOG_VARIANCE)
    return {name: values.to(torch.bfloat16) for name, values in noisy.items()}


_patterns = functools.lru_cache(maxsize=1)(patterns)


def _write(folder: Path, options: SyntheticEncodings, plan: tuple[str, int]) -> None:
    """Write one file of a split."""
    split, shard = plan
    name = TAR.format(shard) if options.form == "tar" else saved_dataset.shard_name(shard, options.shards)
    count = getattr(options, split)
    numbers = range(count * shard // options.shards, count * (shard + 1) // options.shards)
    samples = (
        ArraySample(f"{number:08d}", sample(options, split, number), number % BINS if split == "eval" else None)
        for number in numbers
    )
    SHARDS.write(folder / RAW_FOLDERS[split][0] / name, samples)
