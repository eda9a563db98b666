"""Where the data and the frozen networks come from: MLCommons' store, through its own downloader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.stable_diffusion import raw
from common.data.download import RemoteFile, check_or_download
from common.errors import DataError

_STORE = "https://training.mlcommons-storage.org/metadata/"


def _from_store(licence: str, name: str) -> str:
    """Licence, and how a file is got: the downloader makes a folder of files from a list."""
    return f"{licence}; MLCommons' R2 downloader (https://github.com/mlcommons/r2-downloader) with {_STORE}{name}.uri"


_LAION = "LAION-400M's rows with a licence: CC BY and the like, as KEY.json says of each picture, no account"
TARS = {
    raw.IMAGES: _from_store(_LAION, "table-diffusion-laion-400m-filtered-images-dataset"),  # so it is spelt
    raw.MOMENTS: _from_store(_LAION, "stable-diffusion-laion-400m-filtered-moments-dataset"),
}
"""Forms of the training data to where they are; nobody publishes NVIDIA's."""
VOCABULARY = RemoteFile(
    f"{raw.ASSETS}/{raw.VOCABULARY}",
    f"https://github.com/openai/CLIP/raw/main/clip/{raw.VOCABULARY}",
    "MIT, no account",
    1_356_917,
    "sha256:924691ac288e54409236115652ad4aa250f48203de50a9e4722a6ecd48d6804a",
)
_COCO = "COCO's captions: CC BY 4.0, no account"
PLACED = [
    RemoteFile(
        f"{raw.VALIDATION}/{raw.PROMPTS}",
        None,
        _from_store(_COCO, "stable-diffusion-coco2014-validation-prompts-dataset"),
    ),
    RemoteFile(
        f"{raw.VALIDATION}/{raw.STATISTICS}",
        None,
        _from_store(_COCO, "stable-diffusion-coco2014-validation-stats-dataset"),
    ),
    RemoteFile(
        f"{raw.ASSETS}/{raw.CHECKPOINT}",
        None,
        _from_store("CreativeML Open RAIL++-M, no account", "stable-diffusion-sd-checkpoint"),
        checksum=f"sha256:{raw.DIGESTS[raw.CHECKPOINT]}",
    ),
    RemoteFile(
        f"{raw.ASSETS}/{raw.CLIP}",
        None,
        _from_store("MIT, no account", "stable-diffusion-clip-checkpoint"),
        checksum=f"sha256:{raw.DIGESTS[raw.CLIP]}",
    ),
    RemoteFile(
        f"{raw.ASSETS}/{raw.INCEPTION}",
        None,
        _from_store("Apache-2.0, no account", "stable-diffusion-inception-checkpoint"),
        checksum=f"sha1:{raw.DIGESTS[raw.INCEPTION]}",
    ),
]
"""What else the user fetches, to be found under these names."""


def download(raw_dir: Path, source: str = raw.MOMENTS) -> Iterator[str]:
    """Fetch the tokenizer's merges, and check what the user placed in ``raw_dir``, with checksums where there are any.

    Args:
        raw_dir: see :mod:`benchmarks.stable_diffusion.raw`.
        source: which form of the training data it is to have.

    Yields:
        A line for each file, and one for the tars.

    Raises:
        DataError: files are missing, each with its source in the message, or one is not what it should be.
    """
    numbers = range(raw.BENCHMARK_TARS)
    names = [f"{source}/{number:05d}.tar" for number in numbers]
    missing = [name for name in names if not (raw_dir / name).is_file()]
    lacking = [file for file in PLACED if not (raw_dir / file.name).is_file()]
    if missing:
        where = TARS.get(source, "made by NVIDIA's script of its submissions from v4.0 on, and published by nobody")
        what = f"{names[0]} … {names[-1]} ({len(missing)} of {len(names)} are missing)"
        lacking.append(RemoteFile(what, None, where))
    if lacking:
        check_or_download(lacking, raw_dir)
        raise DataError(f"{raw_dir} lacks files")
    for path in check_or_download([VOCABULARY, *PLACED], raw_dir):
        yield f"{path}: as expected"
    size = sum((raw_dir / name).stat().st_size for name in names)
    yield f"{raw_dir / source}: {len(names)} tars, {size / 1e9:,.0f} GB; nobody published checksums that we know of"
