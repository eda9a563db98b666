"""Count tokens of Python code by folder, without comments and docstrings: ``python scripts/count_tokens.py``.

The number of tokens measures the size of code independently of its layout; tokens per line show whether lines became
longer. Python 3.12 and later split f-strings into several tokens, so compare counts of one version only.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
AREAS = {
    "operations": ("common/ops/*", "benchmarks/*/ops/*"),
    "common": ("common/*",),
    "benchmarks": ("benchmarks/*",),
    "tests": ("tests/*",),
}
"""Path patterns by area; operations also count in ``common`` and ``benchmarks``."""


class Size(NamedTuple):
    """Size of a set of files.

    Attributes:
        tokens: tokens of code.
        lines: lines with at least one token of code.
    """

    files: int
    tokens: int
    lines: int


def docstrings(source: str) -> set[tuple[int, int]]:
    """Return line and column of all strings that are statements: docstrings of modules, classes, functions and names.

    Columns count bytes in :mod:`ast` and characters in :mod:`tokenize`; they are equal, because only spaces come
    before.
    """
    return {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def size_of(source: str) -> Size:
    """Return the size of a source text."""
    skipped = docstrings(source)
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT and token.start not in skipped
    ]
    return Size(1, len(tokens), len({token.start[0] for token in tokens}))


def total(root: Path, patterns: tuple[str, ...]) -> Size:
    """Return the size of all Python files that match, or that are in matching folders."""
    found = {
        path
        for pattern in patterns
        for match in root.glob(pattern)
        for path in ([match] if match.suffix == ".py" else match.rglob("*.py") if match.is_dir() else [])
    }
    sizes = [size_of(path.read_text()) for path in found]
    return Size(*(sum(values) for values in zip(*sizes, strict=True))) if sizes else Size(0, 0, 0)


def main(root: Path) -> None:
    """Print a table of the areas of the tree ``root``."""
    print(f"{'area':12s} {'files':>6s} {'tokens':>10s} {'lines':>9s} {'tokens/line':>12s}")
    for area, patterns in AREAS.items():
        size = total(root, patterns)
        density = size.tokens / max(size.lines, 1)
        print(f"{area:12s} {size.files:6d} {size.tokens:10,d} {size.lines:9,d} {density:12.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="another checkout")
    main(parser.parse_args().root)
