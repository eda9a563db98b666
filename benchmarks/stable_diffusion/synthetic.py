"""Synthetic raw data for Stable Diffusion: drawn pictures with captions, and small frozen networks fitted to them.

A picture is one coloured shape on a coloured background. The layout is that of :mod:`benchmarks.stable_diffusion.raw`:
tars as written by img2dataset, captions for the evaluation, statistics of their pictures, and frozen networks.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from benchmarks.stable_diffusion import raw
from benchmarks.stable_diffusion.encoders import read_picture
from benchmarks.stable_diffusion.synthetic_networks import NetworkSizes, fitted_networks, scores, statistics
from common.data import synthetic
from common.data.options import Option, comma_separated
from common.errors import ConfigError
from common.formats.jpeg import encode
from common.formats.raw_files import add_member

PER_WORKER = 2048
"""Pictures per process; with fewer, starting a process takes longer than drawing them."""
FITTED = 1024
"""Largest number of pictures that the networks are fitted to."""
_EVAL = 1 << 32
"""Number of the first evaluation picture."""
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (30, 50, 220),
    "yellow": (235, 215, 30),
    "white": (240, 240, 240),
    "black": (15, 15, 15),
}
"""RGB values by colour name."""
SHAPES = ("circle", "square", "triangle")
QUALITY = 95
"""JPEG quality; chroma is not subsampled."""
_FINER = 4
"""Oversampling factor per direction for drawing a shape."""
_RADII = (0.24, 0.32)
"""Range of half the width of a shape, as a fraction of the shorter side of the picture."""
_SHIFT = 0.08
"""Largest shift of a shape from the centre per direction, as a fraction of the shorter side."""


@dataclass(frozen=True)
class ShapePlan:
    """Parameters of a picture.

    Attributes:
        seed, number: determine all random choices; each number gives another picture.
        sides: smallest and largest width and height, px, both included.
    """

    seed: int
    number: int
    sides: tuple[int, int]


@dataclass(frozen=True)
class CaptionedPicture:
    """A JPEG picture with its caption.

    Attributes:
        jpeg: content of the file.
        width, height: px.
    """

    jpeg: bytes
    caption: str
    width: int
    height: int


@dataclass(frozen=True)
class SyntheticPictures(NetworkSizes):
    """Options of ``generate``. ``image_size`` is the side of the networks' input, ``sides`` are those of the files."""

    train: Annotated[int, Option("number of training pictures", least=2)] = 2000
    eval: Annotated[int, Option("number of evaluation pictures", least=2)] = 200
    tars: Annotated[int, Option("number of tars with training pictures", least=1)] = 8
    image_size: Annotated[int, Option("side of the pictures for the networks, px", least=1)] = 32
    sides: Annotated[tuple[int, int], Option("smallest and largest picture side, px", parse=comma_separated)] = (32, 48)
    vae_steps: Annotated[int, Option("training steps of the autoencoder", least=1)] = 240
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tars > self.train:
            raise ConfigError(f"--tars={self.tars}: at most --train={self.train}, one picture per tar")
        if len(self.sides) != 2 or not 8 <= self.sides[0] <= self.sides[1]:
            shown = ",".join(map(str, self.sides))
            raise ConfigError(f"--sides={shown}: smallest side, 8 or more, and largest side, such as 32,48")
        if self.image_size % self.vae.factor:
            raise ConfigError(f"--image-size={self.image_size}: a multiple of the autoencoder's {self.vae.factor}")


