"""Sources of a workload's raw data and starting weights: ``benchmarks/<name>/sources.yaml``.

A set is a group of files with the same origin and licence. Its keys:

- ``what``: contents, for users; ``licence``; ``seen``: month in which the publisher's own documents had this address.
- ``store`` and ``path``: base address, as a store of ``stores.yaml`` and a path in it; file names are appended.
- ``mirrors``: other pairs of store and path with the same files.
- ``account``: steps and commands for a set that needs a login or an accepted licence; ``{raw_dir}`` in them stands
  for the raw folder. A set without ``store`` is not fetched.
- ``files``: maps each name to properties of the file: ``bytes``; ``checksum``; ``or``: its names in other layouts;
  ``instead``: paths that replace it when all of them exist, such as the folder that was unpacked from it; ``unpack``:
  maps a folder in the archive to its unpacked name; ``as``: the local name if it differs from the published one, in
  which ``{number}`` is the number within a range. ``{00000..00831}.tar`` stands for 832 names. The key may also be a
  plain list of names.
- ``also_in``: other folders that official tools put the files in; ``"*"`` for any folder.
- ``folder``: folder for the files, below the raw folder; ``beside``: a set whose files must exist already. The files
  of this set are stored next to them.
- ``list``: name of MLCommons' list of MD5s, for more than 30 files.
- ``contents``: files in the archives, in the format of ``files``.
- ``md5s``: a file of the set with MD5s of the files that are unpacked to the folder ``md5s_of``.
- ``tree``: Hugging Face repository whose file list provides the names that match ``pattern``.
- ``count``: number of files, if ``tree`` or another file lists their names.
- ``bytes``: size of all files together.
- ``choice``: only one of the sets with the same choice is needed; the first is the default.
- ``optional``: whether the set is fetched only if ``--sets`` names it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from common.errors import ConfigError, DataError
from common.formats.raw_files import is_data
from common.untrusted.regular_file import open_regular


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set.

    Attributes:
        name: path below the raw folder, with ``/`` as separator.
        urls: download addresses, in the order in which they are tried; empty if the user must fetch the file.
        licence: licence, and the account that the download needs.
        bytes: published size, None if unknown.
        other_names: paths of the same file in other layouts.
        checksum: ``md5:...``, ``sha1:...`` or ``sha256:...`` in hexadecimal digits, of which the first eight or more
            are enough; None if it is not published.
    """

    name: str
    urls: tuple[str, ...]
    licence: str
    bytes: int | None = None
    checksum: str | None = None
    other_names: tuple[str, ...] = ()


SIGNATURES = {
    ".gz": (0, b"\x1f\x8b"),
    ".tgz": (0, b"\x1f\x8b"),
    ".zip": (0, b"PK"),
    ".npz": (0, b"PK"),
    ".tar": (257, b"ustar"),
    ".jpg": (0, b"\xff\xd8\xff"),
    ".parquet": (0, b"PAR1"),
    ".pkl": (0, b"\x80"),
}
"""File suffix to the offset and the bytes of the signature of this file type."""
_PAGES = (b"<!doctype", b"<html", b"<?xml", b"<head", b"<error", b"version https://git-lfs")
_PAGE_TYPES = ("text/html", "application/xhtml+xml")
BEGINNING = 600
"""Number of bytes at the start of a file that are checked."""


def foreign_content(name: str, beginning: bytes, content_type: str | None = None) -> str | None:
    """Return why the content does not fit the file name, e.g. a login page from a proxy; None if nothing is wrong.

    Args:
        beginning: first bytes of the file, at least :data:`BEGINNING`; a shorter file is padded with zeros.
        content_type: ``Content-Type`` of the HTTP response, if any.
    """
    begins = beginning[:60].rstrip(b"\0").decode("ascii", "replace")
    text = beginning.lstrip()[:60].lower()
    if text.startswith(_PAGES) and not name.endswith((".xml", ".html")):
        return f"is a page or a pointer that begins with {begins!r} and not {name}"
    if (content_type or "").split(";")[0].strip().lower() in _PAGE_TYPES and not name.endswith(".html"):
        return f"is a page (Content-Type: {content_type}) that begins with {begins!r} and not {name}"
    if text.startswith(b'{"') and not name.endswith((".json", ".jsonl")):
        return f"is JSON that begins with {begins!r} and not {name}"
    offset, expected = SIGNATURES.get(Path(name).suffix, (0, b""))
    found = beginning[offset : offset + len(expected)]
    if found != expected[: len(found)]:
        return f"begins with {begins!r}, as no {Path(name).suffix} file does"
    return None


