"""Shared implementation of ``mlperf-suite download | generate | prepare | verify`` for all workloads."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from common.data.download import Client
from common.data.fetching import Download, Extra, described
from common.data.http import CONNECTIONS
from common.data.manifest import NAME, Manifest
from common.data.published import Published
from common.data.sources import parse_mirrors, read_sources
from common.errors import FULL_DISK, ConfigError, DataError
from common.untrusted.variables import data_root


class Option(NamedTuple):
    """An option of a command: its name, and the arguments of :meth:`argparse.ArgumentParser.add_argument`."""

    name: str
    arguments: Mapping[str, Any]


def option(name: str, **arguments: Any) -> Option:
    """Return the option ``name``; ``arguments`` as :meth:`argparse.ArgumentParser.add_argument` takes them."""
    return Option(name, arguments)


TRUST = option(
    "--trust",
    action="store_true",
    help="do not decode all pictures completely, and note that in the manifest: damaged ones end a training run",
)
"""Option of ``prepare`` for workloads that decode pictures only to check them."""
ADOPT = option(
    "--adopt",
    dest="folder",
    type=Path,
    metavar="FOLDER",
    help="prepare nothing: check the files that others prepared in FOLDER, and link them into --data-dir",
)
"""Option of ``prepare`` for workloads with :attr:`DataCommands.adopt`: use files that were prepared elsewhere."""


_DOWNLOAD = (
    option("--sets", default="", help="fetch these sets of files alone, NAME,NAME,…; --list names them"),
    option("--mirror", action="append", default=[], metavar="NAME=URL", help="try this address of a store first"),
    option("--list", dest="show", action="store_true", help="name all files, sizes and licences, without a network"),
    option("--check", action="store_true", help="compare what is there with what is published, and fetch nothing"),
    option("--workers", type=int, default=CONNECTIONS, help=f"files at a time (default {CONNECTIONS})"),
)


def cores() -> int:
    """Return the number of processors of this machine, the usual default for ``--workers``."""
    return os.cpu_count() or 1


def no_remarks(made: Manifest, **options: Any) -> Iterable[str]:
    """Return no lines: the default of :attr:`DataCommands.remarks`."""
    return ()


_PREPARE, _ADOPT = "prepare without --adopt", "prepare --adopt"  # the two modes of prepare, with different options


@dataclass(frozen=True)
class DataCommands:
    """The four data commands of one workload. Each function receives the options of its command as keyword arguments.

    Attributes:
        benchmark: name of the workload.
        raw: contents of ``--raw-dir``, for the help.
        prepared: contents of ``--data-dir``, for the help.
        real: name of the benchmark's data set, for the summary.
        extra: fetches files that ``sources.yaml`` cannot list, after its sets were fetched.
        generate: writes synthetic raw data; ``str`` of its result describes what was written.
        prepare: converts raw data to the format that training reads.
        verify: compares prepared data with their manifest.
        workers: command to the function that returns the default of ``--workers``; other commands lack this option.
        options: command to its options in addition to ``--raw-dir``, ``--data-dir`` and ``--workers``. The key
            ``adopt`` has the options of ``prepare`` that are valid only with ``--adopt``.
        remarks: returns lines to print after the summary of ``prepare`` and ``verify``, from their manifest and
            options.
        adopt: implements ``prepare --adopt``: checks the existing ``folder``, which may be ``data_dir`` itself, links
            its files into ``data_dir`` and writes the manifest. None: the workload has no such option.
        published: published properties of the benchmark's data, with which ``prepare`` compares its output.
    """

    benchmark: str
    raw: str
    prepared: str
    real: str
    generate: Callable[..., object]
    prepare: Callable[..., Manifest]
    verify: Callable[..., Manifest]
    workers: Mapping[str, Callable[[], int]]
    options: Mapping[str, tuple[Option, ...]]
    remarks: Callable[..., Iterable[str]] = no_remarks
    extra: Extra | None = None
    adopt: Callable[..., Manifest] | None = None
    published: Published = field(default_factory=Published)

    def run(self, command: str, argv: list[str], scale: str | None = None) -> int:
        """Run ``command`` with the options ``argv``, print its result and return the exit code.

        Args:
            command: download, prepare, verify or generate.
            scale: scale of the recipe for which ``generate`` makes synthetic data; None without a recipe.

        Raises:
            ConfigError: an option is wrong.
            DataError: raw or prepared data are wrong, or a file cannot be read or written.
        """
        options = self._parsed(command, argv, scale)
        if command == "prepare" and self.adopt is not None:
            command = _PREPARE if options["folder"] is None else _ADOPT
            options = self._parsed(command, argv, scale)
        if command == "generate" and options["raw_dir"].resolve() == self._real_raw().resolve():
            raise ConfigError(
                f"generate --raw-dir {options['raw_dir']}: is the default folder of {self.benchmark}'s real raw data, "
                "which synthetic data must not be taken for; name another folder"
            )
        if options.get("workers", 1) < 1:
            raise ConfigError(f"--workers={options['workers']}: at least 1")
        try:
            for line in self._lines(command, options):
                print(line)
        except BrokenPipeError:
            raise
        except OSError as error:
            remedy = "make room and run it again" if error.errno in FULL_DISK else "see to it and run it again"
            raise DataError(f"{command}: {error}; {remedy}") from error
        return 0

    def _parsed(self, command: str, argv: list[str], scale: str | None) -> dict[str, Any]:
        parser = argparse.ArgumentParser(prog=f"mlperf-suite {command} benchmark={self.benchmark}")
        options = list(self._options(command, scale))
        for name, arguments in options:
            parser.add_argument(name, **arguments)
        parsed, strays = parser.parse_known_args(argv)
        if strays:
            known = ", ".join(name for name, _ in options)
            raise ConfigError(f"{command} {' '.join(strays)}: no such option; the options are {known}")
        return vars(parsed)

    def _lines(self, command: str, options: Mapping[str, Any]) -> Iterator[str]:
        if command == "download":
            yield from self._download(**options)
        elif command == "generate":
            yield f"{options['raw_dir']}: {self.generate(**options)}"
        else:
            made = self._made(command, options)
            totals = {name: count for name, count in made.counts.items() if "/" not in name}  # "/": counts of one file
            counts = ", ".join(f"{name} {count}" for name, count in totals.items())
            kind = "stand-in" if made.stand_in else f"custom data in place of {self.real}" if made.custom else self.real
            yield f"{options['data_dir']}: {kind}, {counts}"
            if made.trusted:
                yield f"{options['data_dir']}: prepared with --trust: damaged pictures have not been looked for"
            yield from self.remarks(made, **options)
            if made.custom:
                yield f"{options['data_dir']}: not the benchmark's data, for the open division alone: {made.custom}"
            if command == "verify" and not made.stand_in:
                yield from self._compare(made, options["data_dir"])

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
        sets: str,
        mirror: Sequence[str],
        show: bool,
        check: bool,
    ) -> Iterator[str]:
        mirrors = parse_mirrors(os.environ.get("MLPERF_MIRRORS", ""), "MLPERF_MIRRORS")
        mirrors |= parse_mirrors(",".join(mirror), "--mirror")
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

    def _made(self, command: str, options: Mapping[str, Any]) -> Manifest:
        if command == "verify":
            return self.verify(**options)
        if command != _ADOPT or self.adopt is None:
            return self.prepare(**options)
        if not os.path.isdir(options["folder"]):  # also False without permission
            raise DataError(f"--adopt: {options['folder']} does not exist or is no folder; name that of the files")
        return self.adopt(**options)

    def _real_raw(self) -> Path:
        return data_root() / f"{self.benchmark}-raw"

    def _options(self, command: str, scale: str | None = None) -> Iterator[Option]:
        data, preparing = data_root(), command in ("prepare", _PREPARE, _ADOPT)
        if command not in ("verify", _ADOPT):
            synthetic = data / f"{self.benchmark}-{scale or 'synthetic'}-raw"
            folder = synthetic if command == "generate" else self._real_raw()
            yield option("--raw-dir", type=Path, default=folder, help=self.raw)
        if preparing or command == "verify":
            yield option("--data-dir", type=Path, default=data / self.benchmark, help=self.prepared)
        if command == "download":
            yield from _DOWNLOAD
        if workers_of := self.workers.get("prepare" if preparing else command):
            workers = workers_of()
            yield option("--workers", type=int, default=workers, help=f"processes or threads (default {workers})")
        if command != _ADOPT:
            yield from self.options.get("prepare" if preparing else command, ())
        if self.adopt is not None and command in ("prepare", _ADOPT):
            yield ADOPT
            yield from self.options.get("adopt", ())