def generate(raw_dir: Path, options: SyntheticPictures = SyntheticPictures(), workers: int = 1) -> str:
    """Write tars, captions, statistics and networks to ``raw_dir``, an empty or new folder, and mark it as synthetic.

    Returns:
        Summary with FID and CLIP score by kind of pictures, which bound the scores of a run.

    Raises:
        ConfigError: the networks cannot be fitted to so few pictures.
        DataError: ``raw_dir`` is not empty.
    """
    side = options.image_size
    with synthetic.generated(raw_dir) as partial, torch.no_grad():
        for folder in (raw.IMAGES, raw.VALIDATION, raw.ASSETS):
            (partial / folder).mkdir()
        train, held_out = (
            _drawn(options, first, count, workers) for first, count in ((0, options.train), (_EVAL, options.eval))
        )
        _write_tars(partial / raw.IMAGES, train, options.tars)
        _write_prompts(partial / raw.VALIDATION / raw.PROMPTS, held_out)
        seen = torch.stack([read_picture(drawn.jpeg, side) for drawn in train[:FITTED]])
        captions = [drawn.caption for drawn in train[:FITTED]]
        networks = fitted_networks(seen, captions, options, partial / raw.ASSETS, options.vae_steps, options.seed)
        reference = statistics(networks.inception, torch.stack([_squeezed(drawn, side) for drawn in held_out]))
        np.savez(partial / raw.VALIDATION / raw.STATISTICS, mu=reference.mean_F, sigma=reference.covariance_FF)
        count = min(options.eval, len(seen))
        judged = scores(networks, reference, seen[:count], captions[:count], side // options.vae.factor, options.seed)
        synthetic.mark(partial, asdict(options))
    size = sum(len(drawn.jpeg) for drawn in train) / options.train / 1000
    bounds = "".join(f"\n  {kind}: FID {score.fid:.1f}, CLIP {score.clip:.3f}" for kind, score in judged.items())
    return f"{options.train} pictures for training, {options.eval} for evaluation; {size:.1f} KB each; scores{bounds}"


def _drawn(options: SyntheticPictures, first: int, count: int, workers: int) -> list[CaptionedPicture]:
    plans = [ShapePlan(options.seed, number, options.sides) for number in range(first, first + count)]
    return list(synthetic.drawn(draw, plans, workers, PER_WORKER))


def _write_tars(folder: Path, pictures: Sequence[CaptionedPicture], count: int) -> None:
    """Write tars like img2dataset: keys start with the number of the tar, and members of a sample are adjacent."""
    for number in range(count):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for index, drawn in enumerate(pictures[number::count]):
                key = f"{number:05d}{index:04d}"
                about = {"key": key, "caption": drawn.caption, "width": drawn.width, "height": drawn.height}
                add_member(tar, f"{key}.jpg", drawn.jpeg)
                add_member(tar, f"{key}.json", json.dumps(about).encode())
                add_member(tar, f"{key}.txt", drawn.caption.encode())


def _write_prompts(path: Path, pictures: Sequence[CaptionedPicture]) -> None:
    rows = ["image_id\tid\tcaption", *(f"{index}\t{index}\t{drawn.caption}" for index, drawn in enumerate(pictures))]
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def _squeezed(drawn: CaptionedPicture, side: int) -> Tensor:
    """Return a picture as in the published statistics: 8 bits, resized to a square regardless of its proportions."""
    with Image.open(io.BytesIO(drawn.jpeg)) as opened:
        square = opened.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255


def draw(plan: ShapePlan) -> CaptionedPicture:
    """Draw the picture of ``plan``."""
    random = np.random.default_rng([plan.seed, plan.number])
    width, height = (int(side) for side in random.integers(plan.sides[0], plan.sides[1] + 1, 2))
    inner, outer = random.choice(list(COLOURS), 2, replace=False)
    shape = SHAPES[random.integers(len(SHAPES))]
    share_HW1 = _coverage(shape, width, height, random)[:, :, None]
    pixels = share_HW1 * np.array(COLOURS[inner]) + (1 - share_HW1) * np.array(COLOURS[outer])
    jpeg = encode(Image.fromarray(np.rint(pixels).astype(np.uint8)), QUALITY, "4:4:4")
    return CaptionedPicture(jpeg, f"a {inner} {shape} on a {outer} background", width, height)


def _coverage(shape: str, width: int, height: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return (height, width): fraction of each pixel that the shape covers, within the central square."""
    short = min(width, height)
    across, down = random.uniform(-_SHIFT, _SHIFT, 2) * short
    radius = random.uniform(*_RADII) * short
    x_1W = ((np.arange(width * _FINER) + 0.5) / _FINER - width / 2 - across)[None] / radius
    y_H1 = ((np.arange(height * _FINER) + 0.5) / _FINER - height / 2 - down)[:, None] / radius
    if shape == "circle":
        inside = x_1W**2 + y_H1**2 < 1
    elif shape == "square":
        inside = np.maximum(np.abs(x_1W), np.abs(y_H1)) < 0.9
    else:
        inside = (y_H1 < 0.9) & (2 * np.abs(x_1W) < y_H1 + 1.1)
    return inside.reshape(height, _FINER, width, _FINER).mean((1, 3))
