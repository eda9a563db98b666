"""Synthetic raw data for Stable Diffusion: drawn pictures with captions, and small frozen networks fitted to them.

The layout is that of :mod:`benchmarks.stable_diffusion.raw`: tars as written by img2dataset, captions for the
evaluation, statistics of their pictures, and frozen networks in the formats of the published files.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from PIL import Image
from torch import Tensor

from benchmarks.stable_diffusion import raw
from benchmarks.stable_diffusion.frozen.sizes import (
    SMALL_INCEPTION,
    SMALL_TEXT,
    SMALL_VAE,
    SMALL_VISION,
    InceptionSizes,
    TextSizes,
    VaeSizes,
    VisionSizes,
)
from benchmarks.stable_diffusion.moments import read_picture
from benchmarks.stable_diffusion.shapes import DrawnShape, ShapePlan, draw
from benchmarks.stable_diffusion.stand_in_networks import Score, Sizes, fitted_networks, scores, statistics
from common.config.loading import build
from common.data import stand_in
from common.data.commands import Option, option
from common.errors import ConfigError
from common.formats.raw_files import add_member

WORTH_PROCESSES = 4096
"""Number of pictures from which on several processes draw them."""
FITTED = 1024
"""Largest number of pictures that the networks are fitted to."""
_EVAL = 1 << 32
"""Number of the first evaluation picture."""


@dataclass(frozen=True)
class Request:
    """Parameters of the synthetic data.

    Attributes:
        train, eval: pictures of each split.
        tars: tars of training pictures.
        image_size: height and width of the networks' input, px.
        sides: smallest and largest width and height of a stored picture, px.
        vae, text, vision, inception: sizes of the frozen networks.
        vae_steps: training steps of the autoencoder.
        seed: determines everything else.
    """

    train: int = 2000
    eval: int = 200
    tars: int = 8
    image_size: int = 32
    sides: tuple[int, int] = (32, 48)
    vae: VaeSizes = SMALL_VAE
    text: TextSizes = SMALL_TEXT
    vision: VisionSizes = SMALL_VISION
    inception: InceptionSizes = SMALL_INCEPTION
    vae_steps: int = 240
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("train", 2), ("eval", 2), ("tars", 1), ("image_size", 1), ("vae_steps", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{_dashed(name)}={getattr(self, name)}: at least {least}")
        if self.tars > self.train:
            raise ConfigError(f"--tars={self.tars}: each has one of --train={self.train} pictures at least")
        if len(self.sides) != 2 or not 8 <= self.sides[0] <= self.sides[1]:
            raise ConfigError(f"--sides={_listed(self.sides)}: the least, at least 8, and the largest, such as 32,48")
        if self.image_size % self.vae.factor:
            raise ConfigError(f"--image-size={self.image_size}: a multiple of the autoencoder's {self.vae.factor}")
        if self.text.embedding != self.vision.embedding:
            raise ConfigError(f"--text and --vision: embeddings of {self.text.embedding} and {self.vision.embedding}")

    @property
    def sizes(self) -> Sizes:
        """Return the sizes of the networks."""
        return Sizes(self.vae, self.text, self.vision, self.inception)


@dataclass(frozen=True)
class Generated:
    """Summary of the written data.

    Attributes:
        pictures: number of pictures by split.
        bytes: size of all training pictures.
        scores: FID and CLIP score by kind of pictures; they bound the scores of a run.
    """

    pictures: dict[str, int]
    bytes: int
    scores: dict[str, Score] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} pictures to {split}" for split, count in self.pictures.items())
        told = "".join(f"\n  {what}: FID {score.fid:.1f}, CLIP {score.clip:.3f}" for what, score in self.scores.items())
        return f"{counts}; {self.bytes / self.pictures['train'] / 1000:.1f} KB a picture; scores{told}"


def generate(raw_dir: Path, workers: int = 1, **options: Any) -> Generated:
    """Write tars, captions, statistics and networks to ``raw_dir``, and mark the folder as synthetic.

    Args:
        raw_dir: an empty or new folder.
        workers: processes that draw pictures.
        options: fields of a :class:`Request`.

    Raises:
        ConfigError: the sizes are inconsistent, or the networks cannot be fitted to so few pictures.
        DataError: ``raw_dir`` is not empty.
    """
    request = Request(**options)
    stand_in.require_unused(raw_dir)
    with stand_in.generated(raw_dir) as partial, torch.no_grad():
        for folder in (raw.IMAGES, raw.VALIDATION, raw.ASSETS):
            (partial / folder).mkdir()
        train, held_out = (_drawn(request, first, count, workers) for first, count in _splits(request))
        _write_tars(partial / raw.IMAGES, train, request.tars)
        _write_prompts(partial / raw.VALIDATION / raw.PROMPTS, held_out)
        seen = torch.stack([read_picture(drawn.jpeg, request.image_size) for drawn in train[:FITTED]])
        captions = [drawn.caption for drawn in train[:FITTED]]
        networks = fitted_networks(seen, captions, request.sizes, partial / raw.ASSETS, request.vae_steps, request.seed)
        evaluated = torch.stack([_squeezed(drawn, request.image_size) for drawn in held_out])
        reference = statistics(networks.inception, evaluated)
        np.savez(partial / raw.VALIDATION / raw.STATISTICS, mu=reference.mean_F, sigma=reference.covariance_FF)
        count = min(request.eval, len(seen))
        latent_size = request.image_size // request.vae.factor
        made = scores(networks, reference, seen[:count], captions[:count], latent_size, request.seed)
        stand_in.mark(partial, asdict(request))
    size = sum(len(drawn.jpeg) for drawn in train)
    return Generated({"train": request.train, "eval": request.eval}, size, made)


def _splits(request: Request) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first picture number and the number of pictures, for training and for evaluation."""
    return (0, request.train), (_EVAL, request.eval)


