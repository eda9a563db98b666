"""What Llama 3.1 8B trains on: 128 files of C4, and what evaluates it: the first documents of C4's validation set.

``--raw-dir`` holds C4's files and Llama 3.1's ``tokenizer.json``, or the pairs of files that MLCommons distributes.
"""

from __future__ import annotations

from common.data.megatron.corpus import Corpus, Part

TRAIN = "c4-train.en_6_text_document"
EVAL = "c4-validation-91205-samples.en_text_document"
TRAIN_FILES = tuple(f"c4-train.{number:05d}-of-01024.json.gz" for number in range(768, 896))
EVAL_FILE = "c4-validation-91205-samples.en.json.gz"
"""MLCommons' file of the documents that the evaluation takes of ``EVAL_FILES``."""
EVAL_FILES = tuple(f"c4-validation.{number:05d}-of-00008.json.gz" for number in range(8))

CORPUS = Corpus(
    benchmark="llama31_8b",
    tokenizer="tokenizer.json",
    vocabulary=128_256,
    parts=(Part(TRAIN, "train", TRAIN_FILES), Part(EVAL, "eval", EVAL_FILES, 91_205, EVAL_FILE)),
    sizes={
        f"{TRAIN}.bin": 83_976_774_280,
        f"{TRAIN}.idx": 912_172_262,
        f"{EVAL}.bin": 166_568_364,
        f"{EVAL}.idx": 1_824_142,
    },
    checksums={},
)
"""Names and numbers: mlcommons/training, small_llm_pretraining/nemo; sizes: NVIDIA's submission of round 5.1."""
