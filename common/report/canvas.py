"""Figures that are drawn once and saved twice: as PNG, and as SVG whose colours follow the page's theme.

The page's style sheet gives each colour of :data:`COLOURS` a variable of the same name, with one value for light and
one for dark screens; in the SVG the colours are replaced by those variables. Text stays text: it is read aloud,
found and copied, and labels that come from logs are drawn as they are, never as formulas.
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
"""Name to colour on a light screen; each occurs once, so that it can be told apart in an SVG."""

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
    """A figure with what is said about it.

    Attributes:
        name: of its file, without ending.
        title: over it.
        alt: what it shows, in a sentence, for who cannot see it.
        figure: of matplotlib.
        caption: under it; may be empty.
        head, rows: its figures as a table; may be empty.
    """

    name: str
    title: str
    alt: str
    figure: Figure
    caption: str = ""
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def styled(draw: Callable[[], _Result]) -> _Result:
    """What ``draw`` returns, drawn in the house style whatever the user's matplotlibrc says."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": "agg"}):
        return draw()


def new_figure(width: float, heights: Sequence[float]) -> tuple[Figure, list[Any]]:
    """A figure with one pair of axes below the other over a common x axis.

    Args:
        width: in inches; 6 is half a page on a screen, and the width of a phone.
        heights: of the axes, in inches.
    """
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=list(heights))
    axes = [row[0] for row in grid]
    for one in axes:
        one.grid(axis="x", visible=False)
        one.tick_params(length=3)
    return figure, axes


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG on white."""
    buffer = io.BytesIO()
    styled(lambda: FigureCanvasAgg(figure).print_figure(buffer, format="png", dpi=PNG_DPI))
    return buffer.getvalue()


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for a page, without a background, its colours as variables of the style sheet.

    Args:
        figure: what to save.
        name: unique on the page: the names of its parts are made from it.
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