def fault_of(path: Path, file: RemoteFile) -> str | None:
    """Return how ``path`` differs from the published properties of ``file``, None if it does not.

    Reads the whole file if there is a checksum.
    """
    size = path.stat().st_size
    if file.bytes is not None and size != file.bytes:
        return f"has {size:,} bytes instead of {file.bytes:,}"
    with open_regular(path) as opened:
        if (fault := foreign_content(file.name, opened.read(BEGINNING).ljust(BEGINNING, b"\0"))) is not None:
            return fault
        if file.checksum is not None:
            algorithm, _, expected = file.checksum.partition(":")
            opened.seek(0)
            found = hashlib.file_digest(opened, algorithm).hexdigest()  # type: ignore[arg-type]
            if not found.startswith(expected):
                return f"has {algorithm} {found} instead of {expected}"
    return None


ROOT = Path(__file__).resolve().parents[2]
STORES = Path(__file__).with_name("stores.yaml")
_RANGE = re.compile(r"(.*)\{(\d+)\.\.(\d+)\}(.*)")
_MIRROR = re.compile(r"([a-z_]+)=(https?://[^\s,]+?)/*")
_KEYS = {
    "what", "licence", "seen", "store", "path", "mirrors", "account", "files", "folder", "beside", "list", "tree",
    "pattern", "count", "bytes", "choice", "optional", "md5s", "md5s_of",
    "contents", "also_in",
}  # fmt: skip


@dataclass(frozen=True)
class SourceSet:
    """A group of files. The module docstring explains the other attributes.

    Attributes:
        name: its key in the YAML file.
        files: in the order in which they are fetched; empty if only ``tree`` lists them.
        addresses: addresses of the folder with the files, mirrors last; ``--mirror`` goes before its store's address.
        instead: name of a file to the paths below the raw folder that replace it.
        unpack: name of an archive to a map from its folders to their names below the raw folder.
        named: number of files whose names are in another file.
        md5s: name of a list of MD5s, and the folder with the files that it lists.
    """

    name: str
    what: str
    licence: str
    seen: str
    bytes: int | None
    files: tuple[RemoteFile, ...]
    addresses: tuple[str, ...]
    account: str | None
    folder: str
    beside: str | None
    instead: Mapping[str, tuple[str, ...]]
    unpack: Mapping[str, Mapping[str, str]]
    contents: tuple[RemoteFile, ...]
    list_name: str | None
    md5s: tuple[str, str] | None
    tree: Mapping[str, Any] | None
    named: int
    choice: str | None
    optional: bool
    also_in: tuple[str, ...] = ()

    def file(self, name: str) -> RemoteFile:
        """Return the file among ``files`` and ``contents`` whose name without folders is ``name``.

        Raises:
            KeyError: there is no such file.
        """
        for file in (*self.files, *self.contents):
            if PurePosixPath(file.name).name == name:
                return file
        raise KeyError(name)

    @property
    def size(self) -> int | None:
        """Bytes of the set: ``bytes`` if given, else the sum over ``files``; None if one of these is unknown."""
        if self.bytes is not None or any(file.bytes is None for file in self.files):
            return self.bytes
        return sum(file.bytes or 0 for file in self.files)

    @property
    def count(self) -> int:
        """Number of files."""
        return len(self.files) or self.named


@dataclass(frozen=True)
class Sources(Mapping[str, SourceSet]):
    """The sets of a workload by name.

    Attributes:
        sets: in the order of the YAML file.
        prepared_bytes: size of the output of ``prepare``; 0 if it only links the raw files.
        stores: name of a store to its base addresses.
    """

    benchmark: str
    sets: Mapping[str, SourceSet]
    prepared_bytes: int
    stores: Mapping[str, tuple[str, ...]]

    def __getitem__(self, name: str) -> SourceSet:
        return self.sets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sets)

    def __len__(self) -> int:
        return len(self.sets)


