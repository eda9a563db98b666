"""Frame of a page in one file, and cards with pictures."""

from __future__ import annotations

from common.report.canvas import Picture, to_svg
from common.report.markup import Html, join, table, tag
from common.report.style import style_sheet


def html_page(title: str, body: Html) -> str:
    """Return an HTML document with the style sheet, which loads nothing from the network."""
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        tag("title", title),
        tag("style", Html(style_sheet())),
    )
    page = tag("html", tag("head", head), tag("body", body), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def picture_card(picture: Picture, name: str) -> Html:
    """Return a card with a picture, its caption and its numbers.

    Args:
        name: prefix of the IDs in the drawing; must be unique on the page.
    """
    return tag("section", tag("h2", picture.title), figure_element(picture, name), numbers_of(picture), class_="card")


def figure_element(picture: Picture, name: str) -> Html:
    """Return the drawing with its caption; ``name`` as in :func:`picture_card`."""
    drawing = tag("div", Html(to_svg(picture.figure, name)), class_="picture", role="img", aria_label=picture.alt)
    return tag("figure", drawing, tag("figcaption", picture.caption) if picture.caption else None)


def numbers_of(picture: Picture) -> Html | None:
    """Return the drawn numbers as a table that can be opened; None if the picture has none."""
    if not picture.rows:
        return None
    return tag(
        "details", tag("summary", "Numbers as a table"), table(picture.head, picture.rows, f"{picture.title}: numbers")
    )
