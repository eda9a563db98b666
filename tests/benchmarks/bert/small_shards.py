"""Small prepared sets of sequences that a test makes up, written value by value with h5py.

The first token of every sequence is its own number + ``FIRST``, so that batches show which sequences they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor

from benchmarks.bert.config import Facts, ReaderConfig
from benchmarks.bert.data import BertDataSettings
from common.config.loading import build
from common.data import manifest
from common.data.manifest import Manifest
from common.mlperf.fixed import benchmark_settings

FIRST = 1000
EVALUATION = "eval_varlength/part_eval_10k.hdf5"
FACTS = {
    "vocabulary": 5000, "max_sequence_length": 32, "max_masked_per_sequence": 5, "max_masked_per_row": 6,
}  # fmt: skip
READER = {"format": "packed", "order": "shuffled", "graph_per_count": False, "eval_rows": 2}


@dataclass
class Sample:
    """One sequence: token ids, segment ids, masked positions in the sequence, their words, next-sentence label."""

    tokens: list[int]
    segments: list[int]
    positions: list[int]
    words: list[int]
    label: int

    @property
    def number(self) -> int:
        """Which of the set's sequences it is."""
        return self.tokens[0] - FIRST


def settings(**changes: object) -> BertDataSettings:
    """Settings for sequences of up to 32 tokens; ``changes`` are of the benchmark's facts or of the reader."""
    facts = {**benchmark_settings("bert")["facts"], **FACTS}
    facts |= {name: value for name, value in changes.items() if name in facts}
    reader = READER | {name: value for name, value in changes.items() if name not in facts}
    return BertDataSettings(build(Facts, facts, "benchmark.facts"), build(ReaderConfig, reader, "reader"))


