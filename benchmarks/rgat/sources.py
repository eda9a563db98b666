"""Where IGBH comes from: single files of the two largest sizes, an archive of each other one.

Nobody published checksums of the single files; what is fetched is compared with the numbers of nodes that are known.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from benchmarks.rgat.raw import EDGES, FEATURES, LABELS, NODES, open_raw, published
from common.data import atomic
from common.data import download as downloads
from common.data.download import RemoteFile
from common.data.preparation import require_space
from common.errors import DataError
from common.untrusted.archives import named_damage, tar_members
from common.untrusted.regular_file import open_regular

STORE = "https://igb-public.s3.us-east-2.amazonaws.com"
LICENCE = "ODC-By 1.0, no account: https://github.com/IllinoisGraphBenchmark/IGB-Datasets"
FOLDERS = {"full": "IGBH", "large": "igb_large"}
"""Sizes that are published as single files, with their folders in the store."""
ARCHIVES = {
    "medium": "7f0df4296eca36553ff3a6a63abbd347",
    "small": "2f42077be60a074aec24f7c60089e1bd",
    "tiny": "83fbc1091497ff92cf20afe82fae0ade",
}
"""The others, with the MD5 of their archives (IllinoisGraphBenchmark/IGB-Datasets, igb/download.py)."""
EDGES_OF = {
    "full": 5_812_005_639,
    "large": 2_004_750_425,
    "medium": 239_492_193,
    "small": 25_488_616,
    "tiny": 1_962_714,
}
"""Of the relations whose number is known: all but those to journals and conferences."""
_EDGE_BYTES = 16
_SLACK = 2**26
"""Bytes that an archive may have beside the files that are read."""


def wanted_files(size: str) -> list[str]:
    """What a preparation reads of a size, below the raw folder."""
    settings = published(size)
    return [
        *(f"{name}/{FEATURES}" for name in settings.types),
        f"{settings.seeds}/{LABELS}",
        *(f"{relation}/{EDGES}" for relation in settings.relations),
    ]


def remote_files(size: str) -> list[RemoteFile]:
    """What has to be fetched of a size."""
    if size in FOLDERS:
        folder = f"{STORE}/{FOLDERS[size]}/processed"
        return [RemoteFile(name, f"{folder}/{name}", LICENCE) for name in wanted_files(size)]
    archive = f"igb_heterogeneous_{size}.tar.gz"
    return [RemoteFile(archive, f"{STORE}/igb-heterogeneous/{archive}", LICENCE, None, f"md5:{ARCHIVES[size]}")]


def expected_bytes(size: str) -> int:
    """About what the files of a size take, unpacked."""
    width = published(size).feature_size * 4
    return sum(NODES[size].values()) * width + EDGES_OF[size] * _EDGE_BYTES


def download(raw_dir: Path, size: str, workers: int = 1) -> Iterator[str]:
    """Fetch IGBH in one of its sizes; what is there already is not fetched again.

    Args:
        raw_dir: receives the files.
        size: a name in ``raw.NODES``.
        workers: files at a time.

    Yields:
        A line for each file, after one that says how much it is and under which licence.

    Raises:
        DataError: the disk is too small, a transfer failed (the command continues it), or a file is not what was
            published.
    """
    missing = [name for name in wanted_files(size) if not (raw_dir / name).is_file()]
    if missing:
        yield f"IGBH-{size}: about {expected_bytes(size) / 1e9:,.0f} GB, {LICENCE}"
        raw_dir.mkdir(parents=True, exist_ok=True)
        there = sum(path.stat().st_size for path in raw_dir.rglob("*") if path.is_file())
        copies = 2 if size in ARCHIVES else 1  # packed, and unpacked
        require_space(raw_dir, copies * expected_bytes(size) - there)
    if size in ARCHIVES and missing:
        (file,) = remote_files(size)
        (archive,) = downloads.check_or_download([file], raw_dir)
        _unpack(archive, raw_dir, missing, 4 * expected_bytes(size) + _SLACK)
        archive.unlink()
    elif size in FOLDERS:
        with ThreadPoolExecutor(workers) as pool:
            try:
                for paths in pool.map(lambda file: downloads.check_or_download([file], raw_dir), remote_files(size)):
                    yield f"{paths[0]}: there"
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    source = open_raw(raw_dir, size)
    yield f"{raw_dir}: {source.name}, as many nodes of each type as published"


def _unpack(archive: Path, raw_dir: Path, missing: list[str], most: int) -> None:
    """Bring the ``missing`` files from an archive, in which they lie in some folder ``processed``."""
    left = set(missing)
    with open_regular(archive) as packed, named_damage(f"{archive} is damaged"):
        for opened, member in tar_members(packed, f"{archive} is damaged", "r|gz", most=most):
            name = "/".join(PurePosixPath(member.name).parts[-2:])
            if name not in left or not member.isfile():
                continue
            content = opened.extractfile(member)
            assert content is not None
            with atomic.written(raw_dir / name) as partial, open(partial, "wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
            left.remove(name)
    if left:
        raise DataError(f"{archive} lacks {', '.join(sorted(left))}; delete it and run the command again")
