"""A prepared folder of made-up utterances, written by hand: noise between silences, and random tokens."""

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
    """What the rules fix."""
    return fixed_facts(Facts, "rnnt", **changed)


def settings(
    train_samples: int = 40, num_buckets: int = 1, max_duration: float = 5.0, **reader: object
) -> SpeechDataSettings:
    """How the small corpus is read."""
    config = build(ReaderConfig, READER | reader, "reader")
    return SpeechDataSettings(facts(), config, max_duration, num_buckets, train_samples)


def utterance(samples: int, seed: int) -> np.ndarray:
    """Noise of a tenth of the range; a sixth of it at each end is silent."""
    sound = np.random.default_rng(seed).normal(0, 3000, samples)
    sound[: samples // 6] = sound[samples - samples // 6 :] = 0
    return sound.clip(-32768, 32767).astype("<i2")


def write(root: Path, train: Sequence[int], evaluation: Sequence[int], shards: int = 2) -> Path:
    """Write a folder with utterances of so many samples; those of ``train`` have a token for each 4,000."""
    files: list[Path] = []
    counts = {"vocabulary": VOCABULARY}
    for split, lengths in (("train", train), ("eval", evaluation)):
        folder = root / split
        folder.mkdir(parents=True)
        parts = np.array_split(np.arange(len(lengths)), shards)
        for number, part in enumerate(parts):
            path = folder / shard_name(number)
            path.write_bytes(b"".join(utterance(lengths[place], place).tobytes() for place in part))
            files.append(path)
        token_lengths = np.array([1 + length // 4000 for length in lengths], np.int32)
        columns = {
            "samples": np.array(lengths, np.int32),
            "token_lengths": token_lengths,
            "tokens": np.concatenate([tokens_of(place, size) for place, size in enumerate(token_lengths)]),
            "shard_samples": np.array([sum(lengths[place] for place in part) for part in parts], np.int64),
        }
        names = [f"1-2-{place:04d}" for place in range(len(lengths))]
        files += write_split(folder, columns, names, names if split == "eval" else None)
        counts |= {
            f"{split}_samples": len(lengths), f"{split}_audio_samples": sum(lengths),
            f"{split}_longest_samples": max(lengths), f"{split}_tokens": int(token_lengths.sum()),
            f"{split}_longest_tokens": int(token_lengths.max()), f"{split}_shards": shards,
        }  # fmt: skip
    described = manifest.describe_files(root, [str(path.relative_to(root)) for path in files])
    manifest.write(root, Manifest(FORMAT, described, counts, True, {}))
    return root


def tokens_of(place: int, size: int) -> np.ndarray:
    """The tokens of utterance ``place``."""
    return np.random.default_rng(1000 + place).integers(VOCABULARY, size=size).astype(np.int16)
