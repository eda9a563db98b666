"""Micro-batches for tests of the model: sequences drawn at random and laid out in a flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One sequence: (n,) ids and segments, (m,) masked positions in it and their labels, and the sentence label."""

    ids: Tensor
    segments: Tensor
    masked: Tensor
    labels: Tensor
    next_sentence: int


def draw(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[Sample]:
    """A sample of each length, a seventh of its tokens masked."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number, length in enumerate(lengths):
        masked = max(1, length // 7)
        samples.append(
            Sample(
                torch.randint(vocabulary, (length,), generator=generator),
                (torch.arange(length) * 2 >= length).long(),
                1 + torch.randperm(length - 1, generator=generator)[:masked].sort().values,
                torch.randint(vocabulary, (masked,), generator=generator),
                number % 2,
            )
        )
    return samples


def lay_out(
    samples: Sequence[Sample], starts: Sequence[int], capacity: tuple[int, int, int], seed: int = 1
) -> dict[str, Tensor]:
    """The tensors of a micro-batch.

    Args:
        samples: in the order in which ``starts`` and ``lengths`` list them.
        starts: first token of each.
        capacity: T, S and M.
        seed: of its dropout.
    """
    T, S, M = capacity
    ids, segments, positions = (torch.zeros(T, dtype=torch.int32) for _ in range(3))
    places, lengths = (torch.zeros(S, dtype=torch.int32) for _ in range(2))
    sentences, labels = torch.full((S,), -1, dtype=torch.int32), torch.full((M,), -1, dtype=torch.int32)
    masked, filled = torch.zeros(M, dtype=torch.int32), 0
    for number, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        inside, taken = slice(start, start + len(sample.ids)), slice(filled, filled + len(sample.masked))
        ids[inside], segments[inside] = sample.ids.int(), sample.segments.int()
        positions[inside] = torch.arange(len(sample.ids)).int()
        places[number], lengths[number], sentences[number] = start, len(sample.ids), sample.next_sentence
        masked[taken], labels[taken] = (sample.masked + start).int(), sample.labels.int()
        filled = taken.stop
    return {
        "input_ids": ids,
        "segment_ids": segments,
        "position_ids": positions,
        "starts": places,
        "lengths": lengths,
        "masked_positions": masked,
        "masked_labels": labels,
        "next_sentence_labels": sentences,
        "dropout_seed": torch.tensor(seed),
    }


def back_to_back(samples: Sequence[Sample]) -> list[int]:
    """Starts of sequences without gaps."""
    starts = [0]
    for sample in samples[:-1]:
        starts.append(starts[-1] + len(sample.ids))
    return starts
