"""Where C4 and Llama 3.1's tokenizer come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.llama31_8b.raw import CORPUS
from common.data.megatron.sources import C4_LICENCE, Source, download_corpus

R2 = "MLCommons' R2 downloader (https://github.com/mlcommons/r2-downloader) with the metadata "
PAIRS = f"{R2}https://training.mlcommons-storage.org/metadata/llama-3-1-8b-preprocessed-c4-dataset.uri"
TOKENIZER = (
    "Llama 3.1's licence; https://huggingface.co/meta-llama/Llama-3.1-8B (account), or "
    f"{R2}https://training.mlcommons-storage.org/metadata/llama-3-1-8b-tokenizer.uri"
)
SOURCE = Source(pairs=f"{C4_LICENCE}; {PAIRS}", tokenizer=TOKENIZER)


def download(raw_dir: Path) -> Iterator[str]:
    """Check what lies in ``raw_dir``, and fetch C4's text where that is what is begun there.

    Yields:
        One line for each file that is there.

    Raises:
        DataError: see :func:`common.data.megatron.sources.download_corpus`.
    """
    yield from download_corpus(raw_dir, CORPUS, SOURCE)
