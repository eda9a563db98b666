"""Sentences of a paragraph, by NLTK's Punkt (Kiss and Strunk, Computational Linguistics 32(4), 2006)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import DataError
from common.untrusted.regular_file import read_text


class SentenceSplitter:
    """Splits English paragraphs.

    Args:
        model: folder with NLTK's parameters of English (``punkt_tab/english``); None for Punkt without any, which
            knows no abbreviation, so that it ends a sentence behind every "Dr.".

    Raises:
        DataError: the folder holds no such parameters.
    """

    def __init__(self, model: Path | None) -> None:
        from nltk.tokenize.punkt import PunktSentenceTokenizer

        self._tokenizer = PunktSentenceTokenizer() if model is None else PunktSentenceTokenizer(_parameters(model))

    def split(self, paragraph: str) -> list[str]:
        """The sentences of ``paragraph``, each on one line."""
        return [sentence.strip() for sentence in self._tokenizer.tokenize(paragraph)]


def description(model: Path | None) -> str:
    """Which parameters split the sentences, for the manifest."""
    return "Punkt without parameters" if model is None else "Punkt with NLTK's parameters"


def _parameters(model: Path) -> Any:
    """NLTK's tables, one entry a line, columns between tabs."""
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
