"""Articles of Wikipedia as WikiExtractor writes them: ``<doc id=… url=… title=…>``, title, text, ``</doc>``."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import DataError

_OPENING = re.compile(r'<doc id="[^"]*" .*title="(?P<title>.*)">')
_CLOSING = "</doc>"
_CATEGORY = re.compile(r"\[\[Category:[^\[\]]*\]\]")
_ELEMENTS = re.compile(
    r"<ref\b[^<>]*/>|<(?P<name>ref|graph|includeonly|mapframe)\b[^<>]*>[^<]*</(?P=name)>", re.IGNORECASE
)
_TAGS = re.compile(
    r"</?(?:ref|references|math|chem|ins|del|div|sup|sub|br|hr|small|poem|gallery|nowiki|onlyinclude|includeonly|"
    r"noinclude|section|meta|mapframe|graph|templatestyles)\b[^<>]*>|<https?:[^<>]*>",
    re.IGNORECASE,
)
_FILES = re.compile(r"\[\[:*(?:file|image|media):[^\[\]]*\]\]", re.IGNORECASE)
_LINK = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]")
_OTHER_LINK = re.compile(r"\[\[[^\[\]]*\]\]")
_BRACKETS = re.compile(r"\[([^\[\]|]*)\]")


@dataclass(frozen=True)
class Article:
    """One article: its title, and its paragraphs as they stand in the file."""

    title: str
    paragraphs: list[str]


def read_articles(path: Path) -> Iterator[Article]:
    """The articles of one of WikiExtractor's files, without their titles' lines.

    Raises:
        DataError: the file is no such file, is not UTF-8, or ends within an article.
    """
    article: Article | None = None
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                text = line.strip()
                if article is None:
                    opening = _OPENING.fullmatch(text)
                    if opening:
                        article = Article(opening["title"], [])
                    elif text:
                        raise DataError(f"{path}: line {number} is outside of <doc …> and </doc>: no extracted article")
                elif text == _CLOSING:
                    yield article
                    article = None
                elif text and (article.paragraphs or text not in (article.title, html.unescape(article.title))):
                    article.paragraphs.append(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason}); extract it again") from error
    if article is not None:
        raise DataError(f"{path} ends within the article {article.title!r}; extract it again")


def clean(paragraph: str) -> str:
    """``paragraph`` without the remains of wiki markup: links keep their words; categories, files and tags go."""
    if "[" in paragraph:
        if _CATEGORY.search(paragraph):
            return ""
        paragraph = _FILES.sub("", paragraph)
        for _ in range(2):  # a link within a link's words
            paragraph = _LINK.sub(r"\1", paragraph)
        paragraph = _BRACKETS.sub(r"\1", _OTHER_LINK.sub("", paragraph))
    if "<" in paragraph:
        paragraph = _TAGS.sub("", _ELEMENTS.sub("", paragraph))
    return paragraph.strip()
