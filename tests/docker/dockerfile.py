"""Parser of the parts of a Dockerfile and a .dockerignore that ours use; other input fails an assertion."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Instruction:
    """One instruction: keyword in capitals, the rest on one line, and the comment lines directly above it."""

    keyword: str
    value: str
    comments: tuple[str, ...] = ()

    def flags(self, name: str) -> list[str]:
        """The values of ``--name=value``."""
        return re.findall(rf"(?:^|\s)--{name}=(\S+)", self.value)

    def words(self) -> list[str]:
        """The words that are not flags."""
        return [word for word in self.value.split() if not word.startswith("--")]


@dataclass
class Stage:
    """A build stage; ``parent`` is a stage's name or an image."""

    name: str
    parent: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, keyword: str) -> list[Instruction]:
        """Its instructions of one keyword."""
        return [instruction for instruction in self.instructions if instruction.keyword == keyword]

    def mounts(self) -> list[dict[str, str]]:
        """The ``--mount`` flags of its RUN instructions, as dicts."""
        flags = [flag for run in self.of("RUN") for flag in run.flags("mount")]
        return [dict(pair.split("=", 1) for pair in flag.split(",")) for flag in flags]


def read_instructions(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, in order."""
    found: list[Instruction] = []
    comments: list[str] = []
    parts: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            if not parts:
                comments.append(line.lstrip("# ").rstrip())
            continue
        if not line.strip() and not parts:
            comments = []
            continue
        parts.append(line.strip().removesuffix("\\").strip())
        if line.rstrip().endswith("\\"):
            continue
        keyword, _, value = " ".join(parts).partition(" ")
        assert keyword.isupper(), f"not an instruction: {keyword}"
        assert "<<" not in value, "here-documents are not read"
        found.append(Instruction(keyword, value.strip(), tuple(comments)))
        comments, parts = [], []
    assert not parts, "the last instruction is not complete"
    return found


def read_stages(instructions: list[Instruction]) -> tuple[dict[str, str], dict[str, Stage]]:
    """Return the arguments before the first stage, with their defaults, and the stages by name."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for instruction in instructions:
        if instruction.keyword == "FROM":
            match = re.fullmatch(r"(\S+) AS ([a-z][a-z0-9-]*)", instruction.value)
            assert match is not None, f"a stage without a name: FROM {instruction.value}"
            assert match[2] not in stages, f"two stages {match[2]}"
            current = stages[match[2]] = Stage(match[2], match[1])
        elif current is None:
            assert instruction.keyword == "ARG", f"{instruction.keyword} before the first FROM"
            name, _, value = instruction.value.partition("=")
            arguments[name] = value
        else:
            current.instructions.append(instruction)
    return arguments, stages


def is_ignored(path: str, patterns: list[str]) -> bool:
    """Return whether a .dockerignore excludes ``path``: the last pattern that matches it or a parent folder decides."""
    candidates = [path, *(str(parent) for parent in PurePosixPath(path).parents if str(parent) != ".")]
    ignored = False
    for pattern in patterns:
        expression = re.compile(_expression(pattern.removeprefix("!")))
        if any(expression.fullmatch(candidate) for candidate in candidates):
            ignored = not pattern.startswith("!")
    return ignored


def read_patterns(text: str) -> list[str]:
    """The patterns of a .dockerignore."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _expression(pattern: str) -> str:
    assert not set(pattern) & set("?[]\\"), f"pattern not read: {pattern}"
    pieces = re.split(r"(\*\*/|\*)", pattern.strip("/"))
    return "".join({"**/": "(?:.*/)?", "*": "[^/]*"}.get(piece, re.escape(piece)) for piece in pieces)