def _drawn(request: Request, first: int, count: int, workers: int) -> list[DrawnShape]:
    plans = [ShapePlan(request.seed, number, request.sides) for number in range(first, first + count)]
    return list(stand_in.drawn(draw, plans, workers if count >= WORTH_PROCESSES else 1, chunk=64))


def _write_tars(folder: Path, pictures: Sequence[DrawnShape], count: int) -> None:
    """Write tars like img2dataset: keys start with the number of the tar, and members of a sample are adjacent."""
    for number in range(count):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for place, drawn in enumerate(pictures[number::count]):
                key = f"{number:05d}{place:04d}"
                about = {"key": key, "caption": drawn.caption, "width": drawn.width, "height": drawn.height}
                add_member(tar, f"{key}.jpg", drawn.jpeg)
                add_member(tar, f"{key}.json", json.dumps(about).encode())
                add_member(tar, f"{key}.txt", drawn.caption.encode())


def _write_prompts(path: Path, pictures: Sequence[DrawnShape]) -> None:
    rows = ["image_id\tid\tcaption", *(f"{place}\t{place}\t{drawn.caption}" for place, drawn in enumerate(pictures))]
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def _squeezed(drawn: DrawnShape, side: int) -> Tensor:
    """Return a picture as in the published statistics: 8 bits, resized to a square regardless of its proportions."""
    with Image.open(io.BytesIO(drawn.jpeg)) as opened:
        square = opened.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    """Parse ``32,48`` as integers."""
    return tuple(int(part) for part in text.split(","))


def _option(of: dataclasses.Field[Any]) -> Option:
    default, name = of.default, f"--{_dashed(of.name)}"
    if dataclasses.is_dataclass(default):
        kind = type(default)

        def sizes(text: str) -> Any:
            """Parse ``{channels: 16}`` as sizes of a network; the published sizes are the default."""
            try:
                # OmegaConf parses YAML like Hydra: 1e-06 is a number
                read = OmegaConf.to_container(OmegaConf.create(f"{of.name}: {text}"))
                return build(kind, read[of.name], of.name)  # type: ignore[call-overload, index]
            except (ConfigError, OmegaConfBaseException, yaml.YAMLError) as error:
                raise ConfigError(f"{name}={text}: {error}") from error

        return option(
            name, type=sizes, default=default, help=f"sizes, such as '{{}}' for the published {kind.__name__}"
        )
    shown = _listed(default) if isinstance(default, tuple) else default
    return option(
        name, type=_numbers if isinstance(default, tuple) else int, default=default, help=f"(default {shown})"
    )


OPTIONS = tuple(_option(of) for of in dataclasses.fields(Request))
"""Options of the command besides the folder and the number of workers."""
