"""Draw docs/layers.svg, the packages of ``common`` by layer, from the code: ``python scripts/draw_layers.py``.

The layers are ``common.LAYERS``; the purpose of a package is the first line of its docstring.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "layers.svg"

WIDTH, ROW, GAP, MARGIN = 860, 25, 4, 8
NAME = 112
"""Width in pixels of a package's name; its purpose follows."""
COLOURS = ("#eef3fb", "#f7f2e8")


def draw() -> str:
    """Return the picture as SVG."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import WORKLOADS
    from common import LAYERS

    layers = [
        [("benchmarks/", "One package for each workload: " + ", ".join(sorted(WORKLOADS)) + ".")],
        *([(_label(name), _purpose(name)) for name in names] for names in LAYERS),
    ]
    height = 2 * MARGIN + len(layers) * (ROW + GAP) - GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>Packages by layer: a package imports only packages of lower layers</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, packages in enumerate(layers):
        lines += _layer(packages, MARGIN + number * (ROW + GAP), COLOURS[0 if number else 1])
    return "\n".join([*lines, "</svg>", ""])


def _layer(packages: list[tuple[str, str]], top: int, colour: str) -> Iterator[str]:
    width = (WIDTH - 2 * MARGIN - GAP * (len(packages) - 1)) / len(packages)
    for number, (name, purpose) in enumerate(packages):
        left = MARGIN + number * (width + GAP)
        yield (
            f'<rect x="{left:g}" y="{top}" width="{width:g}" height="{ROW}" rx="4" fill="{colour}" stroke="#9aa7bd"/>'
        )
        middle = top + ROW / 2 + 4
        yield f'<text x="{left + 8:g}" y="{middle:g}" font-weight="bold" fill="#1d2b44">{escape(name)}</text>'
        beside = len(packages) > 1
        size = ' font-size="10"' if beside else ""
        after = left + NAME * (0.85 if beside else 1)
        yield f'<text x="{after:g}" y="{middle:g}"{size} fill="#3a465c">{escape(purpose)}</text>'


def _label(package: str) -> str:
    return f"{package}/" if (ROOT / "common" / package).is_dir() else f"{package}.py"


def _purpose(package: str) -> str:
    """Return the first line of the docstring of a package or module."""
    folder = ROOT / "common" / package
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert text, f"{file} does not say what it is for"
    return text.splitlines()[0].replace("``", "")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PICTURE.write_text(draw())
