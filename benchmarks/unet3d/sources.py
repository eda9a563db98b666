"""Where KiTS19 comes from: labels in its repository, images in its authors' public store."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.unet3d import raw
from common.data.download import RemoteFile, fetch
from common.errors import DataError
from common.untrusted.regular_file import open_regular

REPOSITORY = "https://github.com/neheller/kits19"
IMAGES = "https://kits19.sfo2.digitaloceanspaces.com"
"""Where the repository's own ``starter_code.get_imaging`` takes them from."""
LICENCE = "CC BY-NC-SA 4.0, no account"
CUT_OFF = "cut off"
_CHUNK = 1 << 22


def download(raw_dir: Path, workers: int = 4) -> Iterator[str]:
    """Fetch the images that are missing beside the labels that the user cloned, and read every file to its end.

    Nobody published sizes or checksums of these files; each is gzip, whose own checksum finds what was cut off or
    damaged on the way. Prepared volumes have published checksums: ``verify --checksums``.

    Args:
        raw_dir: KiTS19's repository, its ``data``, or a folder that holds the repository as ``kits19``.
        workers: files at a time.

    Yields:
        One line for each case that is complete.

    Raises:
        DataError: labels are missing, a transfer failed (what arrived is kept), or a file is damaged.
    """
    folder = raw.data_folder(raw_dir)
    names = [raw.case_name(number) for number in range(raw.LABELLED_CASES)]
    missing = [name for name in names if not (folder / name / raw.LABEL).is_file()]
    if missing:
        raise DataError(
            f"{raw_dir} lacks {len(missing)} of {len(names)} files of labels, such as {missing[0]}/{raw.LABEL}; they "
            f"lie in KiTS19's repository ({LICENCE}, about 0.5 GB, no checksum published):\n"
            f"  git clone {REPOSITORY} {raw_dir / 'kits19'}\n"
            f"Then run this command again: it fetches the images (about 20 GB, no checksum published) from\n"
            f"  {_image(names[0]).url} …"
        )
    with ThreadPoolExecutor(workers) as pool:
        try:
            yield from pool.map(lambda name: _bring(folder, name), names)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _image(name: str) -> RemoteFile:
    return RemoteFile(f"{name}/{raw.IMAGE}", f"{IMAGES}/master_{name.removeprefix('case_')}.nii.gz", LICENCE)


def _bring(folder: Path, name: str) -> str:
    image = folder / name / raw.IMAGE
    label = folder / name / raw.LABEL
    if fault := _fault(label):
        raise DataError(f"{label} is {fault}; take it from a fresh clone of {REPOSITORY}")
    fetched = not image.is_file()
    if fetched:
        fetch(_image(name), image)
    if fault := _fault(image):
        if fault == CUT_OFF:
            image.replace(image.with_name(f"{image.name}.partial"))  # where the transfer continues
        else:
            image.unlink()
        raise DataError(f"{image} was {fault}; run the command again to fetch the rest")
    return f"{folder / name}: {'fetched' if fetched else 'already there'}, both files complete"


def _fault(path: Path) -> str | None:
    """What is wrong with a gzip file, None if nothing is."""
    try:
        with open_regular(path) as packed, gzip.open(packed) as file:
            while file.read(_CHUNK):
                pass
    except EOFError:
        return CUT_OFF
    except (gzip.BadGzipFile, zlib.error) as error:
        return f"damaged ({error})"
    return None
