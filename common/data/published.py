"""Published properties of the benchmark's data: counts, and bytes and MD5s of prepared files.

``prepare`` compares its output with them once, and notes the first difference in the manifest as ``custom``. The
log's ``data_set`` and the checks of the closed division go by the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from common.data import manifest
from common.data.manifest import UNDECIDED, FileEntry, Manifest
from common.data.remote_file import RemoteFile


class PublishedFile(NamedTuple):
    """What is published about a file that ``prepare`` writes or adopts.

    Attributes:
        bytes: its size; None where none is published.
        md5: hexadecimal; empty where none is published.
    """

    bytes: int | None = None
    md5: str = ""

    def difference(self, name: str, found: FileEntry | None) -> str:
        """Return how the file ``name``, which a manifest describes as ``found``, differs; empty if it does not."""
        if found is None:
            return f"{name} is missing"
        if self.bytes is not None and found.bytes != self.bytes:
            return f"{name} has {found.bytes} bytes, published are {self.bytes}"
        if self.md5 and found.md5 != self.md5:
            return f"{name} has the MD5 {found.md5 or 'unknown'}, published is {self.md5}"
        return ""


def published_files(files: Iterable[RemoteFile]) -> dict[str, PublishedFile]:
    """Return published sizes and MD5s of ``sources.yaml``, by file name without folders."""
    return {
        PurePosixPath(file.name).name: PublishedFile(file.bytes, (file.checksum or "").removeprefix("md5:"))
        for file in files
    }


@dataclass(frozen=True)
class Published:
    """What a preparation is compared with.

    Attributes:
        counts: counts of the manifest that the benchmark's data have.
        files: names below the data folder of files that the benchmark's data have.
        known: a difference that counts and files do not show, in words, such as an option of ``prepare``; or empty.
        synthetic: the data are synthetic, and compared with nothing.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, PublishedFile] = field(default_factory=dict)
    known: str = ""
    synthetic: bool = False

    @property
    def with_md5(self) -> frozenset[str]:
        """Names of the files whose MD5 is published."""
        return frozenset(name for name, file in self.files.items() if file.md5)

    def manifest(
        self, data_format: str, files: Mapping[str, FileEntry], counts: Mapping[str, int], source: Mapping[str, str]
    ) -> Manifest:
        """Return the manifest of prepared data, which says whether they are the benchmark's.

        Args:
            data_format: see :class:`Manifest`, as the others.
            files: with MD5s where they are published.
        """
        made = Manifest(data_format, dict(files), dict(counts), self.synthetic, dict(source))
        return replace(made, custom=self.difference(made))

    def difference(self, made: Manifest) -> str:
        """Return the first difference of prepared data from the benchmark's, in words; empty if there is none."""
        if self.synthetic:
            return ""
        differences = [self.known]
        differences += [file.difference(name, made.files.get(name)) for name, file in self.files.items()]
        for name, count in self.counts.items():
            if made.counts.get(name) != count:
                differences.append(f"{name} is {made.counts.get(name, 'not counted')}, published is {count}")
        return next(filter(None, differences), "")

    def agreeing(self, made: Manifest) -> int:
        """Return the number of files that have the bytes and the MD5 that are published."""
        return sum(not file.difference(name, made.files.get(name)) for name, file in self.files.items())

    def settled(self, data_dir: Path, found: Manifest, command: str) -> Manifest:
        """Return the manifest of ``data_dir``; decide now, and write it, if an older version has not.

        Args:
            data_dir: prepared data, whose files have the sizes of the manifest.
            found: their manifest.
            command: the command that makes them, for messages.

        Raises:
            DataError: a file whose MD5 is needed was changed.
        """
        lacking = [name for name in sorted(self.with_md5) if name in found.files and not found.files[name].md5]
        if found.custom != UNDECIDED and (found.stand_in or not lacking):
            return found
        completed = {name: manifest.verify_file(data_dir, found, name, command, md5=True) for name in lacking}
        made = self.manifest(found.format, {**found.files, **completed}, found.counts, found.source)
        if found.stand_in and not self.synthetic and not made.custom:
            made = replace(made, custom="an older version of prepare marked these data as reduced or rebuilt")
        manifest.write(data_dir, made)
        return made


SYNTHETIC = Published(synthetic=True)
"""For data that were prepared from synthetic raw data."""
