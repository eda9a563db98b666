"""Format numbers, units and labels, and build HTML: all text is escaped unless it is already :class:`Html`.

Control and other invisible characters are written as escapes, and long text is cut, as in ``mlperf-suite check``.
"""

from __future__ import annotations

import html
from typing import TypeGuard

from common.errors import printable
from common.mlperf.rules import QualityTarget

VOID = frozenset({"br", "img", "input", "meta"})


class Html(str):
    """Markup that is inserted without escaping."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element.

    Args:
        children: text, which is escaped, or markup (:class:`Html`); None and empty strings are skipped.
        attributes: a trailing underscore is removed (``class_``), others become hyphens. None or False omits the
            attribute; True writes it without a value.
    """
    written = []
    for key, value in attributes.items():
        label = key.rstrip("_").replace("_", "-")
        if value is True:
            written.append(f" {label}")
        elif value is not None and value is not False:
            written.append(f' {label}="{_text(value)}"')
    opening = f"<{name}{''.join(written)}>"
    return Html(opening) if name in VOID else Html(f"{opening}{join(*children)}</{name}>")


def join(*children: object) -> Html:
    """Return the children as one markup; None and empty strings are skipped."""
    return Html("".join(_markup(child) for child in children if child is not None and child != ""))


def _markup(child: object) -> str:
    return str(child) if isinstance(child, Html) else _text(child)


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


def table(head: tuple[str, ...], rows: tuple[tuple[object, ...], ...], caption: str) -> Html:
    """Return a scrollable table; the first cell of each row is its heading."""
    columns = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    lines = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag(
        "div",
        tag("table", tag("caption", caption), tag("thead", columns), tag("tbody", *lines)),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value from a log is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def figure_of(value: float) -> str:
    """Format a throughput or a count: separate thousands; below 100, three significant digits."""
    if value != value:
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def number(value: float) -> str:
    """Format a time: no decimals from 1000, two decimals from 1, else two significant digits."""
    if value != value:
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}" if abs(value) >= 1 else f"{value:.2g}"


def duration(milliseconds: float) -> str:
    """Format a duration in milliseconds, seconds or minutes, depending on its length."""
    seconds = milliseconds / 1000
    if seconds < 1:
        return f"{milliseconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.1f} min"


def minutes_of(value: float) -> str:
    """Format the minutes of a run as in published results: two decimals, three below one minute, without unit."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def relation(target: QualityTarget) -> str:
    """Return the relation between quality and target that the rules require: ``≥``, ``>``, ``≤`` or ``<``."""
    sign = "≥" if target.direction == "at_least" else "≤"
    return sign if target.target_allowed else sign.translate({ord("≥"): ">", ord("≤"): "<"})


def plural(unit: str) -> str:
    """Return the plural of the rules' unit of progress, for an axis label."""
    return unit if unit.endswith("s") else f"{unit}s"


def legible(text: str, longest: int = 60) -> str:
    """Convert text from a log or file name to a label: replace unprintable characters, and cut it to ``longest``."""
    drawn = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return drawn if len(drawn) <= longest else drawn[: longest - 1] + "…"