def read_sources(benchmark: str, mirrors: Mapping[str, str] | None = None) -> Sources:
    """Read ``benchmarks/<benchmark>/sources.yaml``.

    Args:
        mirrors: name of a store to the base address that is tried before its own.

    Raises:
        ConfigError: ``mirrors`` names an unknown store, or the workload has no ``sources.yaml``.
    """
    stores = {name: tuple(bases) for name, bases in _load(STORES).items()}
    for name, base in (mirrors or {}).items():
        if name not in stores:
            raise ConfigError(f"mirror {name}={base}: unknown store; the stores are {', '.join(stores)}")
        stores[name] = (base, *stores[name])
    path = ROOT / "benchmarks" / benchmark / "sources.yaml"
    if not path.is_file():
        raise ConfigError(f"{benchmark} has no {path}: no data are published for it")
    content = _load(path)
    entries: dict[str, Any] = dict(content.get("sets", {}))
    for shared in content.get("include", []):
        entries |= _load(ROOT / shared)["sets"]
    sets = {name: _source_set(name, entry, stores) for name, entry in entries.items()}
    return Sources(benchmark, sets, content["prepared_bytes"], stores)


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def is_adopted(benchmark: str) -> bool:
    """Return whether ``download`` fetches prepared files by default, which need ``prepare --adopt``."""
    path = ROOT / "benchmarks" / benchmark / "sources.yaml"
    return path.is_file() and bool(_load(path).get("adopt", False))


def parse_mirrors(text: str, origin: str) -> dict[str, str]:
    """Return store to base address from ``NAME=URL,NAME=URL``, the value of the option ``origin``.

    Raises:
        ConfigError: ``text`` has another format.
    """
    found = {}
    for item in filter(None, map(str.strip, text.split(","))):
        match = _MIRROR.fullmatch(item)
        if match is None:
            raise ConfigError(f"{origin} {item!r}: has to be NAME=URL with a store's name and an http or https address")
        found[match[1]] = match[2]
    return found


