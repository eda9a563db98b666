"""Split extracted articles into text parts for training and held-out articles for evaluation.

As in the preparation by MLCommons (do_sentence_segmentation.py, seperate_test_set.py, do_gather.py in
mlcommons/training, retired_benchmarks/bert/cleanup_scripts), the units are the *pieces* of a file between two empty
lines, including the empty piece at the end. A file of n articles has at least n + 1 pieces.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.bert.preparation.articles import SentenceSplitter, clean, read_lines
from common.data.atomic import written
from common.data.manifest import digest
from common.errors import DataError

SEED = 12345
SEED_STEP = 13


def held_out(number: int, files: int, wanted: int, pieces: int, path: Path) -> set[int]:
    """Return the indices of the pieces of one file that are held out for evaluation.

    Args:
        number: index of the file among the ``files`` sorted files.
        wanted: number of pieces to hold out, over all files.
        pieces: number of pieces in this file.
        path: path of the file, for the error message.

    Raises:
        DataError: the file has fewer pieces than its share.
    """
    share = int((number + 1) * wanted / files) - int(number * wanted / files)
    if share > pieces:
        raise DataError(f"{path} has {pieces} articles where {share} are held out of every file: it is too small")
    source = random.Random(SEED + SEED_STEP * number)
    chosen: set[int] = set()
    while len(chosen) < share:
        chosen.add(int(source.random() * pieces))
    return chosen


def split_file(
    path: Path, number: int, files: int, wanted: int, punkt: Path | None, training: Path, evaluation: Path
) -> dict[str, int]:
    """Clean one file of articles, split it into sentences, and write its training and its held-out articles.

    Args:
        punkt: folder of Punkt parameters, or None.
        training, evaluation: output files.

    Returns:
        ``articles`` and ``bytes`` of the training text, and ``held_out``, the number of held-out pieces.

    Raises:
        DataError: the file is damaged, or has too few articles.
    """
    pieces = sentences_of(path, SentenceSplitter(punkt)).split("\n\n")
    chosen = held_out(number, files, wanted, len(pieces), path)
    kept = [piece for index, piece in enumerate(pieces) if index not in chosen]
    write_text(evaluation, [f"{piece}\n\n" for index, piece in enumerate(pieces) if index in chosen])
    written_bytes = write_text(training, ["\n\n".join(kept), "\n" if kept else ""])
    return {"articles": sum(piece != "" for piece in kept), "held_out": len(chosen), "bytes": written_bytes}


def sentences_of(path: Path, splitter: SentenceSplitter) -> str:
    """Return the cleaned articles of one file with one sentence per line, and an empty line for each empty line.

    Raises:
        DataError: the file is damaged.
    """
    lines = []
    for line in read_lines(path):
        cleaned = clean(line)
        if cleaned == "":
            lines.append("")
        elif cleaned is not None:
            lines += splitter.split(cleaned)
    return "\n".join([*lines, "", ""])


def assign(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Return the indices of the files of each part: consecutive, about equal total size, and at least one file.

    Raises:
        DataError: there are fewer files than parts.
    """
    if len(sizes) < parts:
        raise DataError(f"{len(sizes)} files of articles cannot make {parts} parts; extract into smaller files")
    groups: list[list[int]] = [[] for _ in range(parts)]
    total, before, part = sum(sizes), 0, 0
    for number, size in enumerate(sizes):
        middle = before + size / 2
        files_left = len(sizes) - number
        if groups[part] and part + 1 < parts and (middle * parts >= total * (part + 1) or files_left < parts - part):
            part += 1
        groups[part].append(number)
        before += size
    return groups


def join(sources: Sequence[Path], path: Path) -> dict[str, int | str]:
    """Concatenate the files ``sources`` into ``path``; return its ``bytes`` and ``md5``."""
    size = write_text(path, (source.read_text(encoding="utf-8") for source in sources))
    return {"bytes": size, "md5": digest(path, "md5")}


def write_text(path: Path, pieces: Iterable[str]) -> int:
    """Write ``pieces`` and return the number of bytes; the file appears at ``path`` when it is complete."""
    with written(path) as partial, open(partial, "w", encoding="utf-8", newline="\n") as file:
        for piece in pieces:
            file.write(piece)
        return file.tell()
