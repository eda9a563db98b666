"""English text that is available on every machine: the documentation of Python's standard library."""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_Documentable = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
_LEAST_CHARACTERS = 40


def documentation() -> Iterator[tuple[str, list[str]]]:
    """Yield name and paragraphs of each docstring with enough prose in the standard library, sorted by module."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in sorted(sys.stdlib_module_names):
        single = library / f"{name}.py"
        files = [single] if single.is_file() else sorted((library / name).rglob("*.py"))
        for path in files:
            place = path.relative_to(library)
            if _LEFT_OUT & set(place.parts):
                continue
            for title, paragraphs in _documented(path, ".".join(place.with_suffix("").parts)):
                if sum(map(len, paragraphs)) >= _LEAST_CHARACTERS:
                    yield title, paragraphs


def _documented(path: Path, module: str) -> Iterator[tuple[str, list[str]]]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # some files are invalid on purpose
        return
    for place, node in _definitions(tree, module):
        paragraphs = (" ".join(text.split()) for text in re.split(r"\n\s*\n", ast.get_docstring(node) or ""))
        yield place, [text for text in paragraphs if _is_prose(text)]


def _definitions(node: _Documentable, place: str) -> Iterator[tuple[str, _Documentable]]:
    """Yield ``node`` and all classes and functions in it, with their dotted names."""
    yield place, node
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _definitions(child, f"{place}.{child.name}")


def _is_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in text)
    return text.isprintable() and ">>>" not in text and text.count(" ") >= 5 and letters >= 0.85 * len(text)
