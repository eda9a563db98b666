"""Data of GPT-3: the last quarter of C4 in two halves for training, and a part of its validation set.

``--raw-dir`` contains files of C4 and the SentencePiece model of the benchmark, or the pairs of Megatron files ``.bin``
and ``.idx`` from MLCommons.
"""

from __future__ import annotations

from common.data.megatron.corpus import Corpus, CorpusPart
from common.data.megatron.preparation import commands_for
from common.data.published import Published, published_files
from common.data.sources import read_sources

HALVES = ("c4_en_6_c4_spm_text_document", "c4_en_7_c4_spm_text_document")
EVAL = "c4_en_validation_subset_c4_spm_text_document"
EVAL_FILE = "c4-validation_24567exp.json"
FIRST_HALF = tuple(f"c4-train.{number:05d}-of-01024.json.gz" for number in range(768, 896))
SECOND_HALF = tuple(f"c4-train.{number:05d}-of-01024.json.gz" for number in range(896, 1024))

CORPUS = Corpus(
    benchmark="gpt3",
    tokenizer="c4_en_301_5Mexp2_spm.model",
    vocabulary=50_257,
    parts=(
        CorpusPart(HALVES[0], "train", FIRST_HALF),
        CorpusPart(HALVES[1], "train", SECOND_HALF),
        CorpusPart(EVAL, "eval", (EVAL_FILE,), documents=24_567),
    ),
    published=Published(files=published_files(read_sources("gpt3")["pairs"].contents)),
    archive="dataset_c4_spm.tar",
)
"""Files of the data set. Names are from mlcommons/training, retired_benchmarks/gpt3/megatron-lm; MD5 sums are from
checksums/dataset_checksum.log there."""


COMMANDS = commands_for(CORPUS)
