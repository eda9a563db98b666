"""Raw data: the freely licensed part of LAION-400M in one of three published forms, captions of COCO, frozen networks.

- ``images/00000.tar`` ...: pictures as packed by img2dataset: ``KEY.jpg``, ``KEY.txt`` with the caption, ``KEY.json``;
- ``moments/00000.tar`` ...: MLCommons' form: ``KEY.npy`` with the moments instead of the picture;
- ``encoded/00000.tar`` ...: NVIDIA's form: ``KEY.pyd``, a pickle of moments and encoded caption;
- ``validation/val2014_30k.tsv`` and ``validation/val2014_30k_stats.npz``: captions, and statistics of their pictures;
- ``assets/``: checkpoints of the frozen networks, and the tokenizer's merges.

One of the first three is enough. Tars may be in folders with MLCommons' names, and every other file in any subfolder.
Synthetic data have an additional file with the sizes of their networks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stable_diffusion import formats
from benchmarks.stable_diffusion.frozen.sizes import TextSizes, VaeSizes
from common.config.loading import build
from common.data.manifest import digest
from common.data.raw_layout import find_file
from common.data.synthetic import MARKER, description_of, marker_of
from common.errors import ConfigError, DataError
from common.formats.raw_files import listed

IMAGES, MOMENTS, ENCODED = "images", "moments", "encoded"
PICTURE = "jpg"
FORMS = {IMAGES: PICTURE, MOMENTS: formats.MOMENTS, ENCODED: formats.NVIDIA_ENCODED}
"""Forms of the tars, and the suffix of the member that a sample has besides its caption."""
FOLDERS = {
    IMAGES: (IMAGES, "images-webdataset-filtered", "webdataset-filtered"),
    MOMENTS: (MOMENTS, "moments-webdataset-filtered", "webdataset-moments-filtered"),
    ENCODED: (ENCODED,),
}
"""Folder names of each form: ours, that of MLCommons' downloader, and that of the reference's README."""
VALIDATION = "validation"
PROMPTS, STATISTICS = "val2014_30k.tsv", "val2014_30k_stats.npz"
ASSETS = "assets"
CHECKPOINT = "512-base-ema.ckpt"
CLIP = "open_clip_pytorch_model.bin"
INCEPTION = "pt_inception-2015-12-05-6726825d.pth"
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
DIGESTS = {
    CHECKPOINT: "d635794c1fedfdfa261e065370bea59c651fc9bfa65dc6d67ad29e11869a1824",
    CLIP: "9a78ef8e8c73fd0df621682e7a8e8eb36c6916cb3c16b291a082ecd52ab79cc4",
    INCEPTION: "bd836944fd6db519dfd8d924aa457f5b3c8357ff",
}
"""SHA-256 of the published files; SHA-1 of the last one (mlcommons/training, stable_diffusion/README.md)."""
IMAGE_SIZE = 512
BENCHMARK_TARS = 832
_IMAGE_SIZE, _VAE, _TEXT = "image_size", "vae", "text"
_NAMED = 3  # largest number of files named in a message


@dataclass(frozen=True)
class RawLaion:
    """A raw folder.

    Attributes:
        form: the form to read, one of ``FORMS``.
        tars: tars of that form, sorted by name.
        validation: files of captions and of statistics.
        assets: available files of frozen networks, sorted by name.
        image_size: height and width of the VAE's input, px.
        vae, text: sizes of the networks.
        synthetic: description of synthetic data; None for the benchmark's data.
    """

    form: str
    tars: tuple[Path, ...]
    validation: tuple[Path, Path]
    assets: tuple[Path, ...]
    image_size: int
    vae: VaeSizes
    text: TextSizes
    synthetic: dict[str, Any] | None

    @property
    def checkpoint_digest(self) -> str | None:
        """Return the expected digest of the checkpoint of VAE and text tower; None accepts any."""
        return DIGESTS[CHECKPOINT] if self.synthetic is None else None

    def fingerprint(self) -> str:
        """Return a SHA-256 over the names of the tars and the contents of the small files.

        For synthetic data, the frozen networks are included; the published checkpoint is checked by its digest
        instead. Sizes of tars are in :func:`tar_sizes`, not here: a truncated tar may be downloaded again while
        others are being prepared.
        """
        lines = [self.form, *(path.name for path in self.tars)]
        lines += [digest(path, "sha256") for path in self.validation]
        if self.synthetic is not None:
            lines += [json.dumps(self.synthetic, sort_keys=True)]
            lines += [f"{path.name} {digest(path, 'sha256')}" for path in self.assets]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tar_sizes(paths: Sequence[Path]) -> str:
    """Return a SHA-256 over names and sizes of raw tars, because reading hundreds of gigabytes would take too long."""
    return hashlib.sha256("\n".join(f"{path.name} {path.stat().st_size}" for path in paths).encode()).hexdigest()


def open_raw(raw_dir: Path, form: str | None = None) -> RawLaion:
    """Find the raw data in ``raw_dir`` without reading samples.

    Args:
        form: one of ``FORMS``; None for the only one present.

    Raises:
        DataError: folder, tars, captions or statistics are missing; several forms are present and ``form`` is None;
            or ``SYNTHETIC`` is damaged.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; download the data there or generate synthetic data")
    wanted = FORMS if form is None else (form,)
    firsts = {name: find_file(raw_dir, *(f"{folder}/*.tar" for folder in FOLDERS[name])) for name in wanted}
    found = {name: path.parent for name, path in firsts.items() if path is not None}
    if len(found) > 1:
        raise DataError(f"{raw_dir} has tars in {' and '.join(found)}; select one of them with --source")
    if not found:
        where = " and ".join(str(raw_dir / name) for name in wanted)
        raise DataError(
            f"no tars in {where}, nor in folders of MLCommons' names; 'mlperf-suite download "
            "benchmark=stable_diffusion' prints their addresses"
        )
    ((chosen, folder),) = found.items()
    tars = tuple(listed(folder, "*.tar"))
    captions, statistics = (_required(raw_dir, name) for name in (PROMPTS, STATISTICS))
    assets = tuple(
        sorted(
            filter(None, (find_file(raw_dir, name) for name in (CHECKPOINT, CLIP, INCEPTION, VOCABULARY))),
            key=lambda path: path.name,
        )
    )
    read = (tars[0], captions, statistics, *assets)
    marker, synthetic = marker_of(raw_dir, *read), description_of(raw_dir, *read)
    _require_whole_set(folder, tars, synthetic)
    image_size, vae, text = IMAGE_SIZE, VaeSizes(), TextSizes()
    if marker is not None and synthetic is not None:
        image_size, vae, text = _sizes_of(marker, synthetic)
    return RawLaion(chosen, tars, (captions, statistics), assets, image_size, vae, text, synthetic)


