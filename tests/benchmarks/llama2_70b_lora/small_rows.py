"""Small texts and rows in every raw format, and prepared folders of them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from benchmarks.llama2_70b_lora.data import FORMAT
from common.data import manifest, synthetic
from common.data.manifest import Manifest

LENGTH = 64
VOCABULARY = 300
TEXT = "the report says that water is wet. a summary says so too, and no more"


@dataclass(frozen=True)
class Facts:
    """What the workload's facts say of the rows."""

    row_length: int = LENGTH
    vocabulary: int = VOCABULARY


def write_tokenizer(path: Path) -> SentencePieceProcessor:
    """A tokenizer of characters and bytes."""
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, "### Summarize the following text: Summary:"]), model_writer=written,
        model_type="bpe", vocab_size=VOCABULARY, hard_vocab_limit=False, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1, minloglevel=2,
    )  # fmt: skip
    path.write_bytes(written.getvalue())
    return SentencePieceProcessor(model_file=str(path))


def texts(count: int, seed: int) -> list[tuple[str, str]]:
    """Reports and summaries of different lengths; some reports make examples that are longer than a row."""
    random = np.random.default_rng(seed)
    words = TEXT.split()
    return [
        tuple(" ".join(random.choice(words, int(random.integers(1, most)))) for most in (6, 8)) for _ in range(count)
    ]


def write_texts(path: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """A file as SCROLLS has it."""
    lines = [json.dumps({"id": str(n), "input": pair[0], "output": pair[1]}) for n, pair in enumerate(pairs)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def mark(folder: Path, length: int = LENGTH, vocabulary: int = VOCABULARY, **rows: int) -> None:
    """Mark a raw folder as synthetic."""
    synthetic.mark(folder, {"settings": {"row_length": length, "vocabulary": vocabulary, **rows}})


def write_parquet(path: Path, tokens: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], rows: int = 2) -> None:
    """A file as the reference reads it, ``rows`` to a row group."""
    kind = pyarrow.list_(pyarrow.int32())
    columns = {
        "input_ids": pyarrow.array(tokens, kind),
        "labels": pyarrow.array(labels, pyarrow.list_(pyarrow.int64())),
    }
    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows)


def write_object_array(path: Path, tokens: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> None:
    """A file as NVIDIA's submissions convert the reference's."""
    rows = [
        {
            "input_ids": np.array(ids, np.int32),
            "loss_mask": [int(label != -100) for label in of_row],
            "seq_start_id": [0],
        }
        for ids, of_row in zip(tokens, labels, strict=True)
    ]
    array = np.empty(len(rows), object)
    array[:] = rows
    np.save(path, array, allow_pickle=True)


def write_prepared(root: Path, train: int, evaluation: int, length: int = LENGTH, seed: int = 0) -> Path:
    """A prepared folder, written array by array; token 0 of a row is its number."""
    random = np.random.default_rng(seed)
    root.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for split, rows in (("train", train), ("eval", evaluation)):
        tokens = random.integers(0, VOCABULARY, (rows, length)).astype(np.int32)
        tokens[:, 0] = np.arange(rows)
        arrays[f"{split}_tokens.npy"] = tokens
    arrays["eval_scored.npy"] = (random.random((evaluation, length)) < 0.3).astype(np.uint8)
    for name, array in arrays.items():
        np.save(root / name, array)
    counts = {"train_samples": train, "eval_samples": evaluation, "row_length": length, "vocabulary": VOCABULARY}
    manifest.write(root, Manifest(FORMAT, manifest.describe_files(root, arrays), counts, True, {}))
    return root
