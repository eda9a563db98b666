"""Convert C4's text to Megatron's files, and the data commands of workloads that train on them.

One process tokenizes each text file into a piece; then the pieces are joined. Documents keep the order of files and
lines, as if all files were merged first. No token marks the end of a document.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np

from common.data import atomic, manifest, preparation
from common.data.commands import DataCommands
from common.data.manifest import Manifest, digest
from common.data.megatron.corpus import Corpus, CorpusPart, RawCorpus, open_raw, open_tokenizer
from common.data.megatron.indexed import (
    bin_of,
    check_all,
    copy_to_offset,
    dtype_for,
    idx_of,
    indexed_writer,
    open_indexed,
    read_index,
    write_index,
)
from common.data.megatron.synthetic import SyntheticText, generate
from common.data.preparation import link_or_copy_all, preparing
from common.data.stages import Record, Stages
from common.errors import DataError
from common.untrusted.regular_file import lines, open_file
from common.untrusted.strict_json import parse_line

FORMAT = "megatron-indexed/1"
INTERMEDIATE = "intermediate"
TOKENS_PER_BYTE = {".gz": 0.6, ".json": 0.25}
"""Upper bound of tokens per byte of C4's files, packed and unpacked: a token has at least four bytes of text."""
TEXT_PER_WORKER = 1 << 20
"""Minimum bytes of text files, packed or not, per additional process."""
_CHARACTERS = 1 << 21  # minimum size of a batch of documents for the tokenizer


class _Piece(NamedTuple):
    """The output of one tokenization process: the pair of files ``prefix`` with the documents of ``files``."""

    part: CorpusPart
    files: list[Path]
    prefix: Path


def prepare(raw_dir: Path, data_dir: Path, corpus: Corpus, workers: int = 1) -> Manifest:
    """Write all pairs of files. Does nothing if they exist, and continues an interrupted preparation.

    Args:
        raw_dir: text and tokenizer, or pairs, which are linked and checked; see :mod:`common.data.megatron.corpus`.
        data_dir: target folder for pairs and manifest.

    Raises:
        DataError: the raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` was prepared
            from another source, or another process is preparing it.
    """
    source = open_raw(raw_dir, corpus)
    _check_vocabulary(source)
    wanted = {"fingerprint": source.fingerprint(), "settings": f"vocabulary {source.vocabulary}"}
    with preparing(data_dir, FORMAT, corpus.prepare_command, wanted, corpus.published, source.synthetic) as job:
        if job.found is not None:
            return job.found
        work_dir = job.begin(INTERMEDIATE)
        description, more = "C4 en 3.0.1", {}
        if source.tokenizer is None:
            _link(source, data_dir)
            description += ", tokenized by others"
        else:
            _tokenize(source, data_dir, work_dir, workers)
            more = {"tokenizer": digest(source.tokenizer, "sha256")}
        names, counts = _counted(source, data_dir)
        files = manifest.describe_files(data_dir, names, job.published.with_md5)
        return job.finish(files, counts, description, more)


def verify(data_dir: Path, corpus: Corpus) -> Manifest:
    """Compare all files of ``data_dir`` with their checksums; raises :class:`DataError` at the first difference."""
    return manifest.verify(data_dir, FORMAT, corpus.prepare_command)


def read_manifest(data_dir: Path, corpus: Corpus, vocabulary: int) -> Manifest:
    """Return the manifest of ``data_dir``.

    Args:
        vocabulary: vocabulary size of the model.

    Raises:
        DataError: the manifest is missing or damaged, a file is missing or has another size, or the data have another
            vocabulary.
    """
    found = manifest.read(data_dir, FORMAT, corpus.prepare_command, ("vocabulary",))
    if found.counts["vocabulary"] != vocabulary:
        raise DataError(
            f"{data_dir} has a vocabulary of {found.counts['vocabulary']} tokens, the model one of {vocabulary}; give "
            "the data_dir that belongs to this recipe"
        )
    for part in corpus.parts:
        for path in (bin_of(Path(part.name)), idx_of(Path(part.name))):
            if path.name not in found.files:
                raise DataError(f"{data_dir / manifest.NAME} names no {path.name}; run '{corpus.prepare_command}'")
    return found