def named_files(names: Mapping[str, Any] | list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and properties of each file of the key ``files``; a range becomes one entry per number."""
    known: Mapping[str, Any] = names if isinstance(names, Mapping) else dict.fromkeys(names)
    for name, facts in known.items():
        if (match := _RANGE.fullmatch(name)) is None:
            yield name, facts or {}
            continue
        before, first, last, behind = match.groups()
        for value in range(int(first), int(last) + 1):
            number = f"{value:0{len(first)}d}"
            yield f"{before}{number}{behind}", {key: _numbered(fact, number) for key, fact in (facts or {}).items()}


def _numbered(fact: Any, number: str) -> Any:
    return fact.replace("{number}", number) if isinstance(fact, str) else fact


def _source_set(name: str, entry: Mapping[str, Any], stores: Mapping[str, tuple[str, ...]]) -> SourceSet:
    if unknown := entry.keys() - _KEYS:
        raise ValueError(f"set {name}: unknown keys {sorted(unknown)}")
    places = [entry, *entry.get("mirrors", [])] if "store" in entry else []
    addresses = tuple(
        "/".join(filter(None, [base, place.get("path")])) for place in places for base in stores[place["store"]]
    )
    folder = entry.get("folder", "")
    found: list[RemoteFile] = []
    instead: dict[str, tuple[str, ...]] = {}
    unpack: dict[str, dict[str, str]] = {}
    for file, facts in named_files(entry.get("files", {})):
        local = "/".join(filter(None, [folder, facts.get("as", file)]))
        urls = tuple(f"{address}/{file}" for address in addresses)
        others = tuple(facts.get("or", ()))
        found.append(RemoteFile(local, urls, entry["licence"], facts.get("bytes"), facts.get("checksum"), others))
        unpack[local] = dict(facts.get("unpack", {}))
        instead[local] = tuple(facts.get("instead", unpack[local].values()))
    tree = {key: entry[key] for key in ("tree", "pattern", "path")} if "tree" in entry else None
    return SourceSet(
        name=name,
        what=entry["what"],
        licence=entry["licence"],
        seen=str(entry["seen"]),
        bytes=entry.get("bytes"),
        files=tuple(found),
        addresses=addresses,
        account=entry.get("account"),
        folder=folder,
        also_in=tuple(entry.get("also_in", ())),
        beside=entry.get("beside"),
        instead={local: paths for local, paths in instead.items() if paths},
        unpack={local: folders for local, folders in unpack.items() if folders},
        contents=tuple(
            RemoteFile(file, (), entry["licence"], facts.get("bytes"), facts.get("checksum"))
            for file, facts in named_files(entry.get("contents", {}))
        ),
        list_name=entry.get("list"),
        md5s=(entry["md5s"], entry["md5s_of"]) if "md5s" in entry else None,
        tree=tree,
        named=entry.get("count", 0),
        choice=entry.get("choice"),
        optional=entry.get("optional", False),
    )


def with_checksums(source: SourceSet, address: str, checksums: Mapping[str, str | None]) -> SourceSet:
    """Return the set with the address and the MD5s from MLCommons' lists.

    Raises:
        KeyError: a file is not in the list.
    """
    prefix = f"{source.folder}/" if source.folder else ""
    files = []
    for file in source.files:
        remote = file.name.removeprefix(prefix)
        md5 = checksums[remote]
        urls = (f"{address}/{remote}", *file.urls[1:]) if file.urls else ()
        files.append(replace(file, urls=urls, checksum=md5 and f"md5:{md5}"))
    return replace(source, files=tuple(files))


_DEPTH = 6
"""Levels of folders below the raw folder that are searched."""


class Inventory:
    """Index by name of the files and folders below a raw folder, also behind links.

    Raises:
        DataError: a folder cannot be read.
    """

    def __init__(self, raw_dir: Path) -> None:
        self.raw_dir = raw_dir
        self._folders: dict[str, list[str]] = {}
        searched: set[tuple[int, int]] = set()
        for folder, below, names in os.walk(raw_dir, onerror=self._refuse, followlinks=True):
            status = os.stat(folder)
            if (identity := (status.st_dev, status.st_ino)) in searched:  # links may form a cycle
                below.clear()
                continue
            searched.add(identity)
            relative = Path(folder).relative_to(raw_dir).as_posix()
            below[:] = sorted(name for name in below if is_data(name) and not name.endswith(".partial"))
            if relative.count("/") >= _DEPTH:
                below.clear()
            for name in (*names, *below):
                self._folders.setdefault(name, []).append("" if relative == "." else relative)

    def _refuse(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # the raw folder may be missing
            raise DataError(
                f"{error.filename} cannot be searched: {error.strerror}; make it readable, or move it out of "
                f"{self.raw_dir}"
            ) from error

    def find(self, name: str) -> Path | None:
        """Return the file or folder whose path ends with ``name``, or else with ``name`` without its ``.gz``.

        None if there is none. The one in the shortest folder path wins.
        """
        for wanted in (name, name.removesuffix(".gz")):
            path = PurePosixPath(wanted)
            ends = () if str(path.parent) == "." else path.parent.parts
            for folder in sorted(self._folders.get(path.name, ()), key=len):
                parts = PurePosixPath(folder).parts if folder else ()
                if parts[len(parts) - len(ends) :] == ends:
                    return self.raw_dir / folder / path.name
        return None

    def count(self, pattern: str) -> int:
        """Return the number of files whose path ends with ``pattern``, such as ``folder/*.tar``."""
        folder, _, name = pattern.rpartition("/")
        return sum(
            fnmatch(f"/{below}", f"*/{folder}")
            for file, folders in self._folders.items()
            if fnmatch(file, name)
            for below in folders
        )

    def find_file(self, file: RemoteFile, also_in: Sequence[str]) -> Path | None:
        """Return the file under one of its names, or in a folder of ``also_in`` (``*`` means any folder)."""
        base = PurePosixPath(file.name).name
        names = [file.name, *file.other_names, *(base if folder == "*" else f"{folder}/{base}" for folder in also_in)]
        return next((path for name in names if (path := self.find(name)) is not None), None)

    def is_replaced(self, file: RemoteFile, source: SourceSet) -> bool:
        """Return whether all paths that replace the file, such as its unpacked folders, exist and are not empty."""
        instead = source.instead.get(file.name, ())
        return bool(instead) and all(_has_content(self.find(name)) for name in instead)

    def present(self, source: SourceSet) -> int:
        """Return how many files of a set are present, plus how many are replaced (:meth:`is_replaced`)."""
        found = sum(self.find_file(file, source.also_in) is not None for file in source.files)
        found += sum(self.is_replaced(file, source) for file in source.files)
        if source.tree is not None:
            found += self.count(source.tree["pattern"])
        return found


def _has_content(path: Path | None) -> bool:
    """Return whether a file is not empty, or a folder contains a file that is not empty, at any depth."""
    if path is None:
        return False
    return path.stat().st_size > 0 if path.is_file() else any(_has_content(below) for below in path.iterdir())