def make_samples(lengths: Iterable[int], seed: int = 0) -> list[Sample]:
    """Random sequences of ``lengths``, numbered from 0, with one masked token for every eight, at least one."""
    random = np.random.default_rng(seed)
    made = []
    for number, length in enumerate(lengths):
        masked = max(1, length // 8)
        made.append(
            Sample(
                [FIRST + number, *random.integers(0, 1000, length - 1).tolist()],
                [0] * (length // 2) + [1] * (length - length // 2),
                sorted(random.choice(np.arange(1, length), masked, replace=False).tolist()),
                random.integers(0, 5000, masked).tolist(),
                int(random.integers(2)),
            )
        )
    return made


def make_packs(sizes: Iterable[int], seed: int = 0) -> list[list[Sample]]:
    """Packs of as many sequences as ``sizes`` says, of up to 32 tokens together."""
    sizes = list(sizes)
    random = np.random.default_rng(seed)
    lengths = [int(random.integers(4, 32 // size + 1)) for size in sizes for _ in range(size)]
    samples = iter(make_samples(lengths, seed))
    return [[next(samples) for _ in range(size)] for size in sizes]


def _ragged(file: h5py.File, name: str, rows: Sequence[Sequence[int]], dtype: type) -> None:
    dataset = file.create_dataset(name, (len(rows),), dtype=h5py.vlen_dtype(dtype))
    for number, row in enumerate(rows):
        dataset[number] = np.array(row, dtype)


def write_packs(path: Path, packs: Sequence[Sequence[Sample]]) -> None:
    """One file of packs."""
    positions = []
    for pack in packs:
        shift, of_pack = 0, []
        for sample in pack:
            of_pack += [shift + position for position in sample.positions]
            shift += len(sample.tokens)
        positions.append(of_pack)
    with h5py.File(path, "w") as file:
        _ragged(file, "input_ids", [[i for s in pack for i in s.tokens] for pack in packs], np.int16)
        _ragged(file, "segment_ids", [[i for s in pack for i in s.segments] for pack in packs], np.int8)
        _ragged(file, "masked_lm_positions", positions, np.int16)
        _ragged(file, "masked_lm_ids", [[i for s in pack for i in s.words] for pack in packs], np.int16)
        _ragged(file, "packed_input_len", [[len(s.tokens) for s in pack] for pack in packs], np.int16)
        _ragged(file, "packed_masked_lm_len", [[len(s.words) for s in pack] for pack in packs], np.int16)
        _ragged(file, "next_sentence_labels", [[s.label for s in pack] for pack in packs], np.int8)


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """One file of single sequences."""
    with h5py.File(path, "w") as file:
        _ragged(file, "input_ids", [s.tokens for s in samples], np.int16)
        _ragged(file, "segment_ids", [s.segments for s in samples], np.int8)
        _ragged(file, "masked_lm_positions", [s.positions for s in samples], np.int16)
        _ragged(file, "masked_lm_ids", [s.words for s in samples], np.int16)
        file.create_dataset("next_sentence_labels", data=np.array([s.label for s in samples], np.int8))


def write_data(root: Path, packs: Sequence[list[Sample]], shards: int, evaluation: Sequence[Sample]) -> Path:
    """A prepared folder: ``packs`` in ``shards`` files, the same sequences unpacked, and the evaluation set."""
    samples = [sample for pack in packs for sample in pack]
    names = []
    for folder, write, rows in (("packed", write_packs, packs), ("varlength", write_samples, samples)):
        (root / folder).mkdir(parents=True)
        start = 0
        for shard in range(shards):
            place = shard if folder == "packed" else shards - 1 - shard  # NVIDIA's unpacked shards: smaller ones first
            stop = start + len(rows) // shards + (place < len(rows) % shards)
            suffix = "" if folder == "packed" else f"_of_{shards:05d}.hdf5"
            names.append(f"{folder}/part_{shard:05d}{suffix}")
            write(root / names[-1], rows[start:stop])
            start = stop
    (root / EVALUATION).parent.mkdir()
    write_samples(root / EVALUATION, evaluation)
    describe(root, packs, shards, [*names, EVALUATION], len(evaluation))
    return root


def describe(root: Path, packs: Sequence[list[Sample]], shards: int, names: Sequence[str], evaluation: int) -> None:
    """Write the manifest."""
    sizes = [len(pack) for pack in packs]
    counts = {
        "train_samples": sum(sizes),
        "train_packs": len(packs),
        **{f"packs_of_{size}": sizes.count(size) for size in (1, 2, 3)},
        "shards": shards,
        "eval_samples": evaluation,
        "vocabulary": 5000,
        "max_sequence_length": 32,
    }
    manifest.write(root, Manifest("bert-hdf5/1", manifest.describe_files(root, names), counts, True, {}))


def numbers_in(tensors: dict[str, Tensor]) -> list[int]:
    """Which sequences a batch holds, in its order."""
    starts, lengths = tensors["starts"], tensors["lengths"]
    return (tensors["input_ids"][starts.long()][lengths > 0] - FIRST).tolist()


def expected_tensors(samples: Sequence[Sample], tokens: int, sequences: int, masked: int) -> dict[str, Tensor]:
    """The tensors of a batch without ``dropout_seed``, made entry by entry."""
    made = {
        name: [0] * tokens for name in ("input_ids", "segment_ids", "position_ids")
    } | {"starts": [0] * sequences, "lengths": [0] * sequences, "next_sentence_labels": [-1] * sequences}  # fmt: skip
    made |= {"masked_positions": [0] * masked, "masked_labels": [-1] * masked}
    at = entry = 0
    for number, sample in enumerate(samples):
        made["starts"][number], made["lengths"][number] = at, len(sample.tokens)
        made["next_sentence_labels"][number] = sample.label
        for position, word in zip(sample.positions, sample.words, strict=True):
            made["masked_positions"][entry], made["masked_labels"][entry] = at + position, word
            entry += 1
        for position, token in enumerate(sample.tokens):
            made["input_ids"][at], made["segment_ids"][at] = token, sample.segments[position]
            made["position_ids"][at] = position
            at += 1
    return {name: torch.tensor(values, dtype=torch.int32) for name, values in made.items()}