LINE_BYTES = 2**28
"""Maximum length of a line in bytes; C4's longest document has less than 2 MB."""


def read_documents(path: Path) -> Iterator[str]:
    """Yield the texts of one of C4's files, gzip or plain: each line is a JSON object with a field ``text``.

    Raises:
        DataError: the file cannot be read, is cut off, or a line has no text; the message names file and line.
    """
    number = 0
    try:
        with open_file(path) as packed, cast(IO[bytes], gzip.open(packed)) if path.suffix == ".gz" else packed as file:
            for line in lines(path, file, LINE_BYTES):
                number += 1
                text = parse_line(line)["text"]
                if not isinstance(text, str):
                    raise TypeError("its text is none")
                yield text
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read behind line {number}: {error}; fetch the file again") from error
    except (ValueError, KeyError, TypeError) as error:
        problem = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
        raise DataError(f"{path}, line {number} {problem}; fetch the file again") from error


def _check_vocabulary(source: RawCorpus) -> None:
    if source.tokenizer is None:
        return
    size = open_tokenizer(source.tokenizer).size
    if size != source.vocabulary:
        raise DataError(
            f"{source.tokenizer} has {size} tokens where the model has {source.vocabulary}: it is another tokenizer"
        )


def _tokenize(source: RawCorpus, data_dir: Path, work_dir: Path, workers: int) -> None:
    """Tokenize all pieces, concatenate the pieces of each part, and write its index."""
    assert source.tokenizer is not None
    itemsize = dtype_for(source.vocabulary).itemsize
    sizes = {path: path.stat().st_size for path in source.files}
    if not (work_dir / "stages").exists():
        tokens = sum(size * TOKENS_PER_BYTE[path.suffix] for path, size in sizes.items())
        preparation.require_space(data_dir, int(tokens * itemsize), more=False)
    pieces = [piece for part in source.parts for piece in _pieces(source, part, work_dir)]
    tasks = {
        piece.prefix.name: (piece.files, source.tokenizer, source.vocabulary, piece.part.documents, piece.prefix)
        for piece in pieces
    }
    with Stages(work_dir / "stages", min(workers, 1 + sum(sizes.values()) // TEXT_PER_WORKER)) as stages:
        made = stages.run("tokens", tasks, tokenize_files)
        ends = dict.fromkeys((part.name for part in source.parts), 0)
        copies = {}
        for piece in pieces:
            name, part = piece.prefix.name, piece.part
            copies[name] = piece.prefix, _partial(data_dir, part), ends[part.name]
            ends[part.name] += made[name]["tokens"] * itemsize
        stages.run("place", copies, copy_piece)
    for part in source.parts:
        _finish(part, data_dir, [piece.prefix for piece in pieces if piece.part is part])


def _pieces(source: RawCorpus, part: CorpusPart, work_dir: Path) -> list[_Piece]:
    """Return one piece per text file, or one piece in total if the part does not use all documents."""
    files = list(source.files_of[part.name])
    shares = [[path] for path in files] if part.documents is None else [files]
    return [_Piece(part, share, work_dir / f"{part.name}-{number:05d}") for number, share in enumerate(shares)]


def _partial(data_dir: Path, part: CorpusPart) -> Path:
    return data_dir / f"{bin_of(Path(part.name)).name}.partial"


def tokenize_files(files: list[Path], tokenizer: Path, vocabulary: int, documents: int | None, prefix: Path) -> Record:
    """Write the pair ``prefix`` from ``files``; return its ``documents``, ``tokens``, ``largest``. A task of a stage.

    Args:
        files: text files, in order.
        vocabulary: vocabulary size of the model.
        documents: number of documents, taken from the start; None for all.
        prefix: path of the pair without ``.bin`` and ``.idx``.

    Raises:
        DataError: a file is damaged, or there are fewer than ``documents`` documents.
    """
    encode = open_tokenizer(tokenizer).encode
    prefix.parent.mkdir(parents=True, exist_ok=True)
    texts = islice((text for path in files for text in read_documents(path)), documents)
    with indexed_writer(prefix, vocabulary) as writer:
        for chunk in _chunks(texts):
            for tokens in encode(chunk):
                writer.add(tokens)
        if documents is not None and writer.documents < documents:
            raise DataError(f"{files[-1]} ends with document {writer.documents}, expected {documents}")
        return {"documents": writer.documents, "tokens": writer.tokens, "largest": writer.largest}


def copy_piece(prefix: Path, target: Path, offset: int) -> Record:
    """Copy the tokens of a piece into the joint file, and delete the piece's file; a task of a stage.

    Args:
        prefix: path of the piece without ``.bin``.
        target: the joint file.
        offset: position of the piece in it, in bytes.
    """
    done = prefix.with_name(f"{prefix.name}.placed")
    if not done.exists():
        copy_to_offset(bin_of(prefix), target, offset)
        atomic.write_text(done, "")
    bin_of(prefix).unlink(missing_ok=True)
    return {}


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if characters >= _CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _finish(part: CorpusPart, data_dir: Path, pieces: list[Path]) -> None:
    """Rename the token file of a part to its final name, and write its index."""
    found = [read_index(idx_of(prefix)) for prefix in pieces]
    before = np.cumsum([0, *(len(index) for index in found)])
    documents = [index.documents[:-1] + first for index, first in zip(found, before[:-1], strict=True)]
    lengths = np.concatenate([index.lengths for index in found])
    whole = np.concatenate([*documents, before[-1:]]).astype(np.int64)
    partial = _partial(data_dir, part)
    if partial.exists():
        partial.replace(bin_of(data_dir / part.name))
    write_index(idx_of(data_dir / part.name), found[0].dtype, lengths, whole)


def _link(source: RawCorpus, data_dir: Path) -> None:
    """Link pairs of files that were tokenized elsewhere, and check their contents."""
    files = [(path, data_dir / path.name) for path in source.files]
    link_or_copy_all(files, data_dir, "delete it, or name another --data-dir")
    for part in source.parts:
        check_all(open_indexed(data_dir / part.name), source.vocabulary)


def _counted(source: RawCorpus, data_dir: Path) -> tuple[list[str], dict[str, int]]:
    """Return the names of all files, and the counts of the manifest."""
    counts = {"vocabulary": source.vocabulary}
    names = []
    for part in source.parts:
        opened = open_indexed(data_dir / part.name)
        for kind, count in (("documents", len(opened.index.documents) - 1), ("tokens", len(opened.tokens))):
            counts[f"{part.split}_{kind}"] = counts.get(f"{part.split}_{kind}", 0) + count
        names += [bin_of(Path(part.name)).name, idx_of(Path(part.name)).name]
    return names, counts


def commands_for(corpus: Corpus) -> DataCommands:
    """Return ``download``, ``generate``, ``prepare`` and ``verify`` for ``corpus``."""

    def generated(raw_dir: Path, options: SyntheticText) -> str:
        return generate(raw_dir, corpus, options)

    def prepared(raw_dir: Path, data_dir: Path, workers: int) -> Manifest:
        return prepare(raw_dir, data_dir, corpus, workers)

    def verified(data_dir: Path) -> Manifest:
        return verify(data_dir, corpus)

    return DataCommands(
        corpus.benchmark,
        raw="C4's text and the tokenizer, or pairs of .bin and .idx",
        prepared="pairs of .bin and .idx",
        real="C4",
        generate=generated,
        prepare=prepared,
        verify=verified,
        published=corpus.published,
    )
