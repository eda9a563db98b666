"""Text parts for training and the held-out articles for evaluation, from extracted articles.

As in MLCommons' preparation (do_sentence_segmentation.py, seperate_test_set.py, do_gather.py of mlcommons/training,
retired_benchmarks/bert/cleanup_scripts) what is held out are *pieces* of a file: whatever lies between two empty lines,
the empty piece behind the last one included. n articles are n + 1 pieces or more.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.bert.preparation.articles import clean, read_lines
from benchmarks.bert.preparation.sentences import SentenceSplitter
from common.data.atomic import written
from common.data.manifest import digest
from common.errors import DataError

SEED = 12345
SEED_STEP = 13


def held_out(number: int, files: int, wanted: int, pieces: int, path: Path) -> set[int]:
    """Which pieces of file ``number`` are kept for evaluation.

    Args:
        number: place of the file among the sorted files.
        files: how many there are.
        wanted: pieces to hold out, over all files.
        pieces: of this file.
        path: the file, for the message.

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

    Returns:
        ``articles`` and ``bytes`` for training, ``held_out`` pieces.

    Raises:
        DataError: the file is damaged, or has too few articles.
    """
    pieces = sentences_of(path, SentenceSplitter(punkt)).split("\n\n")
    chosen = held_out(number, files, wanted, len(pieces), path)
    kept = [piece for place, piece in enumerate(pieces) if place not in chosen]
    write_text(evaluation, [f"{piece}\n\n" for place, piece in enumerate(pieces) if place in chosen])
    written_bytes = write_text(training, ["\n\n".join(kept), "\n" if kept else ""])
    return {"articles": sum(piece != "" for piece in kept), "held_out": len(chosen), "bytes": written_bytes}


def sentences_of(path: Path, splitter: SentenceSplitter) -> str:
    """One file's articles, cleaned, a sentence a line, and an empty line wherever a line was empty.

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
    """Numbers of the files of each part: neighbours, about the same bytes in each part, none without a file.

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
    """Write the files ``sources`` one after another; returns the ``bytes`` and their ``md5``."""
    size = write_text(path, (source.read_text(encoding="utf-8") for source in sources))
    return {"bytes": size, "md5": digest(path, "md5")}


def write_text(path: Path, pieces: Iterable[str]) -> int:
    """Write ``pieces`` to ``path``, which appears when it is complete; returns its bytes."""
    with written(path) as partial, open(partial, "w", encoding="utf-8", newline="\n") as file:
        for piece in pieces:
            file.write(piece)
        return file.tell()
