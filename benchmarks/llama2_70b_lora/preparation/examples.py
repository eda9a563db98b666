"""Convert reports and summaries in the jsonl files of SCROLLS to tokenized examples.

The template is that of the reference implementation (mlcommons/training, llama2_70b_lora/scripts/utils.py): BOS,
prompt, summary, EOS. The answer starts after the number of tokens that the prompt alone has.

The Llama tokenizer of transformers, which the reference uses, converts ``<unk>``, ``<s>`` and ``</s>`` in reports and
summaries to special tokens, and encodes the texts between them separately. SentencePiece alone would split these words
into pieces, so we handle them here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tqdm import tqdm

from benchmarks.llama2_70b_lora.preparation.packing import PROCESSES, Example, PackedExamples, pack
from common.errors import DataError
from common.untrusted.regular_file import lines, open_file
from common.untrusted.strict_json import parse_line

_CHUNK = 256  # texts per call of SentencePiece, which encodes them with several threads


def prompt(document: str) -> str:
    """Return the prompt for the summary of ``document``."""
    return f"### Summarize the following text:\n {document}\n ### Summary:\n"


def read_tokenizer(path: Path) -> SentencePieceProcessor:
    """Return the tokenizer in ``path``.

    Raises:
        DataError: the file is missing or damaged, or the tokenizer has no BOS or EOS.
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
"""Maximum length of a line in bytes; reports in GovReport have less than 2 MB."""


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield report and summary of each line of a SCROLLS file: its fields ``input`` and ``output``.

    Raises:
        DataError: a line is not a JSON object with these texts; the message names file and line.
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
    """Return the tokens of each text, without BOS; the words ``<unk>``, ``<s>`` and ``</s>`` become special tokens."""
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
    """Yield the example of each (report, summary), in order."""
    bos, eos, texts = tokenizer.bos_id(), tokenizer.eos_id(), iter(texts)
    while chunk := list(islice(texts, _CHUNK)):
        asked = [prompt(report) for report, _ in chunk]
        whole = [f"{question} {summary}" for question, (_, summary) in zip(asked, chunk, strict=True)]
        pieces = tokens_of(whole + asked, tokenizer, threads)
        for answered, question in zip(pieces[: len(chunk)], pieces[len(chunk) :], strict=True):
            yield Example([bos, *answered, eos], 1 + len(question))


def rows_of_texts(
    path: Path, split: str, tokenizer: SentencePieceProcessor, row_length: int, threads: int = 1
) -> PackedExamples:
    """Return the rows of one file; examples longer than a row are dropped.

    Args:
        split: ``train``, where every token is scored, or ``eval``, where only answers are scored.
        threads: number of tokenizer threads; does not change the rows.

    Raises:
        DataError: see :func:`read_texts`.
    """
    examples = encoded(tqdm(read_texts(path), path.name, unit="text", disable=None), tokenizer, threads)
    kept = [example for example in examples if len(example.tokens) <= row_length]
    return pack(kept, row_length, PROCESSES[split], answers_only=split == "eval")
