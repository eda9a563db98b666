"""Test that BERT's encoder learns in FP8 as in bf16: four layers of full width, 500 steps on text.

Initial weights, data, masks and dropout are the same. ``pytest -s`` prints both curves.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import accumulate as sums_of
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.bert.model import Bert, BertArchitecture, pretraining_loss
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.optim.adaptive import AdamW
from common.optim.learning_rate import polynomial
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.step.graphs import StepRunner
from common.step.train_step import Losses, TrainStep, accumulate
from tests.conftest import ROOT
from tests.gpu.support import WITH_FP8

pytestmark = [pytest.mark.gpu, WITH_FP8]

ARCHITECTURE = BertArchitecture(
    vocabulary=2000, hidden=1024, layers=4, heads=16, feed_forward=4096, max_sequence_length=512, segment_types=2,
    norm_epsilon=1e-12, dropout=0.1, attention_dropout=0.1, initializer_range=0.02,
)  # fmt: skip
STEPS, ROWS, ROW = 500, 16, 512
SEQUENCES = ((512,), (200, 312), (171, 171, 170))
"""Lengths of the sequences of rows, in turn."""

MASKED_OF_ROW = 76
LEARNING_RATE, WARM_UP = 2e-4, 50
MEAN_OF = 50
CLOSE = 0.01
"""Largest relative difference of the mean losses."""

UNKNOWN, MASK, FIRST_WORD = 0, 1, 2


def text() -> np.ndarray:
    """Return the ids of the documentation's words. The vocabulary has the most frequent ones."""
    pages = [path.read_text(encoding="utf-8").lower() for path in sorted((ROOT / "docs").glob("*.md"))]
    words = [word for page in pages for word in re.findall(r"[a-z]+|[0-9]|[^\sa-z0-9]", page)]
    known = [word for word, _ in Counter(words).most_common(ARCHITECTURE.vocabulary - FIRST_WORD)]
    ids = {word: FIRST_WORD + number for number, word in enumerate(known)}
    return np.array([ids.get(word, UNKNOWN) for word in words], np.int32)


def micro_batch(ids: np.ndarray, step: int, rows: int) -> dict[str, Tensor]:
    """Return random rows of the text. 15 % of the tokens are labels: 80 % of them masked, 10 % replaced, 10 % kept."""
    random = np.random.default_rng(step)
    tokens = rows * ROW
    starts = random.integers(0, len(ids) - ROW, rows)
    words = np.concatenate([ids[start : start + ROW] for start in starts])
    lengths = [length for row in range(rows) for length in SEQUENCES[row % len(SEQUENCES)]]
    bounds = [0, *sums_of(lengths)]
    positions = np.concatenate([np.arange(end - begin) for begin, end in pairwise(bounds)])
    of_rows = [row * ROW + random.choice(ROW, MASKED_OF_ROW, replace=False) for row in range(rows)]
    masked = np.concatenate(of_rows)
    labels, draw = words[masked], random.random(len(masked))
    replaced = random.integers(FIRST_WORD, ARCHITECTURE.vocabulary, len(masked))
    words[masked] = np.where(draw < 0.8, MASK, np.where(draw < 0.9, replaced, labels))
    arrays = {
        "input_ids": words,
        "segment_ids": np.zeros(tokens),
        "position_ids": positions,
        "starts": bounds[:-1],
        "lengths": lengths,
        "masked_positions": masked,
        "masked_labels": labels,
        "next_sentence_labels": np.full(len(lengths), -1),
    }
    tensors = {name: torch.tensor(np.asarray(array), dtype=torch.int32) for name, array in arrays.items()}
    return {**tensors, "dropout_seed": torch.tensor(step)}


def train(linear: str, architecture: BertArchitecture, device: str, steps: int, rows: int) -> list[float]:
    """Return the masked-LM loss of every step."""
    start = torch.Generator(device).manual_seed(0)
    model = Bert(architecture, start, {"linear": linear}, device, torch.bfloat16).train()
    named = dict(model.named_parameters())
    groups = [
        ParameterGroup({name: p for name, p in named.items() if p.ndim > 1}, weight_decay=0.01),
        ParameterGroup({name: p for name, p in named.items() if p.ndim == 1}),
    ]
    layout = Layout(device=device)
    schedule = polynomial(LEARNING_RATE, 0.0, 1.0, min(WARM_UP, steps // 2), steps, first_step=1)
    optimizer = Optimizer(
        groups, AdamW(), schedule, layout, grad_divisor=1.0, clip=ClipNorm(1.0, "after_reduction"), blocks=model.blocks
    )

    def loss(batch: Batch) -> Losses:
        losses = pretraining_loss(model(batch.tensors))
        return Losses(losses.total, losses.metrics)

    step, ids = TrainStep(accumulate(loss), [optimizer], layout), text()
    batches = (
        Batch({name: t.to(device) for name, t in micro_batch(ids, number, rows).items()}, samples=rows)
        for number in range(steps)
    )
    runner, found = StepRunner(step, model, 1), []
    first = next(batches)
    runner.warm_up([first])
    with runner.on_stream():
        for batch in (first, *batches):
            result = runner([batch])
            found.append(result.values.clone())
    names = result.names
    runner.close()
    return [step.read(names, values).metrics["masked_lm_loss"] for values in torch.stack(found).tolist()]


def means(losses: list[float]) -> list[float]:
    """Return the means of each ``MEAN_OF`` losses."""
    return [sum(losses[first : first + MEAN_OF]) / MEAN_OF for first in range(0, len(losses), MEAN_OF)]


def entropy_of_words() -> float:
    """Return the loss of a network that knows the frequencies of words and ignores their context."""
    share = np.bincount(text(), minlength=ARCHITECTURE.vocabulary) / len(text())
    present = share[share > 0]
    return float(-(present * np.log(present)).sum())


def test_four_layers_learn_in_fp8_as_in_bf16() -> None:
    curves = {kind: means(train(kind, ARCHITECTURE, "cuda", STEPS, ROWS)) for kind in ("reference", "fp8")}
    for kind, curve in curves.items():
        print(f"{kind:5s} masked-LM loss, means of {MEAN_OF} steps:", *(f"{value:.4f}" for value in curve))
    print(f"entropy of single words: {entropy_of_words():.4f}")
    assert curves["reference"][-1] < 0.9 * entropy_of_words()
    assert curves["fp8"] == pytest.approx(curves["reference"], rel=CLOSE)
