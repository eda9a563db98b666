"""Reports and summaries to examples: SCROLLS' jsonl, the benchmark's template, SentencePiece.

The template is the reference's (mlcommons/training, llama2_70b_lora/scripts/utils.py). Llama's tokenizer puts BOS in
front; EOS stands in the template. Where the answer begins is how many tokens the prompt has by itself.

The reference writes EOS into the text as ``</s>``, which its tokenizer (transformers' Llama) turns into the token. It
does the same with ``<unk>``, ``<s>`` and ``</s>`` wherever a report or a summary has them, and encodes the text between
two of them as a text of its own. SentencePiece alone would cut these words into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tqdm import tqdm

from benchmarks.llama2_70b_lora.preparation.packing import PROCESSES, Example, Rows, pack
from common.errors import DataError
from common.untrusted.regular_file import lines, open_file
from common.untrusted.strict_json import parse_line

_CHUNK = 256  # texts that are handed to SentencePiece's threads at a time


def prompt(document: str) -> str:
    """What asks for the summary of ``document``."""
    return f"### Summarize the following text:\n {document}\n ### Summary:\n"


def read_tokenizer(path: Path) -> SentencePieceProcessor:
    """The tokenizer in ``path``.

    Raises:
        DataError: the file is missing, damaged, or has no BOS or EOS.
    """
    try:
        tokenizer = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} is no SentencePiece model: {error}") from error
    for name, token in (("BOS", tokenizer.bos_id()), ("EOS", tokenizer.eos_id())):
        if token < 0:
            raise DataError(f"{path}: the tokenizer has no {name}")
    return tokenizer


LINE_BYTES = 2**26
"""The longest line that is read; a report of GovReport has less than 2 MB."""


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Report and summary of each line of a SCROLLS file: its fields ``input`` and ``output``.

    Raises:
        DataError: a line is no JSON object with these texts; the message names file and line.
    """
    number = 0
    try:
        with open_file(path) as file:
            for line in lines(path, file, LINE_BYTES):
                number += 1
                content = parse_line(line)
                report, summary = content["input"], content["output"]
                if not (isinstance(report, str) and isinstance(summary, str)):
                    raise TypeError("input and output have to be texts")
                yield report, summary
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        problem = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
        raise DataError(f"{path}, line {number} {problem}; fetch the file again") from error


def tokens_of(texts: Sequence[str], tokenizer: SentencePieceProcessor, threads: int = 1) -> list[list[int]]:
    """Return the tokens of each text, without BOS; the names of unknown, BOS and EOS become these tokens."""
    tokens = (tokenizer.unk_id(), tokenizer.bos_id(), tokenizer.eos_id())
    special = {tokenizer.id_to_piece(token): token for token in tokens}
    names = re.compile("(" + "|".join(map(re.escape, special)) + ")")
    parts = [[part for part in names.split(text) if part] for text in texts]
    plain = [part for own in parts for part in own if part not in special]
    found = iter(tokenizer.encode(plain, num_threads=threads))
    made: list[list[int]] = []
    for own in parts:
        made.append([])
        for part in own:
            made[-1] += [special[part]] if part in special else next(found)
    return made


def encoded(texts: Iterable[tuple[str, str]], tokenizer: SentencePieceProcessor, threads: int = 1) -> Iterator[Example]:
    """The example of each (report, summary), in their order."""
    bos, eos, texts = tokenizer.bos_id(), tokenizer.eos_id(), iter(texts)
    while chunk := list(islice(texts, _CHUNK)):
        asked = [prompt(report) for report, _ in chunk]
        whole = [f"{question} {summary}" for question, (_, summary) in zip(asked, chunk, strict=True)]
        pieces = tokens_of(whole + asked, tokenizer, threads)
        for answered, question in zip(pieces[: len(chunk)], pieces[len(chunk) :], strict=True):
            yield Example([bos, *answered, eos], 1 + len(question))


def rows_of_texts(path: Path, split: str, tokenizer: SentencePieceProcessor, row_length: int, threads: int = 1) -> Rows:
    """The rows of one file; examples longer than a row are left out.

    Args:
        path: a SCROLLS file.
        split: ``train``, where every token is scored, or ``eval``, where answers are.
        tokenizer: of the model.
        row_length: tokens.
        threads: of the tokenizer; the rows do not depend on them.

    Raises:
        DataError: see :func:`read_texts`.
    """
    examples = encoded(tqdm(read_texts(path), path.name, unit="text", disable=None), tokenizer, threads)
    kept = [example for example in examples if len(example.tokens) <= row_length]
    return pack(kept, row_length, PROCESSES[split], answers_only=split == "eval")
