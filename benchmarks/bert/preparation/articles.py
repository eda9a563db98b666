"""Read and clean articles that WikiExtractor wrote: ``<doc id=… url=… title=…>``, title, text, ``</doc>``.

The result is byte for byte that of the preparation by MLCommons, including its errors, because the published checksums
are of that text (mlcommons/training, retired_benchmarks/bert/cleanup_scripts: cleanup_file.py, clean.sh). It replaces
patterns line by line, in a fixed order, and does not handle nesting. Therefore ``<sub>`` and ``<br/>`` stay,
``<chem>x</chem>`` becomes ``>x``, an image without a caption becomes its name, and a paragraph that is removed
completely leaves an empty line, which ends the article.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.untrusted.regular_file import line_not_utf8, open_file, read_text

_OPENING = re.compile(r'<doc id="[^"]*" .*title="(?P<title>.*)">')
_CATEGORY = re.compile(r"\[\[Category:[^]\[]*\]\]")
_WORDS = r"([^]\[|]*)"
_LINK, _LABELLED = rf"\[\[{_WORDS}\]\]", rf"\[\[[^]\[|]*\|{_WORDS}\]\]"
_BRACKETS = (
    *[(_LINK, r"\1")] * 2,  # twice, for a link inside the text of another link
    *[(_LABELLED, r"\1")] * 2,
    (r"\[\[:*[Ff]ile:[^]\[]*\]\]", ""),
    (r"\[\[[Mm]edia:[^]\[]*\]\]", ""),
    (r"\[\[[Ii]mage:[^]\[]*\]\]", ""),
    (rf"\[{_WORDS}\]", r"\1"),
    (r"\[\[[^]\[]*\]\]", ""),
)


def _tags(names: str) -> list[tuple[str, str]]:
    """Return replacements that remove these tags if they have no attributes."""
    return [(f"<{slash}{name}>", "") for name in names.split() for slash in ("", "/")]


_ELEMENTS = (
    *((rf"<{name}([^<]*)</{name}>", r"\1") for name in ("chem", "ins")),
    (r"<, ref [^<]*</ref>", ""),
    *((rf"<{name}[^<]*</{name}>", "") for name in ("includeonly", "graph")),
    *((rf"<{name}[^\\]*/>", "") for name in ("section", "meta", "hr")),
    (r"<gallery[^>]*>", ""),
    (r"<ref[^<]*</ref>", ""),
    *((rf"<{name}[^>]*>", "") for name in ("ref", "http", "Ref")),
    (r"<mapframe [^/]*/>", ""),
    (r"<mapframe[^>]*>", ""),
    (r"</mapframe>", ""),
    *_tags("poem math ref"),
    (r"<div[^>]*>", ""),
    (r"</div[^>]*>", ""),
    *_tags("sup br BR Br del nowiki NOWIKI onlyinclude includeonly small chem noinclude gallery"),
    (r"<graph>\{", ""),
    (r"<graph>", ""),
    (r"\}</graph>", ""),
    (r"</graph>", ""),
    (r"</references>", ""),
    (r"<poem [^>]*>", ""),
)


def read_lines(path: Path) -> Iterator[str]:
    """Yield an empty line for each article of a WikiExtractor file, and its paragraphs without the title.

    Raises:
        DataError: the file is not from WikiExtractor, is not UTF-8, or ends within an article.
    """
    title: str | None = None
    title_follows = False
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                text = line.removesuffix("\n")
                if title_follows:
                    title_follows = False
                elif "<doc" in text and (title is not None or _OPENING.fullmatch(text.strip())):
                    opening = _OPENING.fullmatch(text.strip())
                    title, title_follows = opening["title"] if opening else title, True
                    yield ""
                elif title is None:
                    if text.strip():
                        raise DataError(f"{path}: line {number} is outside of <doc …> and </doc>: no extracted article")
                elif "</doc>" in text:
                    title = None
                elif text:
                    yield text
    except UnicodeDecodeError as error:
        with open_file(path) as whole:
            raise DataError(f"{path} is not UTF-8 in line {line_not_utf8(whole)}; extract it again") from error
    if title is not None:
        raise DataError(f"{path} ends within the article {title!r}; extract it again")


def clean(line: str) -> str | None:
    """Return ``line`` without most of the wiki markup, or None if the line names a category and is to be dropped."""
    if "[" in line:
        if _CATEGORY.search(line):
            return None
        line = _substituted(line, _BRACKETS)
    line = line.replace("alt=", "")
    return _substituted(line, _ELEMENTS) if "<" in line else line


def _substituted(line: str, steps: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in steps:
        line = re.sub(pattern, replacement, line)
    return line


class SentenceSplitter:
    """Sentence splitter for English paragraphs.

    Args:
        model: folder of the English parameters from NLTK (``punkt_tab/english``). None uses Punkt without parameters:
            it does not know abbreviations and ends a sentence after "Dr.", for example.

    Raises:
        DataError: the folder lacks the parameters, or they are damaged.
    """

    def __init__(self, model: Path | None) -> None:
        from nltk.tokenize.punkt import PunktSentenceTokenizer

        self._tokenizer = PunktSentenceTokenizer() if model is None else PunktSentenceTokenizer(_parameters(model))

    def split(self, paragraph: str) -> list[str]:
        """Return the sentences of ``paragraph`` without surrounding whitespace."""
        return [sentence.strip() for sentence in self._tokenizer.tokenize(paragraph)]


def splitter_description(model: Path | None) -> str:
    """Return a description of the Punkt parameters, for the manifest."""
    return "Punkt without parameters" if model is None else "Punkt with NLTK's parameters"


def _parameters(model: Path) -> Any:
    """Read the parameter tables of NLTK: one entry per line, columns separated by tabs."""
    from nltk.tokenize.punkt import PunktParameters

    def lines(name: str) -> list[str]:
        return [line for line in read_text(model / name).splitlines() if line]

    parameters = PunktParameters()
    try:
        parameters.abbrev_types = set(lines("abbrev_types.txt"))
        parameters.sent_starters = set(lines("sent_starters.txt"))
        for line in lines("collocations.tab"):
            first, second = line.split("\t")
            parameters.collocations.add((first, second))
        for line in lines("ortho_context.tab"):
            word, flags = line.split("\t")
            parameters.ortho_context[word] = int(flags)
    except (DataError, ValueError) as error:
        raise DataError(
            f"{model} holds no parameters of Punkt ({error}); it is NLTK's folder punkt_tab/english"
        ) from error
    return parameters
