"""Load the limits that machines must meet: the section ``limits`` in ``configs/system`` or in another file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.config.loading import build, convert
from common.config.system import Hardware, SystemConfig
from common.config.yaml_files import CONFIGS, read_small_yaml
from common.doctor.reading import MEASURES
from common.errors import ConfigError


@dataclass(frozen=True)
class Limit:
    """Limits of one reading.

    Attributes:
        min, max: bounds in the unit of the reading.
        spread: percentage by which it may be worse than the median of the units of the same model (of two units: than
            the better one); None for the measure's default.
    """

    min: float | None = None
    max: float | None = None
    spread: float | None = None


Limits = dict[str, Limit]
"""Limits by ``scope.figure``, such as ``gpu.matrix_bf16_tflops``."""


def load_system(name: str) -> tuple[SystemConfig, Limits]:
    """Return the settings and the limits of a system.

    Args:
        name: name of a file in ``configs/system``, or path of a YAML file with the same keys.

    Raises:
        ConfigError: the file does not exist, or it has an unknown key or a value of the wrong type.
    """
    path = Path(name).expanduser()
    as_path = path.suffix in (".yaml", ".yml") or len(path.parts) > 1
    content = _read(path) if as_path else _compose(name)
    try:
        system = build(SystemConfig, content, "system")
        return system, parse_limits(system.limits)
    except ConfigError as error:
        raise ConfigError(f"--system {name}: {error}") from error


def hardware_of(name: str) -> Hardware:
    """Return the rates, links and sizes of a system; see :func:`load_system`.

    Raises:
        ConfigError: the system does not exist or has no section ``hardware``.
    """
    found = load_system(name)[0].hardware
    if found is None:
        raise ConfigError(
            f"system {name} has no section hardware: use another, or measure this machine with `mlperf-suite doctor "
            "--write-system FILE`"
        )
    return found


def parse_limits(section: Mapping[str, Any]) -> Limits:
    """Return the limits of a section ``{gpu: {figure: {min: …, max: …, spread: …}}, node: …, job: …}``.

    Raises:
        ConfigError: a figure is unknown, or a limit is not a number.
    """
    limits: Limits = {}
    for scope, figures in section.items():
        if scope not in MEASURES:
            raise ConfigError(f"system.limits.{scope}: unknown; limits are of {', '.join(MEASURES)}")
        known = MEASURES[scope]
        for figure, limit in convert(dict[str, Any], figures or {}, f"system.limits.{scope}").items():
            where = f"system.limits.{scope}.{figure}"
            if figure not in known:
                raise ConfigError(f"{where}: unknown; the figures are {', '.join(known)}")
            limits[f"{scope}.{figure}"] = build(Limit, limit, where)
    return limits


def _read(path: Path) -> Any:
    try:
        content = read_small_yaml(path, "the system")
        if content is not None and not isinstance(content, dict):
            return content  # the loader's error says what is expected
        return OmegaConf.to_container(OmegaConf.create(content or {}), resolve=True)
    except (ConfigError, OmegaConfBaseException) as error:
        raise ConfigError(f"--system {' '.join(str(error).split())}") from error


def _compose(name: str) -> Any:
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra.compose(f"system/{name}")
    except MissingConfigException as error:
        names = ", ".join(sorted(found.stem for found in (CONFIGS / "system").glob("*.yaml")))
        raise ConfigError(f"--system {name}: unknown; the systems are {names}, or the path of a YAML file") from error
    return OmegaConf.to_container(composed.system, resolve=True)
