"""Shared code of all data preparations: lock a folder, resume only with the same source, check space, link files."""

from __future__ import annotations

import errno
import fcntl
import filecmp
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from common.data import atomic, manifest
from common.data.manifest import FileEntry, Manifest
from common.data.published import SYNTHETIC, Published
from common.errors import DataError
from common.untrusted.strict_json import read_json_object

LOCK = "prepare.lock"
"""Name of the lock file of a preparation in its folder; it is not deleted."""
Sample = TypeVar("Sample")
Result = TypeVar("Result")


@contextmanager
def locked(folder: Path, name: str = LOCK, doing: str = "preparing") -> Iterator[None]:
    """Create ``folder`` if needed, and lock it against other processes while the block runs.

    The lock is released even if the block fails; folder and lock file stay.

    Args:
        doing: what the processes do with the folder, for the message.

    Raises:
        DataError: the folder cannot be written, or another process has the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = open(folder / name, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {error}") from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process is {doing} {folder}") from error
        except OSError as error:  # Lustre without the mount option flock, NFS without its lock service
            raise DataError(
                f"{folder / name} cannot be locked: {error.strerror}; name a folder on a file system with locks"
            ) from error
        yield


@dataclass
class Preparation:
    """A preparation that has the lock of its folder; see :func:`preparing`.

    Attributes:
        format: name and version of the prepared format.
        published: published properties of the data; ``SYNTHETIC`` for synthetic data.
        synthetic: description of synthetic raw data; None for real data.
        found: the manifest, if these data are prepared already.
    """

    data_dir: Path
    format: str
    wanted: Mapping[str, str]
    published: Published
    synthetic: Mapping[str, Any] | None
    found: Manifest | None
    _work_dir: Path | None = None

    def begin(self, folder: str) -> Path:
        """Return the folder for intermediate files below ``data_dir``, which :meth:`finish` deletes.

        Raises:
            DataError: as :func:`begin_or_continue`.
        """
        self._work_dir = self.data_dir / folder
        begin_or_continue(self.data_dir, self._work_dir / "source.json", self.wanted)
        return self._work_dir

    def finish(
        self,
        files: Mapping[str, FileEntry],
        counts: Mapping[str, int],
        real: str,
        source: Mapping[str, str] | None = None,
        keep: bool = False,
    ) -> Manifest:
        """Write and return the manifest, and delete the intermediate files.

        Args:
            real: description of real data.
            source: further entries of the manifest's ``source``.
            keep: do not delete the intermediate files.
        """
        described = real if self.synthetic is None else json.dumps(self.synthetic, sort_keys=True)
        origin = {**self.wanted, "description": described, **(source or {}), "prepared": now()}
        made = self.published.manifest(self.format, files, counts, origin)
        manifest.write(self.data_dir, made)
        if self._work_dir is not None and not keep:
            shutil.rmtree(self._work_dir)
        return made


@contextmanager
def preparing(
    data_dir: Path,
    data_format: str,
    command: str,
    wanted: Mapping[str, str],
    published: Published,
    synthetic: Mapping[str, Any] | None,
    adopted: Path | None = None,
) -> Iterator[Preparation]:
    """Lock ``data_dir`` while the block runs, and look whether it has the data already.

    Args:
        data_dir, data_format, command, wanted: see :func:`already_prepared`.
        published: published properties of the benchmark's data.
        synthetic: description of synthetic raw data; None for real data.
        adopted: folder of files that others prepared. If it is ``data_dir``, its manifest may be of any source.

    Raises:
        DataError: as :func:`locked` and :func:`already_prepared`.
    """
    published = published if synthetic is None else SYNTHETIC
    with locked(data_dir):
        compared = None if adopted is not None and data_dir.samefile(adopted) else wanted
        found = already_prepared(data_dir, data_format, command, compared, published)
        yield Preparation(data_dir, data_format, wanted, published, synthetic, found)


def already_prepared(
    data_dir: Path,
    expected_format: str,
    command: str,
    wanted: Mapping[str, str] | None,
    published: Published | None = None,
) -> Manifest | None:
    """Return the manifest of ``data_dir``; None if the preparation is not complete.

    Args:
        wanted: required source: the ``fingerprint`` of the raw data and, if any, the ``settings`` and
            :func:`decoding`; None accepts any.
        published: decides whether data with an older manifest are the benchmark's; None rejects such a manifest.

    Raises:
        DataError: the data were prepared from another source or with other settings, or files are missing or changed.
    """
    if not (data_dir / manifest.NAME).exists():
        return None
    found = manifest.read(data_dir, expected_format, command, undecided=published is not None)
    if wanted is not None:
        _compare(data_dir, found.source, wanted)
    return found if published is None else published.settled(data_dir, found, command)


def begin_or_continue(data_dir: Path, state: Path, wanted: Mapping[str, str]) -> None:
    """Write ``wanted`` to the file ``state``; if it exists, check that the interrupted preparation has the same source.

    Args:
        data_dir: folder of the prepared data, for messages.
        state: a file that the caller deletes when the preparation is complete.

    Raises:
        DataError: the interrupted preparation had another source or other settings, or ``state`` is damaged.
    """
    if not state.exists():
        atomic.write_text(state, json.dumps(wanted) + "\n")
        return
    try:
        found = read_json_object(state)
    except DataError as error:
        raise DataError(f"{state} is damaged ({error}); delete {data_dir} and prepare again") from error
    _compare(data_dir, found, wanted)


def require_space(data_dir: Path, needed: int, *, more: bool = True) -> None:
    """Check, before the work, that the disk of ``data_dir`` has ``needed`` free bytes.

    Args:
        needed: bytes that are still to be written.
        more: whether some data have been written before, for the message.

    Raises:
        DataError: the disk has fewer free bytes.
    """
    free = shutil.disk_usage(data_dir).free
    if needed > free:
        amount = f"{needed / 1e9:.1f} GB{' more' if more else ''}"
        raise DataError(f"{data_dir} needs {amount}; its disk has {free / 1e9:.1f} GB left")


def read_all(
    read: Callable[[Sample], Result], samples: Sequence[Sample], workers: int, doing: str = "read"
) -> list[Result]:
    """Return ``read(sample)`` of all samples, in order, with a progress bar; raises the first error.

    Args:
        workers: threads that call ``read``.
        doing: text of the progress bar.
    """
    with ThreadPoolExecutor(workers) as pool:
        try:
            return list(tqdm(pool.map(read, samples), doing, len(samples), unit="sample", disable=None))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def decoding(trust: bool) -> dict[str, str]:
    """Return the entry of a manifest's ``source`` for ``--trust``: whether all pictures were decoded."""
    return {manifest.DECODED: manifest.TRUSTED if trust else manifest.COMPLETELY}


