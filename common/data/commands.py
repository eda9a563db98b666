"""Shared implementation of ``mlperf-suite download | generate | prepare | verify`` for all workloads."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
from tqdm import tqdm

from common.data.download import Client
from common.data.fetching import Download, Extra, described
from common.data.http import CONNECTIONS
from common.data.manifest import NAME, Manifest
from common.data.options import Option, Parameter, call, options_of, parse
from common.data.preparation import assets_of
from common.data.published import Published
from common.data.sources import parse_mirrors, read_sources
from common.errors import FULL_DISK, ConfigError, DataError
from common.untrusted.variables import data_root

Trust = Annotated[
    bool,
    Option("do not decode all pictures to check them (noted in the manifest); a damaged one then ends a training run"),
]
"""Option of ``prepare`` for workloads that decode pictures only to check them."""
AssetsDir = Annotated[Path | None, Option("folder for starting weights and vocabularies (default: DATA_DIR-assets)")]
"""Option of ``prepare`` for workloads with starting weights or vocabularies."""
_PREPARE, _ADOPT = "prepare without --adopt", "prepare --adopt"  # the two modes of prepare, with different options


@dataclass(frozen=True)
class DataCommands:
    """The four data commands of one workload.

    Each command calls a function, and its options are the function's parameters: see :mod:`common.data.options`. The
    parameters ``raw_dir``, ``data_dir``, ``workers`` and ``folder`` mean the same in all functions.

    Attributes:
        raw: contents of ``--raw-dir``, for the help.
        prepared: contents of ``--data-dir``, for the help.
        real: name of the benchmark's data set, for the summary.
        generate: writes synthetic raw data, and returns a summary.
        prepare: converts raw data to the format that training reads.
        verify: compares prepared data with their manifest.
        remarks: returns lines to print after the summary of ``prepare`` and ``verify``, from the manifest and
            the options.
        assets: names of the files and folders that a run reads from ``assets_dir``; alternatives are a tuple.
        extra: fetches files that ``sources.yaml`` cannot list, after its sets were fetched.
        adopt: implements ``prepare --adopt``: checks the existing ``folder``, which may be ``data_dir`` itself, links
            its files into ``data_dir`` and writes the manifest. None: the workload has no such option.
        published: published properties of the benchmark's data, with which ``prepare`` compares its output.
        memory_per_worker: bytes that a process of ``prepare`` needs, which limit the default of its ``--workers``.
    """

    benchmark: str
    raw: str
    prepared: str
    real: str
    generate: Callable[..., str]
    prepare: Callable[..., Manifest]
    verify: Callable[..., Manifest]
    remarks: Callable[..., Iterable[str]] = lambda made, **options: ()
    assets: tuple[tuple[str, ...], ...] = ()
    extra: Extra | None = None
    adopt: Callable[..., Manifest] | None = None
    published: Published = field(default_factory=Published)
    memory_per_worker: int = 0

    def run(self, command: str, argv: list[str], scale: str | None = None) -> int:
        """Run ``command`` with the options ``argv``, print its result and return the exit code.

        Args:
            command: download, prepare, verify or generate.
            scale: scale of the recipe for which ``generate`` makes synthetic data; None without a recipe.

        Raises:
            ConfigError: an option is wrong.
            DataError: raw or prepared data are wrong, or a file cannot be read or written.
        """
        mode, options = command, self._options(command, scale)
        if command == "prepare" and self.adopt is not None:
            adopting = self._options(_ADOPT, scale)
            every = {option.name: option for option in (*options, *adopting)}
            adopts = _parse(self.benchmark, command, list(every.values()), argv)["folder"] is not None
            mode, options = (_ADOPT, adopting) if adopts else (_PREPARE, options)
        values = _parse(self.benchmark, mode, options, argv)
        if command == "generate" and values["raw_dir"].resolve() == self._real_raw().resolve():
            raise ConfigError(
                f"generate --raw-dir {values['raw_dir']}: is the default folder of {self.benchmark}'s real raw data, "
                "which synthetic data must not be taken for; name another folder"
            )
        try:
            for line in self._lines(mode, values):
                print(line)
        except BrokenPipeError:
            raise
        except UnicodeEncodeError as error:
            before, behind = error.object[: error.start], error.object[error.start :]
            name = before.rpartition("\n")[2] + behind.partition("\n")[0]
            raise DataError(f"{mode}: the name {name!r} is not UTF-8; rename the file or folder") from error
        except OSError as error:
            remedy = "free some space" if error.errno in FULL_DISK else "solve this problem"
            raise DataError(f"{mode}: {error}; {remedy} and run the command again") from error
        return 0

    def _lines(self, mode: str, values: Mapping[str, Any]) -> Iterator[str]:
        if mode == "download":
            yield from call(self._download, values)
        elif mode == "generate":
            yield f"{values['raw_dir']}: {call(self.generate, values)}"
        else:
            if mode in ("prepare", _PREPARE) and values["data_dir"].resolve() == values["raw_dir"].resolve():
                raise ConfigError(
                    f"prepare --data-dir {values['data_dir']}: is also --raw-dir, whose files it must not replace; "
                    "name another folder"
                )
            if mode == _ADOPT and not os.path.isdir(values["folder"]):  # also False without permission
                raise DataError(f"--adopt: {values['folder']} does not exist or is no folder; name that of the files")
            written = _manifest(values["data_dir"])
            made: Manifest = call(self._function(mode), values)
            totals = {name: count for name, count in made.counts.items() if "/" not in name}  # "/": counts of one file
            counts = ", ".join(f"{name} {count}" for name, count in totals.items())
            real = f"custom data in place of {self.real}" if made.custom else self.real
            kind = "synthetic" if made.synthetic else real
            yield f"{values['data_dir']}: {kind}, {counts}"
            if mode in ("prepare", _PREPARE) and written is not None and written == _manifest(values["data_dir"]):
                yield (
                    f"{values['data_dir']}: was complete, and nothing was made. If a file is damaged, delete it and "
                    f"{NAME}, then run this command again"
                )
            if made.trusted:
                yield f"{values['data_dir']}: prepared with --trust: damaged pictures have not been looked for"
            if self.assets and "assets_dir" in values:
                yield self._remark(values["assets_dir"] or assets_of(values["data_dir"]))
            yield from self.remarks(made, **values)
            if made.custom:
                yield f"{values['data_dir']}: not the benchmark's data, for the open division alone: {made.custom}"
            if mode == "verify" and not made.synthetic:
                yield from self._compare(made, values["data_dir"])

    def _remark(self, assets_dir: Path) -> str:
        """Return a line about the files in ``assets_dir``."""
        if missing := [names[0] for names in self.assets if not any((assets_dir / name).exists() for name in names)]:
            return f"{assets_dir}: lacks {', '.join(missing)}; put it there, or give its folder as assets_dir"
        return f"{assets_dir}: complete, for assets_dir"

    def _compare(self, made: Manifest, data_dir: Path) -> Iterator[str]:
        """Compare verified files with the published ones and yield a line about the result.

        Raises:
            DataError: the manifest says that these are the benchmark's data, but they differ from the published ones.
        """
        if not made.custom and (difference := self.published.difference(made)):
            raise DataError(
                f"{data_dir}: {difference}, though {NAME} says that these are the benchmark's data; delete {NAME} and "
                "prepare again"
            )
        if self.published.files:
            yield f"as published: {self.published.agreeing(made)} files"

    def _download(
        self,
        raw_dir: Path,
        workers: int,
        sets: Annotated[str, Option("download only these sets of files: NAME,NAME,…; see --list")] = "",
        mirror: Annotated[
            list[str] | None, Option("address to try first for the files of the store NAME", metavar="NAME=URL")
        ] = None,
        show: Annotated[bool, Option("list all files with sizes and licences; needs no network", "--list")] = False,
        check: Annotated[
            bool, Option("compare existing files with published sizes and checksums, and download nothing")
        ] = False,
    ) -> Iterator[str]:
        mirrors = parse_mirrors(os.environ.get("MLPERF_MIRRORS", ""), "MLPERF_MIRRORS")
        mirrors |= parse_mirrors(",".join(mirror or ()), "--mirror")
        sources = read_sources(self.benchmark, mirrors)
        if show:
            yield from described(sources)
            return
        client = Client(report=lambda line: tqdm.write(line, sys.stderr))
        chosen = [name.strip() for name in sets.split(",") if name.strip()]
        yield from Download(sources, raw_dir, workers, check, client).run(chosen)
        named_elsewhere = any(not (sources[name].files or sources[name].tree) for name in chosen)
        if self.extra is not None and (not chosen or named_elsewhere):
            yield from self.extra(raw_dir, sources, client, check)

    def _real_raw(self) -> Path:
        return data_root() / f"{self.benchmark}-raw"

    def _function(self, mode: str) -> Callable[..., Any]:
        functions = {"download": self._download, "generate": self.generate, _ADOPT: self.adopt, "verify": self.verify}
        return functions.get(mode) or self.prepare

    def _options(self, mode: str, scale: str | None) -> list[Parameter]:
        """Return the options of a command, or of ``prepare --adopt``; first those that several commands have."""
        raw_dir, workers, each = self._real_raw(), os.cpu_count() or 1, self.memory_per_worker
        if mode == "generate":
            raw_dir = data_root() / f"{self.benchmark}-{scale or 'synthetic'}-raw"
        if mode == "download":
            workers = CONNECTIONS
        elif mode in ("prepare", _ADOPT) and each:
            workers = min(workers, max(1, psutil.virtual_memory().total // each))
        usual = {
            "raw_dir": Parameter("raw_dir", Path, raw_dir, Option(self.raw)),
            "data_dir": Parameter("data_dir", Path, data_root() / self.benchmark, Option(self.prepared)),
            "workers": Parameter("workers", int, workers, Option("number of processes or threads", least=1)),
            "folder": Parameter(
                "folder",
                Path,
                None,
                Option(
                    "check files that other tools prepared in FOLDER, and link them into --data-dir; prepare nothing",
                    "--adopt",
                    metavar="FOLDER",
                ),
            ),
        }
        found = {parameter.name: parameter for parameter in options_of(self._function(mode))}
        return [
            *(parameter for name, parameter in usual.items() if name in found),
            *(parameter for name, parameter in found.items() if name not in usual),
        ]


def _parse(benchmark: str, command: str, options: list[Parameter], argv: list[str]) -> dict[str, Any]:
    """Return the values of the options by name.

    Raises:
        ConfigError: an argument is no option, or a value is out of its range.
    """
    parser = argparse.ArgumentParser(prog=f"mlperf-suite {command} benchmark={benchmark}")
    values, strays = parse(parser, options, argv)
    if strays:
        known = ", ".join(parameter.flag for parameter in options)
        raise ConfigError(f"{command} {' '.join(strays)}: no such option; the options are {known}")
    return values


def _manifest(data_dir: Path) -> tuple[int, int] | None:
    """Return what changes when the manifest is written; None if there is none."""
    path = data_dir / NAME
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.is_file() else None
