"""A raw folder of a few pictures, and small networks for its preparation."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.stable_diffusion import raw
from benchmarks.stable_diffusion.frozen.clip import TextTower
from benchmarks.stable_diffusion.frozen.published import save_stable_diffusion
from benchmarks.stable_diffusion.frozen.sizes import TextSizes, VaeSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.synthetic_networks import small_merges
from common.data import synthetic

SIDE = 16
VAE = VaeSizes(channels=8, multipliers=(1, 1, 2), blocks=1, groups=4)
TEXT = TextSizes(vocabulary=514 + 20, context=12, width=16, layers=2, heads=2, mlp=32, embedding=8)
SIZES = {"image_size": SIDE, "vae": dataclasses.asdict(VAE), "text": dataclasses.asdict(TEXT)}
MOMENTS, CAPTIONS = (8, 4, 4), (12, 16)
Members = dict[str, bytes]


def picture(width: int, height: int, seed: int) -> bytes:
    """Return a JPEG of smooth noise."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), np.uint8))
    file = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=95)
    return file.getvalue()


def pictures(tar: int, count: int) -> Members:
    """Return the members of a tar of img2dataset, in reversed order."""
    members: Members = {}
    for number in reversed(range(count)):
        key = f"{tar:05d}{number:04d}"
        members[f"{key}.jpg"] = picture(20 + 3 * number, 33 - number, 100 * tar + number)
        members[f"{key}.json"] = b"{}"
        members[f"{key}.txt"] = f"Caption {number} of {tar}, naïve &amp; plain".encode()
    return members


def write_tar(path: Path, members: Members) -> None:
    """Write a tar; its folder is created if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def read_tar(path: Path) -> Members:
    """Return contents by name, in the tar's order."""
    with tarfile.open(path) as tar:
        found = {}
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            found[member.name] = file.read()
        return found


def networks(seed: int = 5) -> tuple[AutoencoderKL, TextTower]:
    """Return a VAE and a text tower with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoencoderKL(VAE), TextTower(TEXT)


def write_raw(folder: Path, form: str, members: list[Members], features: int = 8) -> Path:
    """Write a synthetic raw folder with one tar per element of ``members``, and return the folder."""
    for number, content in enumerate(members):
        write_tar(folder / form / f"{number:05d}.tar", content)
    validation, assets = folder / raw.VALIDATION, folder / raw.ASSETS
    validation.mkdir()
    rows = ["image_id\tid\tcaption", *(f"{number}\t{number + 7}\ta caption {number}" for number in range(5))]
    (validation / raw.PROMPTS).write_text("\n".join(rows) + "\n", encoding="utf-8")
    np.savez(validation / raw.STATISTICS, mu=np.zeros(features), sigma=np.eye(features))
    assets.mkdir()
    save_stable_diffusion(assets / raw.CHECKPOINT, *networks())
    merges = small_merges(["a caption of plain text", "another caption, and a naive one"], TEXT.vocabulary - 514)
    (assets / raw.VOCABULARY).write_bytes(merges)
    synthetic.mark(folder, SIZES)
    return folder
