"""Fetch C4's text, or check pairs of files that others made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.data.download import RemoteFile, check_or_download
from common.data.megatron.corpus import Corpus
from common.data.megatron.indexed import bin_of, idx_of, open_indexed
from common.data.megatron.text_tokenizers import open_tokenizer
from common.data.stand_in import description_of
from common.errors import DataError

C4 = "https://huggingface.co/datasets/allenai/c4/resolve/main/en/"
C4_LICENCE = "ODC-BY 1.0, no account"


@dataclass(frozen=True)
class Source:
    """Where what has no address of its own comes from.

    Attributes:
        pairs: licence and place of the pairs of files.
        tokenizer: of the tokenizer.
        by_hand: file of text to its licence and place, where C4 on Hugging Face has it not.
    """

    pairs: str
    tokenizer: str
    by_hand: tuple[tuple[str, str], ...] = ()


def download_corpus(raw_dir: Path, corpus: Corpus, source: Source) -> Iterator[str]:
    """Check the pairs of files in ``raw_dir`` if there are any; else check the tokenizer and fetch the text.

    Yields:
        One line for each file that is there.

    Raises:
        DataError: something that has to be placed by hand is missing (where it is, is said), is not what was
            published, or a transfer failed.
    """
    if (found := description_of(raw_dir)) is not None:
        yield f"{raw_dir}: a stand-in, {found.get('request')}; nothing to fetch"
        return
    pairs = [_pair_file(path.name, corpus, source) for part in corpus.parts for path in _ends(Path(part.name))]
    if any((raw_dir / file.name).is_file() for file in pairs):
        for path in check_or_download(pairs, raw_dir):
            yield f"{path}: as published"
        for part in corpus.parts:
            opened = open_indexed(raw_dir / part.name)
            yield f"{raw_dir / part.name}: {len(opened)} sequences, {len(opened.tokens)} tokens of {opened.index.dtype}"
        return
    by_hand = [RemoteFile(name, None, where) for name, where in source.by_hand]
    by_hand.append(RemoteFile(corpus.tokenizer, None, source.tokenizer))
    try:
        for path in check_or_download(by_hand, raw_dir):
            yield f"{path}: found, {path.stat().st_size} bytes"
    except DataError as error:
        alternative = "\n".join(f"  {file.name} ({file.bytes or 'unknown'} bytes)" for file in pairs)
        raise DataError(
            f"{error}\nor place the pairs that MLCommons distributes ({source.pairs}):\n{alternative}"
        ) from error
    size = open_tokenizer(raw_dir / corpus.tokenizer).size
    if size != corpus.vocabulary:
        raise DataError(f"{raw_dir / corpus.tokenizer} has {size} tokens instead of {corpus.vocabulary}: another one")
    placed = {name for name, _ in source.by_hand}
    for name in (name for part in corpus.parts for name in part.files if name not in placed):
        (path,) = check_or_download([RemoteFile(name, C4 + name, C4_LICENCE)], raw_dir)
        yield f"{path}: there, {path.stat().st_size} bytes"


def _ends(prefix: Path) -> tuple[Path, Path]:
    return bin_of(prefix), idx_of(prefix)


def _pair_file(name: str, corpus: Corpus, source: Source) -> RemoteFile:
    md5 = corpus.checksums.get(name)
    return RemoteFile(name, None, source.pairs, corpus.sizes.get(name), md5 and f"md5:{md5}")
