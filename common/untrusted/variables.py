"""Environment variables that the configuration reads, checked before the configuration is composed.

``configs/train.yaml`` reads them with ``${oc.env:NAME,default}``. OmegaConf's message about a wrong value names
neither the variable nor the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError


class Variable(NamedTuple):
    """The setting whose default a variable is, and a pattern and a description of its allowed values."""

    key: str
    pattern: str
    expected: str


_FLAG = ("0|1|(?i:true|false)", "true or false")
VARIABLES = {
    "MLPERF_DATA_DIR": Variable("data_dir", r".*\S.*", "a folder"),
    "MLPERF_CACHE_CLEARED": Variable("cache_cleared", "(?i:true|false)", "true or false"),
    "NEXP": Variable("launch.experiments", r"\s*0*[1-9]\d*\s*", "a whole number, 1 or more"),
    "LOGDIR": Variable("launch.results", r".*\S.*", "a folder"),
    "CONTAINER": Variable("launch.container", r".+", "none, pyxis, apptainer or docker"),
    "CLEAR_CACHES": Variable("launch.clear_caches", *_FLAG),
    "DROPCACHE_CMD": Variable("launch.drop_caches", r".*\S.*", "a command"),
}


def check_variables(overrides: Sequence[str]) -> None:
    """Refuse a variable with an unusable value, unless ``overrides`` set its setting to another value.

    Raises:
        ConfigError: naming the variable, its value, and the setting.
    """
    given = {text.partition("=")[0].lstrip("+") for text in overrides}
    for name, (key, pattern, expected) in VARIABLES.items():
        value = os.environ.get(name)
        if value is not None and key not in given and not re.fullmatch(pattern, value, re.DOTALL):
            what = f"the environment variable {name} is {'empty' if not value else repr(value)}"
            raise ConfigError(f"{name}={value}: {what}, expected {expected}; unset it, or give {key}=…")


def data_root() -> Path:
    """Return the folder of all data sets: ``MLPERF_DATA_DIR``, or ``data``, the default of ``configs/train.yaml``.

    Raises:
        ConfigError: the variable is set, and empty.
    """
    others = [variable.key for name, variable in VARIABLES.items() if name != "MLPERF_DATA_DIR"]
    check_variables([f"{key}=" for key in others])
    return Path(os.environ.get("MLPERF_DATA_DIR", "data")).expanduser()
