"""Where LibriSpeech comes from: OpenSLR's archives, fetched, checked and unpacked."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from benchmarks.rnnt.raw import EVAL_SUBSET, FOLDER, TRAIN_SUBSETS, check_subsets
from common.data.download import RemoteFile, check_or_download
from common.data.preparation import require_space
from common.errors import DataError
from common.formats.raw_files import is_data
from common.untrusted import archives

_URL = "https://www.openslr.org/resources/12/{}.tar.gz"
_LICENCE = "LibriSpeech (Panayotov et al., 2015), CC BY 4.0, no account"
_KNOWN = {
    "dev-clean": (337_926_286, "42e2234ba48799c1f50f24a7926300a1"),
    "train-clean-100": (6_387_309_499, "2a93770f6d5c6c964bc36631d331a522"),
    "train-clean-360": (23_049_477_885, "c0e676e450a7ff2f54aeade5171606fa"),
    "train-other-500": (30_593_501_606, "d1a0fd59409feb2c614ce4d30c387708"),
}
ARCHIVES = {
    subset: RemoteFile(f"{subset}.tar.gz", _URL.format(subset), _LICENCE, size, f"md5:{md5}")
    for subset, (size, md5) in _KNOWN.items()
}
"""Subset to its archive: https://www.openslr.org/12, sizes and MD5 as published there."""
_SLACK = 64 * 2**20
"""Bytes by which an archive may inflate to more than twice its size; FLAC cannot be compressed further."""


def download(raw_dir: Path, train_subsets: Sequence[str] = TRAIN_SUBSETS) -> Iterator[str]:
    """Fetch and unpack archives; those that are there are checked, those that are unpacked stay so.

    Args:
        raw_dir: receives the archives, and in ``LibriSpeech`` what is in them.
        train_subsets: which to fetch beside dev-clean.

    Yields:
        A line for each archive.

    Raises:
        ConfigError: a subset is none of LibriSpeech's.
        DataError: a transfer failed, an archive is damaged, or the disk is too small.
    """
    check_subsets(train_subsets)
    for subset in (EVAL_SUBSET, *train_subsets):
        archive = ARCHIVES[subset]
        path = check_or_download([archive], raw_dir)[0]
        folder = raw_dir / FOLDER / subset
        if folder.is_dir():
            yield f"{path}: as expected, unpacked before"
            continue
        unpack(path, folder)
        yield f"{path}: as expected, unpacked to {folder}"


def unpack(archive: Path, folder: Path) -> None:
    """Unpack what an archive has in its folder ``LibriSpeech/SUBSET`` to ``folder``, whose name is ``SUBSET``.

    ``folder`` has its name only once all is there. Links and devices are refused, whatever else lies beside the subset
    stays packed.

    Raises:
        DataError: the archive is damaged, has nothing of this subset or what is no file, or the disk is too small.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    if partial.exists():  # of a command that was cut off
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    require_space(partial, archive.stat().st_size)  # what FLAC takes packed and unpacked
    files = archives.unpack(
        archive,
        partial,
        lambda member: _within(member, archive, folder.name),
        most=2 * archive.stat().st_size + _SLACK,
    )
    if not files:
        raise DataError(f"{archive} has nothing in {FOLDER}/{folder.name}; fetch it again")
    partial.replace(folder)


def _within(member: tarfile.TarInfo, archive: Path, subset: str) -> str | None:
    """Where a file goes below the folder of the subset; None for folders, and for files of no subset or no data set."""
    parts = PurePosixPath(member.name).parts
    if parts[:2] != (FOLDER, subset) or member.isdir() or not is_data(member.name):
        return None
    if ".." in parts or not member.isfile():
        raise DataError(f"{archive}: {member.name[:200]!r} is no file of the subset; fetch it again")
    return "/".join(parts[2:])
