"""A prepared folder of synthetic utterances: noise between silences, and random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.data_settings import ReaderConfig, SpeechDataSettings
from benchmarks.rnnt.prepared import FORMAT, shard_name, write_split
from common.config.loading import build
from common.data import manifest
from common.data.manifest import Manifest
from common.mlperf.fixed import fixed_facts

VOCABULARY = 31
READER: dict[str, object] = {
    "buckets": [[60, 12], [120, 20], [250, 40]], "eval_buckets": [64, 400], "eval_batch": 4,
    "threads": 2,
}  # fmt: skip


def facts(**changed: object) -> Facts:
    """Return the constants of the rules with some changes."""
    return fixed_facts(Facts, "rnnt", **changed)


def settings(
    train_samples: int = 40, num_buckets: int = 1, max_duration: float = 5.0, **reader: object
) -> SpeechDataSettings:
    """Return the settings to read the small corpus."""
    config = build(ReaderConfig, READER | reader, "reader")
    return SpeechDataSettings(facts(), config, max_duration, num_buckets, train_samples)


def audio(samples: int, seed: int) -> np.ndarray:
    """Return noise, (samples,) int16, with a tenth of the range; the first and the last sixth are zero."""
    sound = np.random.default_rng(seed).normal(0, 3000, samples)
    sound[: samples // 6] = sound[samples - samples // 6 :] = 0
    return sound.clip(-32768, 32767).astype("<i2")


def write(root: Path, train: Sequence[int], evaluation: Sequence[int], shards: int = 2) -> Path:
    """Write a folder with utterances of the given numbers of samples; each has one token more than samples / 4,000."""
    files: list[Path] = []
    counts = {"vocabulary": VOCABULARY}
    for split, lengths in (("train", train), ("eval", evaluation)):
        folder = root / split
        folder.mkdir(parents=True)
        parts = np.array_split(np.arange(len(lengths)), shards)
        for number, part in enumerate(parts):
            path = folder / shard_name(number)
            path.write_bytes(b"".join(audio(lengths[index], index).tobytes() for index in part))
            files.append(path)
        token_lengths = np.array([1 + length // 4000 for length in lengths], np.int32)
        columns = {
            "samples": np.array(lengths, np.int32),
            "token_lengths": token_lengths,
            "tokens": np.concatenate([tokens_of(index, size) for index, size in enumerate(token_lengths)]),
            "shard_samples": np.array([sum(lengths[index] for index in part) for part in parts], np.int64),
        }
        names = [f"1-2-{index:04d}" for index in range(len(lengths))]
        files += write_split(folder, columns, names, names if split == "eval" else None)
        counts |= {
            f"{split}_samples": len(lengths), f"{split}_audio_samples": sum(lengths),
            f"{split}_longest_samples": max(lengths), f"{split}_tokens": int(token_lengths.sum()),
            f"{split}_longest_tokens": int(token_lengths.max()), f"{split}_shards": shards,
        }  # fmt: skip
    described = manifest.describe_files(root, [str(path.relative_to(root)) for path in files])
    manifest.write(root, Manifest(FORMAT, described, counts, True, {}))
    return root


def tokens_of(utterance: int, size: int) -> np.ndarray:
    """Return the tokens of an utterance, (size,) int16."""
    return np.random.default_rng(1000 + utterance).integers(VOCABULARY, size=size).astype(np.int16)
