"""``mlperf-suite download``: fetch missing files of ``sources.yaml``, and check the existing ones.

A file counts as present in any folder below the raw folder if its path ends with its name in ``sources.yaml``, with
or without ``.gz``, so files that other tools put into subfolders are not fetched again. ``.download.json`` stores
size, time and checksum of each checked file, so a second command does not read terabytes again. ``--check`` reads
all.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urljoin

from tqdm import tqdm

from common.data import atomic
from common.data.download import Client
from common.data.preparation import locked, require_space
from common.data.sources import Inventory, RemoteFile, Sources, SourceSet, fault_of, with_checksums
from common.data.synthetic import marker_of
from common.errors import ConfigError, DataError
from common.formats.raw_files import is_data
from common.untrusted import archives
from common.untrusted.regular_file import read_text
from common.untrusted.strict_json import FILE_ENTRIES, parse, read_json_object

STATE, LOCK = ".download.json", ".download.lock"
_MD5_LINE = re.compile(r"([0-9a-f]{32})?\s+\*?(?:\./)?(\S.*)")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_INFLATED = 8
"""Largest accepted ratio of unpacked to packed bytes."""
_STATE_EVERY_S = 5
_NAMED = 5
"""Maximum number of files that one message names."""


@dataclass(frozen=True)
class _Missing:
    """A file that must be fetched, and its target path."""

    file: RemoteFile
    path: Path


@dataclass
class Download:
    """One run of ``mlperf-suite download``.

    Attributes:
        workers: number of parallel downloads; at most eight connections per host are used.
        check: whether to compare only, and fetch nothing.
    """

    sources: Sources
    raw_dir: Path
    workers: int
    check: bool
    client: Client

    def run(self, chosen: Sequence[str]) -> Iterator[str]:
        """Fetch the sets ``chosen``, or by default the sets that the benchmark needs.

        Yields:
            A line for each set, and a line for each of its files that was wrong.

        Raises:
            ConfigError: a set is unknown.
            DataError: files are missing or wrong and cannot be fetched, or a download failed.
        """
        if marker_of(self.raw_dir) is not None:
            raise DataError(f"{self.raw_dir} holds synthetic data, which are not downloaded; give another --raw-dir")
        if self.raw_dir.exists() and not self.raw_dir.is_dir():
            raise DataError(f"{self.raw_dir} is no folder; give another --raw-dir")
        with contextlib.nullcontext() if self.check else locked(self.raw_dir, LOCK, "downloading to"):
            self._seen = _read_state(self.raw_dir)
            by_hand: dict[str, str] = {}
            lacking = []
            for source in self._selected(chosen):
                if self.check and source.list_name and not (self.raw_dir / f"{source.list_name}.md5").is_file():
                    lacking.append(f"{source.name}: the list {source.list_name}.md5, which the command fetches")
                listed = self._listed(source)
                missing, lines = self._compare(listed)
                yield from lines
                if missing and not listed.addresses:
                    by_hand[listed.name] = self._steps(listed, missing)
                elif missing and self.check:
                    lacking.append(f"{listed.name}: {_names([item.file.name for item in missing])}")
                elif listed.beside not in by_hand:
                    if not self.check:
                        yield from self._bring(listed, missing)
                    self._check_contents(listed)
                    yield self._summary(listed, len(missing))
            if by_hand:
                steps = "\n".join(by_hand.values())
                raise DataError(f"{self.raw_dir} lacks files that have to be fetched by hand:\n{steps}")
            if lacking:
                raise DataError(f"{self.raw_dir} lacks files:\n  " + "\n  ".join(lacking))

    def _selected(self, chosen: Sequence[str]) -> list[SourceSet]:
        if unknown := [name for name in chosen if name not in self.sources]:
            raise ConfigError(f"--sets {unknown[0]}: unknown; the sets are {', '.join(self.sources)}")
        if chosen:
            return [source for source in map(self.sources.__getitem__, chosen) if source.files or source.tree]
        found: dict[str, SourceSet] = {}
        inventory = Inventory(self.raw_dir)
        for source in self.sources.values():
            if source.optional or not (source.files or source.tree):
                continue
            key = f"choice {source.choice}" if source.choice else source.name
            if key not in found or inventory.present(source) > inventory.present(found[key]):
                found[key] = source
        return list(found.values())

    def _listed(self, source: SourceSet) -> SourceSet:
        """Return the set with names and checksums from its publisher's list, which is stored in the raw folder."""
        if source.list_name is not None:
            return self._with_md5s(source, source.list_name)
        if source.tree is not None:
            return self._with_tree(source, source.tree)
        return source

    def _with_md5s(self, source: SourceSet, name: str) -> SourceSet:
        paths = [self.raw_dir / f"{name}{end}" for end in (".uri", ".md5")]
        for path in paths:
            if not path.is_file() and (self.check or not source.addresses):
                return source
            if not path.is_file():
                urls = tuple(f"{base}/metadata/{path.name}" for base in self.sources.stores["mlcommons"])
                self.client.fetch(RemoteFile(path.name, urls, source.licence), path)
        address, checksums = read_text(paths[0]), _md5s(paths[1])
        # A mirror has the same folders as the store, on another host.
        official = self.sources.stores["mlcommons"][-1]
        address = address.strip().removeprefix(official).strip("/")
        try:
            return with_checksums(source, f"{self.sources.stores['mlcommons'][0]}/{address}", checksums)
        except KeyError as error:
            raise DataError(f"{paths[1]}: lacks {error.args[0]}; delete it and run the command again") from error

    def _with_tree(self, source: SourceSet, tree: Mapping[str, Any]) -> SourceSet:
        path = self.raw_dir / f"{source.name}.files.json"
        if not path.is_file():
            if self.check:
                raise DataError(f"{path} is missing: run the command without --check first, it fetches the list")
            atomic.write_text(path, json.dumps(self._fetched_tree(source, tree), indent=0) + "\n")
        known = read_json_object(path, most=2**28, remedy="delete it and run the command again")
        if not all(_is_entry(*item) for item in known.items()):
            raise DataError(f"{path}: is no list of files; delete it and run the command again")
        if len(known) != source.named:
            raise DataError(
                f"{path}: lists {len(known)} files and not {source.named}; delete it and run the command again"
            )
        files = [
            RemoteFile(name, tuple(f"{address}/{quote(name)}" for address in source.addresses), source.licence, *facts)
            for name, facts in known.items()
        ]
        return replace(source, files=tuple(files))

    def _fetched_tree(self, source: SourceSet, tree: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return name to size and SHA-256 of the files of a Hugging Face repository."""
        found: dict[str, list[Any]] = {}
        revision = tree["path"].rpartition("/resolve/")[2]
        base = self.sources.stores["huggingface"][0]
        url: str | None = f"{base}/api/datasets/{tree['tree']}/tree/{revision}?recursive=true"
        visited: set[str] = set()
        while url is not None and url not in visited:
            visited.add(url)
            text, headers = self.client.text(url)
            for entry in _entries(text, url):
                name = str(entry.get("path"))
                if entry.get("type") == "file" and fnmatch(name, tree["pattern"]):
                    large = entry.get("lfs")
                    checksum = f"sha256:{large.get('oid')}" if isinstance(large, dict) else None
                    found[name] = [entry.get("size"), checksum]
                    if not _is_entry(name, found[name]):
                        raise DataError(f"{url}: is not the list of files that belongs there ({name[:200]!r})")
            following = re.search(r'<([^>]+)>;\s*rel="next"', headers.get("Link", ""))
            url = urljoin(url, following[1]) if following else None
        return dict(sorted(found.items()))

    def _compare(self, source: SourceSet) -> tuple[list[_Missing], list[str]]:
        """Return the files of a set that must be fetched, and a line for each existing file that is wrong."""
        inventory = Inventory(self.raw_dir)
        missing, lines, wrong = [], [], []
        folder = self._folder(source, inventory)
        todo: list[tuple[RemoteFile, Path]] = []
        for file in source.files:
            if inventory.is_replaced(file, source):
                continue
            path = inventory.find_file(file, source.also_in)
            if path is None:
                missing.append(_Missing(file, folder(file.name)))
            elif path.is_dir():
                wrong.append(f"{path} is a folder and no file; move it away")
            elif path.name != PurePosixPath(file.name).name.removesuffix(".gz") or not file.name.endswith(".gz"):
                todo.append((file, path))
        for file, path in tqdm(todo, f"{source.name}: compared", unit="file", disable=None if len(todo) > 1 else True):
            fault = self._fault(path, file)
            if fault is None:
                continue
            if not file.urls or self.check:
                wrong.append(f"{path} {fault}")
            else:
                lines.append(f"{path} {fault}: it is fetched again")
                missing.append(_Missing(file, path))
        if wrong:
            remedy = (
                "run the command without --check" if source.addresses else f"delete and fetch again ({source.licence})"
            )
            raise DataError(f"{_names(wrong, '; ')}: {remedy}")
        return missing, lines

    def _fault(self, path: Path, file: RemoteFile) -> str | None:
        stat = path.stat()
        known = self._seen.get(file.name)
        before = [stat.st_size, stat.st_mtime_ns]
        checksum = file.checksum or (known[2] if known else None)
        if known == [*before, checksum] and checksum is not None and not self.check:
            return None
        fault = fault_of(path, replace(file, checksum=checksum))
        if fault is None:
            self._seen[file.name] = [*before, checksum]
        return fault

    def _folder(self, source: SourceSet, inventory: Inventory) -> Callable[[str], Path]:
        """Return a function from a file name to its target path: next to existing files of the set, if any."""
        neighbours = self.sources[source.beside] if source.beside is not None else source
        for file in neighbours.files:
            if (path := inventory.find_file(file, neighbours.also_in)) is None:
                continue
            for name in (file.name, file.name.removesuffix(".gz")):
                if path.as_posix().endswith(f"/{name}"):
                    root = Path(path.as_posix().removesuffix(f"/{name}"))
                    return lambda name: root / name
            return lambda name: path.parent / PurePosixPath(name).name
        return lambda name: self.raw_dir / name

    def _bring(self, source: SourceSet, missing: list[_Missing]) -> Iterator[str]:
        """Fetch files, and unpack archives."""
        if missing and source.beside and Inventory(self.raw_dir).present(self.sources[source.beside]) == 0:
            raise DataError(f"{source.name}: the files of {source.beside} have to be there first")
        sizes = {item.file.name: _size_of(item.file, source) for item in missing}
        total = sum(sizes.values())
        need = total - sum(_partial_bytes(item.path) for item in missing)
        unpacked = sum(_unpacked_bytes(name, size) for name, size in sizes.items() if name in source.unpack)
        require_space(self.raw_dir, max(0, need) + unpacked)
        last_write = time.monotonic()
        try:
            for file, path in self._fetched(source, missing, total):
                stat = path.stat()
                self._seen[file.name] = [stat.st_size, stat.st_mtime_ns, file.checksum]
                if time.monotonic() - last_write > _STATE_EVERY_S:
                    _write_state(self.raw_dir, self._seen)
                    last_write = time.monotonic()
        finally:
            _write_state(self.raw_dir, self._seen)
        for file in source.files:
            folders = source.unpack.get(file.name)
            inventory = Inventory(self.raw_dir)
            if folders and not inventory.is_replaced(file, source):
                archive = inventory.find(file.name)
                assert archive is not None
                unpack(archive, archive.parent, folders)
                yield f"{archive}: unpacked to {', '.join(folders.values())}; the archive is no longer needed"

    def _check_contents(self, source: SourceSet) -> None:
        """Compare unpacked files with their published checksums."""
        inventory = Inventory(self.raw_dir)
        files = list(source.contents)
        if source.md5s is not None and (path := inventory.find(source.md5s[0])) is not None:
            for name, md5 in _md5s(path).items():
                files.append(RemoteFile(f"{source.md5s[1]}/{name}", (), source.licence, checksum=md5 and f"md5:{md5}"))
        wrong = []
        for file in tqdm(files, f"{source.name}: compared", unit="file", disable=None if files else True):
            found = inventory.find(file.name)
            if found is None:
                wrong.append(f"{file.name} is missing")
            elif (fault := self._fault(found, file)) is not None:
                wrong.append(f"{found} {fault}")
        if wrong:
            raise DataError(f"{_names(wrong, '; ')}: delete the unpacked folder and run the command again")
        if not self.check:
            _write_state(self.raw_dir, self._seen)

    def _fetched(self, source: SourceSet, missing: list[_Missing], total: int) -> Iterator[tuple[RemoteFile, Path]]:
        bar = tqdm(
            desc=source.name,
            total=total or None,
            unit="B",
            unit_scale=True,
            disable=not missing,
            delay=0 if sys.stderr.isatty() else 60,
            mininterval=0.5 if sys.stderr.isatty() else 60,
        )
        lock = threading.Lock()

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        self.client.advance = advance
        with bar, ThreadPoolExecutor(self.workers) as pool, self.client.stopped_by_failure():
            begun = {pool.submit(self.client.fetch, item.file, item.path): item for item in missing}
            try:
                for done in as_completed(begun):
                    yield done.result(), begun[done].path
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _summary(self, source: SourceSet, fetched: int) -> str:
        inventory = Inventory(self.raw_dir)
        packed = [file for file in source.files if not inventory.is_replaced(file, source)]
        checked = sum(file.checksum is not None for file in packed)
        how = [f"{fetched} fetched now"] if fetched else []
        how += [f"{checked} compared with a checksum"] if checked else []
        how += [f"{len(packed) - checked} without a published checksum"] if len(packed) > checked else []
        how += [f"{len(source.files) - len(packed)} unpacked before"] if len(packed) < len(source.files) else []
        return f"{self.raw_dir}: {source.name}, {source.count} files: {', '.join(how)}"

    def _steps(self, source: SourceSet, missing: list[_Missing]) -> str:
        facts = [_facts(item.file) for item in missing[:_NAMED]]
        more = [f"    … and {len(missing) - _NAMED} more"] if len(missing) > _NAMED else []
        steps = (source.account or "").format(raw_dir=shlex.quote(str(self.raw_dir))).rstrip().splitlines()
        return "\n".join([f"  {source.what} ({source.licence}):", *facts, *more, *(f"    {line}" for line in steps)])


def described(sources: Sources) -> Iterator[str]:
    """Yield the lines of ``download --list``: all sets with files, sizes, licences and addresses. Needs no network."""
    for source in sources.values():
        kind = "only with --sets" if source.optional else f"choice: {source.choice}" if source.choice else "needed"
        size = "size unknown" if source.size is None else f"{source.size / 1e9:,.3g} GB"
        yield f"{source.name} ({kind}): {source.what}; {source.count} files, {size}"
        yield f"  licence: {source.licence}; address last seen {source.seen}"
        for address in source.addresses:
            yield f"  {address}/"
        for line in (source.account or "").format(raw_dir="RAW_DIR").rstrip().splitlines():
            yield f"  {line}"
        if source.tree is not None:
            yield f"    {source.tree['pattern']}: names, sizes and checksums are in the repository's list"
        for file in source.files:
            yield _facts(file)


def _unpacked_bytes(name: str, size: int) -> int:
    """Estimate the bytes of an archive's files: its own size, or twice as many if it is compressed."""
    return size if name.endswith(".tar") else 2 * size


def unpack(archive: Path, folder: Path, folders: Mapping[str, str]) -> None:
    """Unpack folders of a tar archive. The folders are renamed to their final names only when all are complete.

    Args:
        archive: ``.tar`` or ``.tar.gz``.
        folders: maps a folder, at any depth in the archive, to its new name; other members are not unpacked.

    Raises:
        DataError: the archive is damaged, lacks a folder or contains a link or device, or the disk is too small.
    """
    partial = folder / f"{archive.name}.unpacked.partial"
    if partial.exists():  # left by an interrupted command
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    size = archive.stat().st_size
    require_space(partial, size)

    def target_of(member: tarfile.TarInfo) -> str | None:
        parts = PurePosixPath(member.name).parts
        if member.isdir() or not is_data(member.name):
            return None
        for inside, name in folders.items():
            wanted = PurePosixPath(inside).parts
            for start in range(len(parts) - len(wanted) + 1):
                if parts[start : start + len(wanted)] == wanted:
                    return "/".join([name, *parts[start + len(wanted) :]])
        return None

    mode = "r|" if archive.suffix == ".tar" else "r|gz"
    archives.unpack(archive, partial, target_of, most=_INFLATED * size + 2**26, mode=mode)
    for name in folders.values():
        if not (partial / name).is_dir():
            raise DataError(f"{archive}: has no folder {name}; delete it and run the command again")
    for name in folders.values():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            (partial / name).replace(target)
    shutil.rmtree(partial)


def _size_of(file: RemoteFile, source: SourceSet) -> int:
    """Return the size of a file; if unknown, estimate it from the size of the whole set."""
    if file.bytes is not None or source.bytes is None:
        return file.bytes or 0
    unknown = sum(other.bytes is None for other in source.files)
    return max(0, source.bytes - sum(other.bytes or 0 for other in source.files)) // unknown


def _md5s(path: Path) -> dict[str, str | None]:
    """Return path to MD5 from a list of checksums; None for a path without MD5."""
    found: dict[str, str | None] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if (match := _MD5_LINE.fullmatch(line)) is None:
            raise DataError(f"{path}, line {number}: is no MD5 and path; delete it and run the command again")
        found[match[2]] = match[1]
    return found


def _entries(text: str, url: str) -> list[dict[str, Any]]:
    try:
        found = parse(text, FILE_ENTRIES)
    except ValueError as error:
        raise DataError(f"{url}: is not the list of files that belongs there ({error})") from error
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise DataError(f"{url}: is not the list of files that belongs there")
    return found


def _is_entry(name: str, facts: object) -> bool:
    """Return whether an entry of a list of files has a path below the raw folder, a size, and a checksum or None."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or not isinstance(facts, list) or len(facts) != 2:
        return False
    size, checksum = facts
    return type(size) is int and size >= 0 and (checksum is None or bool(_SHA256.fullmatch(str(checksum))))


def _is_state(facts: object) -> bool:
    return isinstance(facts, list) and len(facts) == 3 and (facts[2] is None or isinstance(facts[2], str))


def _facts(file: RemoteFile) -> str:
    size = "" if file.bytes is None else f"  {file.bytes:,} bytes"
    return f"    {file.name}{size}" + (f"  {file.checksum}" if file.checksum else "")


def _names(names: Iterable[str], separator: str = ", ") -> str:
    listed = list(names)
    more = f"{separator}… and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return separator.join(listed[:_NAMED]) + more


def _partial_bytes(path: Path) -> int:
    partial = path.with_name(f"{path.name}.partial")
    return partial.stat().st_size if partial.is_file() else 0


def _read_state(raw_dir: Path) -> dict[str, list[Any]]:
    path = raw_dir / STATE
    with contextlib.suppress(DataError, FileNotFoundError):
        return {name: facts for name, facts in read_json_object(path).items() if _is_state(facts)}
    return {}


def _write_state(raw_dir: Path, seen: Mapping[str, list[Any]]) -> None:
    atomic.write_text(raw_dir / STATE, json.dumps(seen, indent=0) + "\n")


Extra = Callable[[Path, Sources, Client, bool], Iterable[str]]
"""Fetches files that ``sources.yaml`` cannot list: (raw folder, sources, client, compare only) to lines to print."""
