"""Published properties of the benchmark's data: counts, and sizes and MD5s of prepared files.

``prepare`` compares its output with them once, and writes the first difference to ``custom`` of the manifest. The
log's ``data_set`` and the checks of the closed division use the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from common.data import manifest
from common.data.manifest import UNDECIDED, FileEntry, Manifest
from common.data.sources import RemoteFile


class PublishedFile(NamedTuple):
    """Published properties of a file that ``prepare`` writes or adopts.

    Attributes:
        bytes: size; None if it is not published.
        md5: hexadecimal; empty if it is not published.
    """

    bytes: int | None = None
    md5: str = ""

    def difference(self, name: str, found: FileEntry | None) -> str:
        """Return how ``found``, the manifest's entry of the file ``name``, differs; empty if it does not."""
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
    """Published properties of the benchmark's data, with which a preparation is compared.

    Attributes:
        counts: required counts of the manifest.
        files: required files, by path below the data folder.
        known: a known difference that counts and files do not show, in words, e.g. an option of ``prepare``; or
            empty.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, PublishedFile] = field(default_factory=dict)
    known: str = ""
    synthetic: bool = False

    @property
    def with_md5(self) -> frozenset[str]:
        """Names of the files with a published MD5."""
        return frozenset(name for name, file in self.files.items() if file.md5)

    def manifest(
        self, data_format: str, files: Mapping[str, FileEntry], counts: Mapping[str, int], source: Mapping[str, str]
    ) -> Manifest:
        """Return the manifest of prepared data, which says whether they are the benchmark's.

        Args:
            data_format, files, counts, source: see :class:`Manifest`; ``files`` must have the MD5s that are
                published.
        """
        made = Manifest(data_format, dict(files), dict(counts), self.synthetic, dict(source))
        return replace(made, custom=self.difference(made))

    def difference(self, made: Manifest) -> str:
        """Return the first difference of prepared data from the benchmark's data, in words; empty if there is none."""
        if self.synthetic:
            return ""
        differences = [self.known]
        differences += [file.difference(name, made.files.get(name)) for name, file in self.files.items()]
        for name, count in self.counts.items():
            if made.counts.get(name) != count:
                differences.append(f"{name} is {made.counts.get(name, 'not counted')}, published is {count}")
        return next(filter(None, differences), "")

    def agreeing(self, made: Manifest) -> int:
        """Return the number of published files whose size and MD5 agree."""
        return sum(not file.difference(name, made.files.get(name)) for name, file in self.files.items())

    def settled(self, data_dir: Path, found: Manifest, command: str) -> Manifest:
        """Return the manifest of ``data_dir``. Completes and rewrites it if an older version wrote it.

        Args:
            data_dir: prepared data, whose files have the sizes of the manifest.
            command: the command that makes the data, for messages.

        Raises:
            DataError: a file whose MD5 is needed was changed.
        """
        lacking = [name for name in sorted(self.with_md5) if name in found.files and not found.files[name].md5]
        if found.custom != UNDECIDED and (found.synthetic or not lacking):
            return found
        completed = {name: manifest.verify_file(data_dir, found, name, command, md5=True) for name in lacking}
        made = self.manifest(found.format, {**found.files, **completed}, found.counts, found.source)
        if found.synthetic and not self.synthetic and not made.custom:
            made = replace(made, custom="an older version of prepare marked these data as reduced or rebuilt")
        manifest.write(data_dir, made)
        return made


SYNTHETIC = Published(synthetic=True)
"""For data that were prepared from synthetic raw data."""
