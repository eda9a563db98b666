"""Print random public docstrings with their signatures, to test whether a reader understands them without the code.

``python scripts/sample_docstrings.py --seed 1`` prints 20 of ``common`` and ``benchmarks``, from this tree or another
one (``--root``). Classes, functions and methods are public if no part of their name begins with an underscore.
"""

from __future__ import annotations

import argparse
import ast
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield qualified name and node of every public definition that has a docstring."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            if ast.get_docstring(node):
                yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


def shown(path: str, name: str, node: Definition) -> str:
    """Return path, line, signature and docstring as text."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        signature = f"class {name}" + (f"({bases})" if bases else "")
    else:
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        signature = f"def {name}({ast.unparse(node.args)}){returned}"
    docstring = textwrap.indent(ast.get_docstring(node) or "", "    ")
    return f"{path}:{node.lineno}\n{signature}\n\n{docstring}"


def main() -> None:
    """Print the sample that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args()
    found = [
        (path.relative_to(options.root).as_posix(), name, node)
        for folder in ("common", "benchmarks")
        for path in sorted((options.root / folder).rglob("*.py"))
        for name, node in public(ast.parse(path.read_text()).body)
    ]
    for number, each in enumerate(random.Random(options.seed).sample(found, options.count), 1):
        print(f"{number}. {shown(*each)}\n")


if __name__ == "__main__":
    main()
