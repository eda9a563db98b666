"""What GPT-3 trains on: the last quarter of C4 in two halves, and what evaluates it: a part of C4's validation set.

``--raw-dir`` holds C4's files and the benchmark's SentencePiece model, or the pairs of files that MLCommons has.
"""

from __future__ import annotations

from common.data.megatron.corpus import Corpus, Part

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
        Part(HALVES[0], "train", FIRST_HALF),
        Part(HALVES[1], "train", SECOND_HALF),
        Part(EVAL, "eval", (EVAL_FILE,), documents=24_567),
    ),
    sizes={},
    checksums={
        f"{HALVES[0]}.bin": "317a1c1b0b17fbd658e3e0b09d118ce9",
        f"{HALVES[0]}.idx": "5c8cfe37a26f919fb3998e84d1d07d8e",
        f"{HALVES[1]}.bin": "5a84af04d55765993ecb5461af56b718",
        f"{HALVES[1]}.idx": "35b23332069840094e1a75332cdeab62",
        f"{EVAL}.bin": "20d868f6cb865ce616ce7b9cf8312be0",
        f"{EVAL}.idx": "f76050809d0b42611eeef31d67d04224",
    },
    archive="dataset_c4_spm.tar",
)
"""Names: mlcommons/training, retired_benchmarks/gpt3/megatron-lm; MD5s: its checksums/dataset_checksum.log."""
