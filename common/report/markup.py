"""Build HTML from untrusted text: all text is escaped unless it is already :class:`Html`.

Control and other invisible characters are written as escapes, and long text is cut, as in ``mlperf-suite check``.
"""

from __future__ import annotations

import html

from common.errors import printable

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