def _required(raw_dir: Path, name: str) -> Path:
    found = find_file(raw_dir, name)
    if found is None:
        raise DataError(f"{raw_dir / VALIDATION / name} is missing, and no other folder of the raw data has it")
    return found


def _require_whole_set(folder: Path, found: tuple[Path, ...], synthetic: Mapping[str, Any] | None) -> None:
    """Raise DataError if tars of the benchmark's data are missing, or others are beside them."""
    if synthetic is not None:
        return
    names, there = [f"{number:05d}.tar" for number in range(BENCHMARK_TARS)], {path.name for path in found}
    if others := sorted(there.difference(names)):
        raise DataError(
            f"{folder / others[0]} is none of the {BENCHMARK_TARS} tars {names[0]} to {names[-1]}; move it away"
        )
    if missing := [name for name in names if name not in there]:
        raise DataError(
            f"{folder} lacks {len(missing)} of {BENCHMARK_TARS} tars, such as {', '.join(missing[:_NAMED])}; to use "
            f"only a part, put a file {MARKER} into the raw folder"
        )


def _sizes_of(marker: Path, synthetic: Mapping[str, Any]) -> tuple[int, VaeSizes, TextSizes]:
    """Return the sizes in the description of synthetic data; the published sizes are the default."""
    image_size = synthetic.get(_IMAGE_SIZE, IMAGE_SIZE)
    try:
        vae: VaeSizes = build(VaeSizes, synthetic.get(_VAE, {}), _VAE)
        text: TextSizes = build(TextSizes, synthetic.get(_TEXT, {}), _TEXT)
    except ConfigError as error:
        raise DataError(f"{marker}: {error}") from error
    if type(image_size) is not int or image_size < 1 or image_size % vae.factor:
        raise DataError(f"{marker}: image_size is {image_size!r}, but must be a multiple of the VAE's {vae.factor}")
    return image_size, vae, text
