"""Read YAML files that users write, and report every mistake in one sentence.

PyYAML silently keeps the last of two equal keys. OmegaConf (for ``configs/``) and :func:`load_yaml` reject them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from common.errors import ConfigError, DataError
from common.untrusted.regular_file import open_regular

T = TypeVar("T")
LARGEST_FILE = 2**18
"""Largest size in bytes of a file for :func:`read_small_yaml`."""
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FOLDERS = [CONFIGS]
"""Folders with the files of the workloads in ``WORKLOADS``; the workload of the tests adds its own folder."""


class _StrictLoader(yaml.SafeLoader):
    """``yaml.SafeLoader`` that rejects duplicate keys in a mapping."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        known: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in known:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value[:80]!r} is given twice; remove one", problem_mark=key.start_mark
                )
            known.add((key.tag, key.value))
        return node


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)  # YAML 1.1 reads 2.6e6, without a sign in its exponent, as text; OmegaConf, which reads `configs/`, as a number


def load_yaml(text: str, origin: str) -> Any:
    """Return the content of ``text`` as plain Python values.

    Args:
        origin: file or option that the text comes from, for messages.

    Raises:
        ConfigError: the text is not valid YAML or has a duplicate key; the message names the line.
    """
    try:
        return yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(explain(error, origin)) from error  # PyYAML's constructors raise all of these


def read_small_yaml(path: Path, purpose: str) -> Any:
    """Return the content of a YAML file of a user.

    Args:
        purpose: what the file describes, for messages.

    Raises:
        ConfigError: the file cannot be read, is too large or is not valid YAML.
    """
    try:
        with open_regular(path) as file:
            text = file.read(LARGEST_FILE + 1)
    except DataError as error:
        raise ConfigError(str(error)) from error
    if len(text) > LARGEST_FILE:
        raise ConfigError(f"{path}: is larger than {LARGEST_FILE >> 10} KiB; is it the file of {purpose}?")
    try:
        return load_yaml(text.decode(), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no valid YAML: it is not UTF-8 text") from error


def until_changed(read: Callable[[Path, str], T]) -> Callable[[Path, str], T]:
    """Return ``read(file, mapping)`` with a cache, which reads a file again when its time or size has changed."""

    @functools.lru_cache(maxsize=64)
    def cached(file: Path, mapping: str, modified: int, size: int) -> T:
        return read(file, mapping)

    @functools.wraps(read)
    def current(file: Path, mapping: str) -> T:
        if not file.is_file():
            return read(file, mapping)
        status = file.stat()
        return cached(file, mapping, status.st_mtime_ns, status.st_size)

    return current


def workload_file(group: str, benchmark: str) -> Path:
    """Return the file of a workload in one of :data:`FOLDERS`; it need not exist."""
    paths = [folder / group / f"{benchmark}.yaml" for folder in FOLDERS]
    return next((path for path in paths if path.is_file()), paths[0])


@until_changed
def entry_names(file: Path, mapping: str) -> list[str]:
    """Return the sorted keys of the top-level ``mapping`` of ``file``; none if there is no such file or mapping.

    It does not validate the file. PyYAML's parser in C is much faster than OmegaConf.
    """
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as stream:
        content = yaml.load(stream, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    entries = content.get(mapping) if isinstance(content, dict) else None
    return sorted(map(str, entries)) if isinstance(entries, dict) else []


def explain(error: Exception, origin: str | None = None) -> str:
    """Return file, line and problem of a PyYAML error in one sentence. ``origin`` replaces the file name."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{origin}: is no valid YAML: {error}"
    mark = error.problem_mark
    return f"{origin or mark.name}, line {mark.line + 1}: is no valid YAML: {error.problem or error.context}"
