"""HTML that cannot be broken by what it shows: all text is escaped unless it is markup already.

Control characters, and others that cannot be seen, are written as escapes, and long text is cut, as ``check`` does.
"""

from __future__ import annotations

import html

from common.errors import printable

VOID = frozenset({"br", "img", "input", "meta"})


class Html(str):
    """Markup, to be used as it is."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element; children are escaped unless they are :class:`Html`.

    Args:
        name: of the element.
        children: text or markup, one after the other; None and empty ones are left out.
        attributes: ``class_`` is class, other underscores are hyphens; None leaves an attribute out, True is bare.
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
    """Children in a row."""
    return Html("".join(_markup(child) for child in children if child is not None and child != ""))


def _markup(child: object) -> str:
    return str(child) if isinstance(child, Html) else _text(child)


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


def table(head: tuple[str, ...], rows: tuple[tuple[object, ...], ...], caption: str) -> Html:
    """A table with a heading for each column, and for each row its first cell."""
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
