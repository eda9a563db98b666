"""Hydra's groups ``recipe/<workload>`` and ``hparams/<workload>`` from one file each, and the group ``scale``.

The choices of a group are the entries of a mapping in its file: ``scales`` in ``recipe/<workload>.yaml``, ``sets`` in
``hparams/<workload>.yaml``. An entry has settings, or is the name of an entry with the same settings::

    base: {precision: bf16, micro_batch: 32}    # where an entry without `from` starts
    scales:
      8xH200: {hparams_set: nvidia_v4.1_256}
      2xH200: {from: 8xH200, micro_batch: 16}
      1xH200: 2xH200

Top-level keys besides ``base`` are further sections for ``from``. Every folder of Hydra's search path may have such
files, whose ``from`` may name an entry of the suite's file, too. Files with a single choice are read as Hydra reads
them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import Container, DictConfig, OmegaConf

from common.config.override import did_you_mean
from common.config.yaml_files import CONFIGS, entry_names, until_changed
from common.errors import ConfigError

MAPPINGS = {"recipe": "scales", "hparams": "sets"}
"""Group to the mapping with its choices."""
_PACKAGES = {"recipe": "_global_", "hparams": "hparams", "scale": "scale"}


class Entry(NamedTuple):
    """An entry of a mapping, or a section that entries start from.

    Attributes:
        start: name of the entry or section whose settings it extends; None: it starts from nothing.
        hparams_set: the set of hyperparameters that a scale chooses; None: that of ``start``.
    """

    start: str | None
    hparams_set: str | None
    settings: DictConfig


def serve_groups() -> None:
    """Let Hydra read all folders of its search path as :class:`WorkloadFiles`."""
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().types["file"] = WorkloadFiles


def scale_of(name: str) -> dict[str, Any]:
    """Return nodes and ranks of a scale: ``64xH100`` has 64 GPUs. A name of another form has one rank on any device.

    Up to 8 GPUs are one node, more are nodes of 8, or of 4, 2 or 1 if 8 does not divide their number.
    """
    named = re.fullmatch(r"([1-9]\d*)x\w+", name)
    if named is None:
        return {"nodes": 1, "gpus_per_node": 1}
    count = int(named[1])
    node = count if count <= 8 else math.gcd(count, 8)
    return {"nodes": count // node, "gpus_per_node": node, "gpu": True}


class WorkloadFiles(FileConfigSource):
    """A folder of configuration files, in which the files of a workload are groups."""

    def is_group(self, config_path: str) -> bool:
        """Return whether ``config_path`` is a folder, the file of a workload, or the group ``scale``."""
        path = config_path.rstrip("/")
        return super().is_group(path) or bool(self._choices(path))

    def is_config(self, config_path: str) -> bool:
        """Return whether ``config_path`` is a file with one choice, or a choice in the file of a workload."""
        group, _, name = config_path.rpartition("/")
        return name in self._choices(group) or (super().is_config(config_path) and not self._choices(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the settings of ``config_path`` with Hydra's defaults list."""
        if super().is_config(config_path):
            return super().load_config(config_path)
        group, _, name = config_path.rpartition("/")
        kind, _, workload = group.partition("/")
        settings = OmegaConf.create(scale_of(name)) if kind == "scale" else self._settings(kind, workload, name)
        return ConfigResult(self.provider, self.full_path(), settings, {"package": _PACKAGES[kind]})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of folders and choices in ``config_path``, sorted."""
        path = config_path.rstrip("/")
        names = set(super().list(path, results_filter)) if super().is_group(path) else set()
        if results_filter != ObjectType.GROUP:
            names |= set(self._choices(path))
        if results_filter != ObjectType.CONFIG and not path and self._choices("scale"):
            names.add("scale")
        return sorted(names)

    def _choices(self, group: str) -> Collection[str]:
        """Return the choices of ``group`` in files of workloads."""
        kind, _, workload = group.partition("/")
        if group == "scale":
            files = Path(self.path, "recipe").glob("*.yaml")
            return {name for file in files for name in entry_names(file, MAPPINGS["recipe"])}
        if kind not in MAPPINGS or not workload or "/" in workload:
            return ()
        return _entries(Path(self.path, f"{group}.yaml"), MAPPINGS[kind])

    def origin(self, config_path: str, key: str) -> Path | None:
        """Return the file that sets ``key``, a dotted path in the settings of ``config_path``; None: it does not."""
        files: Iterable[tuple[Path, Container]]
        if super().is_config(config_path):
            files = [(Path(self.path, f"{config_path}.yaml"), self.load_config(config_path).config)]
        else:
            files = ((file, entry.settings) for file, entry in self._chain(*config_path.split("/")))
        return next((file for file, settings in files if OmegaConf.select(settings, key) is not None), None)

    def _settings(self, kind: str, workload: str, name: str) -> DictConfig:
        """Return the settings of an entry, with the set of hyperparameters that it chooses as Hydra's defaults list."""
        chain = [entry for _, entry in self._chain(kind, workload, name)]
        merged = OmegaConf.merge(*(entry.settings for entry in reversed(chain)))
        assert isinstance(merged, DictConfig)
        chosen = next((entry.hparams_set for entry in chain if entry.hparams_set is not None), None)
        if chosen is not None:
            merged["defaults"] = [{"/hparams": f"{workload}/{chosen}"}, "_self_"]
        return merged

    def _chain(self, kind: str, workload: str, name: str) -> Iterator[tuple[Path, Entry]]:
        """Yield an entry and all that it starts from, each with its file: this folder's or the suite's.

        Raises:
            ConfigError: a ``from`` names no entry, or one that starts from this entry.
        """
        files = [Path(folder, kind, f"{workload}.yaml") for folder in (self.path, CONFIGS)]
        passed: list[tuple[Path, str]] = []
        asked: str | None = name
        while asked is not None:
            file = next((file for file in files if asked in _entries(file, MAPPINGS[kind])), None)
            if file is None:
                names = list(dict.fromkeys(itertools.chain(*(_entries(file, MAPPINGS[kind]) for file in files))))
                where = f"{passed[-1][0]}: {passed[-1][1]}.from={asked}"
                raise ConfigError(f"{where}: unknown; the entries are {', '.join(names)}{did_you_mean(asked, names)}")
            if (file, asked) in passed:
                raise ConfigError(f"{passed[-1][0]}: {passed[-1][1]}.from={asked}: {asked} starts from {passed[-1][1]}")
            files = files[files.index(file) :]  # what the suite's entries start from is the suite's
            passed.append((file, asked))
            entry = _entries(file, MAPPINGS[kind])[asked]
            yield file, entry
            asked = entry.start


@until_changed
def _entries(file: Path, mapping: str) -> dict[str, Entry]:
    """Return the sections and entries of ``file`` by name; none if there is no such file or ``mapping`` in it.

    Raises:
        ConfigError: naming the file and the key that is neither settings nor the name of an entry.
    """
    content = OmegaConf.load(file) if file.is_file() else None
    if not isinstance(content, DictConfig) or mapping not in content:
        return {}
    given = content[mapping]
    if not isinstance(given, DictConfig):
        raise ConfigError(f"{file}: {mapping}={given}: expected a mapping of names to settings")
    sections = {str(name): content[name] for name in content if name != mapping}
    found: dict[str, Entry] = {}
    for name, node in {**sections, **{str(name): given[name] for name in given}}.items():
        settings = OmegaConf.create({"from": node}) if isinstance(node, str) else node
        if not isinstance(settings, DictConfig):
            raise ConfigError(f"{file}: {name}={node}: expected settings, or the name of an entry with the same ones")
        start = settings.pop("from", "base" if "base" in sections and name != "base" else None)
        found[name] = Entry(None if start is None else str(start), settings.pop("hparams_set", None), settings)
    return found
