"""Split paragraphs into sentences with Punkt from NLTK (Kiss and Strunk, Computational Linguistics 32(4), 2006)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import DataError
from common.untrusted.regular_file import read_text


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


def description(model: Path | None) -> str:
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
