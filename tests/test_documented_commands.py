"""Test links, options, settings and scales in the documents: each must exist."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import WORKLOADS
from common import cli
from common.config.composition import compose, scales_of
from tests.conftest import ROOT

DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "docker/*.md", "benchmarks/*/*.md") for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:mlperf-suite|python -m common\.cli) (\w+)(.*)")
SETTING = re.compile(r"(?<![\w./<=+-])((?:[a-z_]\w*\.)+[a-z_]\w*)=(?!=)")
"""A setting in a section, such as ``optimizer.shard=node``. Hydra adds keys that are written with a ``+``."""
GROUPS = {"benchmark", "scale", "system", "hparams"}
DATA_COMMANDS = {"download", "generate", "prepare", "verify"}
OF_OTHERS = {"vm.drop_caches"}
"""Settings of other programs in the documents."""


def code(text: str) -> Iterator[str]:
    """Yield the lines of code blocks, without comments, and the code spans."""
    for block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield re.sub(r"(^|\s)# .*", "", line)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text)))


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and arguments of all commands of the suite in the code of ``text``."""
    for line in code(text):
        for part in re.split(r"&&|\s\|\s|;\s", line):
            if (found := COMMAND.search(part)) and found[1] in cli.COMMANDS:
                yield found[1], found[2]


def headings(path: Path) -> set[str]:
    """Return the anchors of the headings of ``path``, in GitHub's form."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> Iterator[str]:
    """Yield the relative links of ``path`` to a missing file or heading."""
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text())):
        file, _, heading = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not link.startswith("http") and (not target.exists() or (heading and heading not in headings(target))):
            yield link


def named_benchmark(path: Path, arguments: str = "") -> str | None:
    """Return the benchmark that ``arguments`` name, or else that of a workload's README; None: neither."""
    found = re.search(r"benchmark=(\w+)", arguments)
    name = found[1] if found else path.parent.name
    return name if name in WORKLOADS else None


def keys(tree: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the keys of ``tree`` and of its sections."""
    for name, value in tree.items():
        yield f"{path}{name}"
        if isinstance(value, Mapping):
            yield from keys(value, f"{path}{name}.")


@cache
def settings(benchmark: str | None) -> frozenset[str]:
    """Return all settings of ``benchmark``, or of any benchmark."""
    if benchmark is None:
        return frozenset().union(*map(settings, WORKLOADS))
    return frozenset(keys(compose([f"benchmark={benchmark}", "scale=test"])))


@cache
def help_of(command: str, *arguments: str) -> str:
    """Return the help text of ``command``."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        cli.run([command, *arguments, "--help"])
    return printed.getvalue()


def has(command: str, option: str, benchmark: str | None) -> bool:
    """Return whether the help of ``command`` has ``option``; a data command: that of ``benchmark``, or of any."""
    names = [benchmark] if benchmark else WORKLOADS
    helps = [(command, f"benchmark={name}") for name in names] if command in DATA_COMMANDS else [(command,)]
    return any(re.search(rf"{option}(?![\w-])", help_of(*each)) for each in helps)


def wrong_options(path: Path, text: str) -> Iterator[str]:
    """Yield the options of commands that the command's help does not have."""
    for command, arguments in commands(text):
        if command not in ("train", "bench"):  # their options are Hydra's
            for option in re.findall(r"\s(--[a-z][\w-]*)", arguments):
                if not has(command, option, named_benchmark(path, arguments)):
                    yield f"{command} {option}"


def wrong_settings(path: Path, text: str) -> Iterator[str]:
    """Yield the settings in code, and the scales in commands, that do not exist."""
    for line in code(text):
        for key in SETTING.findall(line):
            if key not in settings(named_benchmark(path, line)) | OF_OTHERS:
                yield key
    for command, arguments in commands(text):
        benchmark = named_benchmark(path, arguments)
        if command in ("train", "bench"):
            for key in re.findall(r"\s(\w+)=", re.sub(r"\"[^\"]*\"", "", arguments)):
                if key not in settings(benchmark) | GROUPS:
                    yield f"{command} {key}"
            scale = re.search(r"\sscale=(\w+)(?!\S)", arguments)
            if scale and benchmark and "--config-dir" not in arguments and scale[1] not in scales_of(benchmark):
                yield f"{benchmark} scale={scale[1]}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path):
    assert list(broken_links(path)) == []


def test_options_of_documented_commands_exist():
    assert [f"{path.name}: {wrong}" for path in DOCUMENTS for wrong in wrong_options(path, path.read_text())] == []


def test_documented_settings_and_scales_exist():
    assert [f"{path.name}: {wrong}" for path in DOCUMENTS for wrong in wrong_settings(path, path.read_text())] == []


def test_wrong_links_options_settings_and_scales_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[x](#a-b-c) [y](#d) [z](none.md) [w](https://example.org/none)\n")
    assert list(broken_links(page)) == ["#d", "none.md"]
    text = (
        "```\nmlperf-suite check runs --ruleset 4.0.0 --rules x  # --comment\n```\n"
        "`mlperf-suite train benchmark=bert scale=9xH200 micro_bath=4 optimizer.shards=node`, `model.width=8`"
    )
    assert list(wrong_options(page, text)) == ["check --rules"]
    assert list(wrong_settings(page, text)) == ["optimizer.shards", "train micro_bath", "bert scale=9xH200"]
