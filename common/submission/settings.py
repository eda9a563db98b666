"""The YAML file of a submission: the submitter, the systems, and the results of each system.

``configs/submission/example.yaml`` shows the keys. Paths are relative to the file. Results can also be given on the
command line, if the file has only one system.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from common.config.loading import build
from common.config.yaml_files import read_small_yaml
from common.errors import ConfigError

SystemStatus = Literal["Available on-premise", "Available cloud", "Research, Development, or Internal (RDI)", "Preview"]
OWN_IMPLEMENTATION = "mlperf_suite"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_CODE_FILES = ("code", "readme", "setup", "init_datasets")


@dataclass(frozen=True)
class SystemSettings:
    """One system: hardware and framework together.

    Attributes:
        system_name: name in the published result tables.
        fields: fields of the system description. They override the values that `doctor` found on the nodes.
    """

    system_name: str
    division: Literal["closed", "open"]
    status: SystemStatus
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ResultSettings:
    """The runs of one benchmark on one system.

    Attributes:
        system: key in ``SubmissionSettings.systems``.
        results: folder with ``runs.jsonl`` or ``result_<i>.txt``.
        series: name of the series to submit; None for all series in the folder.
        pruned: numbers of the instances in a series of instances that do not count although they reached the target.
        logs: files in launch order, instead of ``results``.
        implementation: name of the folder that holds the code in the submission.
        code: folder with the code; None for the commit of this suite that the runs used.
        readme, setup, init_datasets: launch instructions and two scripts; required with ``code``, else optional and
            generated.
        doctor: file in which `doctor` described the nodes; None for the files of the series.
    """

    system: str
    results: Path | None = None
    series: str | None = None
    pruned: tuple[int, ...] = ()
    logs: tuple[Path, ...] = ()
    implementation: str = OWN_IMPLEMENTATION
    code: Path | None = None
    readme: Path | None = None
    setup: Path | None = None
    init_datasets: Path | None = None
    doctor: Path | None = None


@dataclass(frozen=True)
class SubmissionSettings:
    """The whole submission of one submitter.

    Attributes:
        submission_org: value of ``submission_org`` in the logs; None if it equals ``submitter`` apart from case,
            spaces and punctuation.
        license: a text file; None for the Apache-2.0 licence of this suite.
    """

    submitter: str
    systems: dict[str, SystemSettings]
    results: tuple[ResultSettings, ...] = ()
    submission_org: str | None = None
    license: Path | None = None

    def is_org(self, org: str) -> bool:
        """Return whether logs with ``submission_org: org`` belong to the submitter."""
        if self.submission_org is not None:
            return org == self.submission_org
        return normalised(org) == normalised(self.submitter)


def normalised(name: str) -> str:
    """Return the letters and digits of a name in lower case, for comparisons."""
    return "".join(character for character in name.casefold() if character.isalnum())


def read_settings(path: Path, results: tuple[Path, ...] = ()) -> SubmissionSettings:
    """Read the YAML file of a submission and add the result folders of the command line.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    content = read_small_yaml(path, "a submission")
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected the keys submitter, systems and results")
    try:
        read: SubmissionSettings = build(SubmissionSettings, content, "")
        settings = _with_results(_from_folder(read, path.parent), results)
        _check(settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return settings


def _from_folder(settings: SubmissionSettings, folder: Path) -> SubmissionSettings:
    """Return the settings with every relative path joined to ``folder``."""

    def absolute(path: Path | None) -> Path | None:
        return None if path is None else folder / path

    results = tuple(
        replace(
            each,
            results=absolute(each.results),
            logs=tuple(folder / log for log in each.logs),
            doctor=absolute(each.doctor),
            code=absolute(each.code),
            readme=absolute(each.readme),
            setup=absolute(each.setup),
            init_datasets=absolute(each.init_datasets),
        )
        for each in settings.results
    )
    return replace(settings, results=results, license=absolute(settings.license))


def _with_results(settings: SubmissionSettings, named: tuple[Path, ...]) -> SubmissionSettings:
    if not named:
        return settings
    if len(settings.systems) != 1:
        raise ConfigError(
            f"{named[0]} is named on the command line, but there are {len(settings.systems)} systems: say under "
            "results which folder belongs to which"
        )
    system = next(iter(settings.systems))
    known = {each.results.resolve() for each in settings.results if each.results is not None}
    added = tuple(ResultSettings(system, path) for path in named if path.resolve() not in known)
    return replace(settings, results=(*settings.results, *added))


def _check(settings: SubmissionSettings) -> None:
    names = {"submitter": settings.submitter, **{f"systems.{name}": name for name in settings.systems}}
    names |= {f"results[{i}].implementation": each.implementation for i, each in enumerate(settings.results)}
    for where, name in names.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: {name!r} names a folder or file: letters, digits and . _ + - only")
    if not settings.systems:
        raise ConfigError("systems: at least one")
    if not settings.results:
        raise ConfigError("results: none; name folders of results here or on the command line")
    for index, each in enumerate(settings.results):
        where = f"results[{index}]"
        if each.system not in settings.systems:
            raise ConfigError(f"{where}.system={each.system}: no such system; there are {', '.join(settings.systems)}")
        if each.implementation in settings.systems:
            raise ConfigError(f"{where}.implementation={each.implementation}: is the name of a system, too")
        if (each.results is None) == (not each.logs):
            raise ConfigError(f"{where}: needs results, a folder, or logs, a list of files in launch order")
        if each.series is not None and each.results is None:
            raise ConfigError(f"{where}.series={each.series}: is for a folder of results")
        if each.pruned and each.results is None:
            raise ConfigError(f"{where}.pruned: is for a folder of results")
        if each.code is not None:
            missing = [name for name in _CODE_FILES if getattr(each, name) is None]
            if missing:
                raise ConfigError(f"{where}: with code, {', '.join(missing)} must be given, too")
            if each.implementation == OWN_IMPLEMENTATION:
                raise ConfigError(f"{where}.implementation: name the implementation whose code is {each.code}")
    unused = settings.systems.keys() - {each.system for each in settings.results}
    if unused:
        raise ConfigError(f"systems.{min(unused)}: no results belong to it")
