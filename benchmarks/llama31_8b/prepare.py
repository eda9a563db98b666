"""Data of Llama 3.1 8B: 128 files of C4 for training, and the first documents of its validation set.

``--raw-dir`` contains files of C4 and ``tokenizer.json`` of Llama 3.1, or the pairs of Megatron files ``.bin`` and
``.idx`` from MLCommons.
"""

from __future__ import annotations

from common.data.megatron.corpus import Corpus, CorpusPart
from common.data.megatron.preparation import commands_for
from common.data.published import Published, published_files
from common.data.sources import read_sources

TRAIN = "c4-train.en_6_text_document"
EVAL = "c4-validation-91205-samples.en_text_document"
TRAIN_FILES = tuple(f"c4-train.{number:05d}-of-01024.json.gz" for number in range(768, 896))
EVAL_FILE = "c4-validation-91205-samples.en.json.gz"
"""File by MLCommons with only those documents of ``EVAL_FILES`` that the evaluation uses."""
EVAL_FILES = tuple(f"c4-validation.{number:05d}-of-00008.json.gz" for number in range(8))

CORPUS = Corpus(
    benchmark="llama31_8b",
    tokenizer="tokenizer.json",
    vocabulary=128_256,
    parts=(CorpusPart(TRAIN, "train", TRAIN_FILES), CorpusPart(EVAL, "eval", EVAL_FILES, 91_205, EVAL_FILE)),
    published=Published(files=published_files(read_sources("llama31_8b")["pairs"].files)),
)
"""Files of the data set. Names and numbers are from mlcommons/training, small_llm_pretraining/nemo; sizes are from the
NVIDIA submission of round 5.1; MD5 sums are from MLCommons, llama-3-1-8b-preprocessed-c4-dataset.md5."""


COMMANDS = commands_for(CORPUS)
