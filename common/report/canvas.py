"""Save a figure as PNG, and as SVG with colours that follow the page's theme.

The page's style sheet defines a variable for each colour of :data:`COLOURS`, with a value for light and one for dark
screens; the SVG uses these variables. Text in the SVG stays text, so it can be searched, copied and read aloud. Labels
from logs are never interpreted as formulas.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {
    "paper": "#fdfeff",
    "ink": "#111827",
    "muted": "#5b6472",
    "line": "#d9dee7",
    "target": "#c01f2e",
    "c0": "#2160d8",
    "c1": "#d9730d",
    "c2": "#12875a",
    "c3": "#7b3fd1",
    "c4": "#c2317e",
    "c5": "#0b829c",
    "c6": "#8a5a1f",
    "c7": "#5a6b8c",
}
"""Colours by name on a light screen. All differ, so that :func:`to_svg` can replace each by its variable."""

SERIES = tuple(COLOURS[f"c{index}"] for index in range(8))
PNG_DPI = 160
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "normal",
    "axes.labelsize": 9.5,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.7,
    "axes.linewidth": 0.8,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.edgecolor": COLOURS["muted"],
    "axes.facecolor": "none",
    "figure.facecolor": COLOURS["paper"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "grid.color": COLOURS["line"],
    "legend.labelcolor": COLOURS["ink"],
}
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Picture:
    """A figure with its title, caption and table.

    Attributes:
        name: file name without extension.
        alt: one sentence that describes the figure for screen readers.
        caption: text below the figure; may be empty.
        head, rows: the drawn numbers as a table; may be empty.
    """

    name: str
    title: str
    alt: str
    figure: Figure
    caption: str = ""
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def styled(draw: Callable[[], _Result]) -> _Result:
    """Call ``draw`` with the report's style, ignoring the user's matplotlibrc, and return its result."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": "agg"}):
        return draw()


def new_figure(width: float, heights: Sequence[float]) -> tuple[Figure, list[Any]]:
    """Return a figure and its axes, one below the other with a common x axis.

    Args:
        width: width in inches; 6 is half a page on a screen, or the full width of a phone.
        heights: height of each axes in inches.
    """
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=list(heights))
    axes = [row[0] for row in grid]
    for one in axes:
        one.grid(axis="x", visible=False)
        one.tick_params(length=3)
    return figure, axes


def to_png(figure: Figure) -> bytes:
    """Return the figure as a PNG file with a white background."""
    buffer = io.BytesIO()
    styled(lambda: FigureCanvasAgg(figure).print_figure(buffer, format="png", dpi=PNG_DPI))
    return buffer.getvalue()


def to_svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG element without background, with the variables of the style sheet as colours.

    Args:
        name: prefix of the element's IDs; must be unique on the page.
    """
    buffer = io.StringIO()

    def save() -> None:
        with matplotlib.rc_context({"svg.hashsalt": name}):
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})

    styled(save)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r"\bid=\"([^\"]*)\"", rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'xlink:href="#([^"]*)"', rf'href="#{name}-\1"', text)
    for variable, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    body = text[text.index(">") + 1 :]
    return f'<svg {size[0]} aria-hidden="true" focusable="false">{body}'
