"""Draw docs/house.svg, the packages of ``common`` by layer, from the code: ``python scripts/draw_house.py``.

The layers are ``common.FLOORS``; the purpose of a package is the first line of its docstring.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "house.svg"

WIDTH, FLOOR, GAP, MARGIN = 860, 25, 4, 8
NAME = 112
"""Width in pixels of a package's name; its purpose follows."""
COLOURS = ("#eef3fb", "#f7f2e8")


def draw() -> str:
    """Return the picture as SVG."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import WORKLOADS
    from common import FLOORS

    floors = [
        [("benchmarks/", "One package for each workload: " + ", ".join(sorted(WORKLOADS)) + ".")],
        *([(_label(room), _purpose(room)) for room in rooms] for rooms in FLOORS),
    ]
    height = 2 * MARGIN + len(floors) * (FLOOR + GAP) - GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>The rooms of the suite: a room uses those of lower floors, and none beside it</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, rooms in enumerate(floors):
        lines += _floor(rooms, MARGIN + number * (FLOOR + GAP), COLOURS[0 if number else 1])
    return "\n".join([*lines, "</svg>", ""])


def _floor(rooms: list[tuple[str, str]], top: int, colour: str) -> Iterator[str]:
    width = (WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)) / len(rooms)
    for number, (name, purpose) in enumerate(rooms):
        left = MARGIN + number * (width + GAP)
        yield (
            f'<rect x="{left:g}" y="{top}" width="{width:g}" height="{FLOOR}" rx="4" fill="{colour}" stroke="#9aa7bd"/>'
        )
        middle = top + FLOOR / 2 + 4
        yield f'<text x="{left + 8:g}" y="{middle:g}" font-weight="bold" fill="#1d2b44">{escape(name)}</text>'
        beside = len(rooms) > 1
        size = ' font-size="10"' if beside else ""
        after = left + NAME * (0.85 if beside else 1)
        yield f'<text x="{after:g}" y="{middle:g}"{size} fill="#3a465c">{escape(purpose)}</text>'


def _label(room: str) -> str:
    return f"{room}/" if (ROOT / "common" / room).is_dir() else f"{room}.py"


def _purpose(room: str) -> str:
    """Return the first line of the docstring of a package or module."""
    folder = ROOT / "common" / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert text, f"{file} does not say what it is for"
    return text.splitlines()[0].replace("``", "")


if __name__ == "__main__":
    PICTURE.write_text(draw())
