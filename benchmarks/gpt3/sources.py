"""Where C4, GPT-3's tokenizer and the part of C4 that is evaluated come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpt3.raw import CORPUS, EVAL_FILE
from common.data.megatron.sources import C4_LICENCE, Source, download_corpus

README = "https://github.com/mlcommons/training/tree/master/retired_benchmarks/gpt3/megatron-lm"
TAR = (
    "gpt3/megatron-lm/dataset_c4_spm.tar of MLCommons' public bucket mlcommons-training-wg-public, by rclone as "
    f"{README} says under 'S3 artifacts download'"
)
PAIRS = f"{TAR}, folder preprocessed_c4_spm"
TOKENIZER = f"{TAR}, folder spm"
SELECTION = (
    f"{C4_LICENCE}; the 24,567 documents that MLCommons chose of C4's validation set: "
    "https://github.com/mlcommons/training/tree/master/retired_benchmarks/gpt3/paxml/utils/select_example.md"
)
SOURCE = Source(pairs=f"{C4_LICENCE}; {PAIRS}", tokenizer=TOKENIZER, by_hand=((EVAL_FILE, SELECTION),))


def download(raw_dir: Path) -> Iterator[str]:
    """Check what lies in ``raw_dir``, and fetch C4's text where that is what is begun there.

    Yields:
        One line for each file that is there.

    Raises:
        DataError: see :func:`common.data.megatron.sources.download_corpus`.
    """
    yield from download_corpus(raw_dir, CORPUS, SOURCE)
