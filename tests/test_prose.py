"""Test the language rules that a script can check: no fragments in ``Args:``, and standard terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

SECTION = re.compile(r"^\s*(Args|Attributes):$")
OTHER_SECTION = re.compile(r"^\s*(Returns|Raises|Yields|Note):$")
ENTRY = re.compile(r"^\s+(?P<names>[\w*]+(?:, [\w*]+)*): (?P<text>\S.*)$")
FRAGMENT = re.compile(r"(of|that|whose|(in|to|by|for|from|with|on) which|(as|so) (many|much))\b")
"""Beginnings of texts that continue the name of the argument instead of saying what it is."""

STANDARD = {
    "dealt": "sharded",
    "made up": "synthetic",
    "made-up": "synthetic",
    "once more": "again, or recomputed",
    "reckoned": "estimated or computed",
    "rooms": "capacities or packages",
    "stand-in": "synthetic",
    "told": "received, given",
    "turned": "transposed or rotated",
    "whoever": "the caller, the user, …",
}
"""Words (regular expressions) -> what to say instead."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those of constants too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def fragments(text: str) -> Iterator[str]:
    """Yield the entries of ``Args:`` and ``Attributes:`` that are fragments."""
    inside = False
    for line in text.splitlines():
        inside = bool(SECTION.match(line)) or (inside and not OTHER_SECTION.match(line))
        entry = ENTRY.match(line)
        if inside and entry is not None and FRAGMENT.match(entry["text"]):
            yield line.strip()


def words(text: str) -> Iterator[str]:
    """Yield the words outside of code that have a standard term, with that term."""
    text = re.sub(r"`+[^`]*`+", "", text)
    for word, standard in STANDARD.items():
        if found := re.search(rf"\b{word}\b", text, re.IGNORECASE):
            yield f"{found[0]!r}: {standard}"


@pytest.mark.parametrize("folder", ["common", "benchmarks", "scripts"])
@pytest.mark.parametrize("rule", [fragments, words])
def test_docstrings_follow_the_rule(folder, rule):
    paths = sorted(Path(ROOT, folder).rglob("*.py"))
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{line}: {each}"
        for path in paths
        for line, text in docstrings(path.read_text())
        for each in rule(text)
    ]
    assert found == []


def test_fragments_and_words_are_found():
    text = "Move rows.\n\n    Args:\n        warps: of a program.\n        rows: number.\n\n    Returns:\n        of: x"
    assert list(fragments(text)) == ["warps: of a program."]
    assert list(words("Rows are dealt over ``rooms`` once more.")) == [
        f"{word!r}: {STANDARD[word]}" for word in ("dealt", "once more")
    ]


def _python_files(folder: str) -> Iterator[Path]:
    return (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))


def test_files_and_names_that_documents_give_exist():
    """Every ``file.py`` exists; a name that directly follows it is in one of the files with this name."""
    texts = {}
    for folder in ("common", "benchmarks", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            texts[path.name] = texts.get(path.name, "") + path.read_text()
    tests = {name for text in texts.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    documents = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("docker/*.md"),
        *ROOT.glob("benchmarks/*/*.md"),
    ]
    paths = {
        path.as_posix() for folder in ("common", "benchmarks", "scripts", "tests") for path in _python_files(folder)
    }
    missing = []
    for document in documents:
        for given_path in re.findall(r"`((?:\w+/)+\w+\.py)`", document.read_text()):
            if not any(path == given_path or path.endswith(f"/{given_path}") for path in paths):
                missing.append(f"{document.name}: {given_path}")
        for file, names in re.findall(r"`(?:[\w/]*/)?(\w+\.py)`((?:,? `\w+`)*)", document.read_text()):
            given = re.findall(r"\w+", names)
            missing += [f"{document.name}: {file}"] * (file not in texts)
            missing += [
                f"{document.name}: {file} {name}"
                for name in given
                if not re.search(rf"\b{name}\b", texts.get(file, ""))
            ]
        named = re.findall(r"`(test_\w+)`", document.read_text())
        missing += [f"{document.name}: {name}" for name in named if name not in tests and f"{name}.py" not in texts]
    assert missing == []