def now() -> str:
    """Return the current UTC time, for ``prepared`` in a manifest."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _compare(data_dir: Path, found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    if found.get("fingerprint") != wanted["fingerprint"]:
        raise DataError(f"{data_dir} was prepared from other raw data; delete it or name another --data-dir")
    if found.get("settings") != wanted.get("settings"):
        raise DataError(
            f"{data_dir} was prepared with {found.get('settings')}, not with {wanted.get('settings')}; delete it, name "
            "another --data-dir, or keep to the same settings"
        )
    if (found.get(manifest.DECODED), wanted.get(manifest.DECODED)) == (manifest.TRUSTED, manifest.COMPLETELY):
        raise DataError(
            f"{data_dir} was prepared with --trust, which decodes no picture; delete it, name another --data-dir, or "
            "give --trust again"
        )


_NOT_LINKED = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def assets_of(data_dir: Path) -> Path:
    """Default assets folder: files such as vocabularies and checkpoints, which a run may read before ``run_start``."""
    return data_dir.with_name(f"{data_dir.name}-assets")


def link_or_copy(path: Path, target: Path, remedy: str) -> None:
    """Hard-link ``path`` to ``target``, or copy it if a link is not possible. Does nothing if ``target`` is that file.

    A copy with the same size and modification time counts as that file.

    Args:
        target: new name of the file; its folder is created if needed.
        remedy: advice to the user if ``target`` is another file, for the message.

    Raises:
        DataError: ``target`` is another file, or the disk is too small for a copy.
    """
    if is_there(path, target, remedy):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.partial")
    beside.unlink(missing_ok=True)
    try:
        os.link(path.resolve(), beside)
    except OSError as error:
        if error.errno not in _NOT_LINKED:
            raise
        require_space(target.parent, path.stat().st_size)
        shutil.copy2(path, beside)
    beside.replace(target)


def link_or_copy_all(files: Sequence[tuple[Path, Path]], data_dir: Path, remedy: str) -> None:
    """Link or copy each path to its target in ``data_dir``, if all copies fit on the disk; see :func:`link_or_copy`.

    Raises:
        DataError: a target is another file, or the disk is too small for all copies.
    """
    require_space_to_link((path for path, target in files if not target.exists()), data_dir)
    for path, target in files:
        link_or_copy(path, target, remedy)


def require_space_to_link(paths: Iterable[Path], data_dir: Path) -> None:
    """Check, before :func:`link_or_copy`, that the disk of ``data_dir`` has room for the files of other disks.

    Raises:
        DataError: the disk has fewer free bytes.
    """
    disk = data_dir.stat().st_dev
    copied = sum(found.st_size for found in (path.stat() for path in paths) if found.st_dev != disk)
    if copied:
        require_space(data_dir, copied)


def is_there(path: Path, target: Path, remedy: str) -> bool:
    """Return whether ``target`` exists and is ``path``, or a copy of it with the same size, and the same time or bytes.

    Copies lose their times on file systems that store seconds, such as Lustre, or if rsync does not keep them.

    Raises:
        DataError: ``target`` is another file; the message includes ``remedy``.
    """
    if not target.exists():
        return False
    if target.samefile(path):
        return True
    mine, other = path.stat(), target.stat()
    same = mine.st_size == other.st_size
    if not same or (mine.st_mtime_ns != other.st_mtime_ns and not filecmp.cmp(path, target, shallow=False)):
        raise DataError(f"{target} is another file than {path}; {remedy}")
    return True
