"""The evaluation against plain ``torch.nn`` layers, one utterance and one token at a time; and its scorer."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from plain_rnnt import PlainRnnt
from torch import Tensor

from benchmarks.rnnt.config import Facts, ModelConfig, RnntConfig
from benchmarks.rnnt.data import PADDING
from benchmarks.rnnt.data_settings import ReaderConfig
from benchmarks.rnnt.evaluate import Transcription, WordErrorRate
from benchmarks.rnnt.model import Rnnt
from benchmarks.rnnt.prepared import open_prepared
from benchmarks.rnnt.preparer import FeaturePreparer
from common.contract.evaluation import Predictions, Weights
from common.data.batches import HostBatch
from common.distributed.layout import Layout
from common.errors import DataError
from common.mlperf.fixed import fixed_facts

FEATURES = 9
FRAMES = [21, 20, 13, 8, 7, 2, 1]
"""Of the evaluation set's utterances, not in the order in which they are numbered."""
NUMBERS = [4, 0, 6, 2, 5, 1, 3]
SHAPE = {
    "classes": 7, "encoder_width": 12, "prediction_width": 8, "joint_width": 10, "max_frame_symbols": 3,
    "max_symbols": 15, "mel_filters": 3, "freq_mask_max": 3,
}  # fmt: skip


def configuration() -> RnntConfig:
    facts = fixed_facts(Facts, "rnnt", **SHAPE)
    reader = ReaderConfig(buckets=((24, 4),), eval_buckets=(8, 24), eval_batch=3)
    model = ModelConfig(features=FEATURES, loss_scale=1.0)
    return RnntConfig(facts, cast(Any, SimpleNamespace()), model, reader)


def features_of(number: int, frames: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return 3 * torch.randn(frames, FEATURES, generator=generator, dtype=torch.float64)


class Utterances:
    """An evaluation set in batches of three, the longest first; slots without an utterance repeat the shortest."""

    eval_samples = len(FRAMES)

    def __init__(self) -> None:
        self.read, self.closed = 0, False

    def __len__(self) -> int:
        return -(-len(FRAMES) // 3)

    def __iter__(self) -> Iterator[HostBatch]:
        self.read += 1
        for position in range(len(self)):
            rows = [min(row, len(FRAMES) - 1) for row in range(3 * position, 3 * position + 3)]
            frames = 24 if FRAMES[rows[0]] > 8 else 8
            real = [row for row in range(3 * position, 3 * position + 3) if row < len(FRAMES)]
            tensors = {
                "rows": torch.tensor(rows),
                "utterance": torch.tensor([NUMBERS[row] for row in real] + [PADDING] * (3 - len(real))),
            }
            yield HostBatch(tensors, 3, position, ("eval", frames))

    def close(self) -> None:
        self.closed = True


class Features:
    """In the place of a :class:`FeaturePreparer`: noise instead of features of audio."""

    def tensors(self, tensors: Mapping[str, Tensor], frames: int, training: bool) -> dict[str, Tensor]:
        assert not training
        features_TBF = torch.zeros(frames, 3, FEATURES, dtype=torch.float64)
        rows = tensors["rows"].tolist()
        for place, row in enumerate(rows):
            features_TBF[: FRAMES[row], place] = features_of(NUMBERS[row], FRAMES[row])
        lengths = torch.tensor([FRAMES[row] for row in rows], dtype=torch.int32)
        return {"features": features_TBF, "feature_lengths": lengths, "utterance": tensors["utterance"]}


def network(seed: int) -> Rnnt:
    """With weights so large that what it says depends on what it hears."""
    own, generator = configuration(), torch.Generator().manual_seed(seed)
    model = Rnnt(own.facts, own.model, 1.0, generator, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.9 if parameter.ndim > 1 else 0.3, generator=generator)
        model.joint.joint_net.bias[-1] += 1.5
    return model


def evaluation_of(model: Rnnt, source: Utterances) -> Transcription:
    own, preparer = configuration(), cast(FeaturePreparer, Features())
    return Transcription(model, own, lambda root: source, len(FRAMES), Layout(), preparer, capture=True)


@torch.no_grad()
def token_by_token(model: Rnnt) -> list[list[int]]:
    """The tokens of each utterance, by its number; the prediction network runs over all tokens again and again."""
    widths = [SHAPE[f"{part}_width"] for part in ("encoder", "prediction", "joint")]
    plain = PlainRnnt(FEATURES, *widths, SHAPE["classes"])
    plain.double().load_state_dict({n.removeprefix("joint."): w for n, w in model.state_dict().items()})
    found: dict[int, list[int]] = {}
    for number, frames in zip(NUMBERS, FRAMES, strict=True):
        features_TF, tokens, here, frame = features_of(number, frames), [], 0, 0
        while frame < -(-frames // 2) and len(tokens) < SHAPE["max_symbols"]:
            classes_V = plain.log_probabilities(features_TF, tokens)[frame, -1]
            best = int(classes_V.argmax())
            if best == SHAPE["classes"] - 1:
                frame, here = frame + 1, 0
                continue
            tokens.append(best)
            here += 1
            if here == SHAPE["max_frame_symbols"]:
                frame, here = frame + 1, 0
        found[number] = tokens
    return [found[number] for number in range(len(FRAMES))]


def tokens_of(predictions: Predictions | None) -> list[list[int]]:
    """By the utterances' numbers."""
    assert predictions is not None
    values = predictions.values
    assert len(values["utterance"]) == len(FRAMES)
    parts = np.split(values["tokens"], np.cumsum(values["token_lengths"])[:-1])
    found = {int(number): part.tolist() for number, part in zip(values["utterance"], parts, strict=True)}
    return [found[number] for number in range(len(FRAMES))]


@pytest.mark.parametrize("seed", [1, 3, 6])
def test_every_utterance_is_decoded_as_one_token_after_another(seed):
    model = network(seed)
    evaluation = evaluation_of(model, Utterances())
    evaluation.warm_up()
    evaluation.open_data(Path())
    expected = token_by_token(model)
    assert sum(map(len, expected)) > 0, "something is said"
    assert tokens_of(evaluation.predict(Weights(dict(model.named_parameters())))) == expected


def test_weights_that_are_given_are_evaluated_and_the_networks_own_stay():
    model, averaged = network(1), network(6)
    model.train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    source = Utterances()
    evaluation = evaluation_of(model, source)
    evaluation.open_data(Path())
    own, given = Weights(dict(model.named_parameters())), Weights(dict(averaged.named_parameters()))
    found = [tokens_of(evaluation.predict(weights)) for weights in (given, own, given)]
    assert found[0] == found[2] == token_by_token(averaged)
    assert found[1] == token_by_token(model) != found[0]
    assert model.training
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert source.read == 1
    evaluation.close()
    assert source.closed


def test_a_set_of_another_size_is_refused(tmp_path):
    model = network(1)
    evaluation = evaluation_of(model, Utterances())
    evaluation._eval_samples = 9
    with pytest.raises(DataError, match="has 7 utterances to evaluate, where there must be 9"):
        evaluation.open_data(tmp_path)


class Said:
    """A prepared set, the scorer of it, and predictions of given texts."""

    def __init__(self, root: Path) -> None:
        prepared = open_prepared(root)
        self.tokenizer, self.transcripts = prepared.tokenizer(), prepared.split("eval").transcripts()
        self.scorer: WordErrorRate = pickle.loads(pickle.dumps(WordErrorRate(prepared.vocabulary)))
        self.scorer.warm_up()
        self.scorer.open_data(root)

    def predicted(self, texts: Mapping[int, str]) -> Predictions:
        """Each utterance's number to what was recognised, in the order of the mapping."""
        pieces = self.tokenizer.encode(list(texts.values()))
        lengths = np.array([len(found) for found in pieces], np.int32)
        tokens = np.array([piece for found in pieces for piece in found], np.int32)
        return Predictions({"utterance": np.array(list(texts), np.int32), "token_lengths": lengths, "tokens": tokens})


@pytest.fixture(scope="module")
def said(data_of) -> Said:
    return Said(data_of("rnnt"))


def test_what_was_said_scores_zero_in_any_order(said):
    shuffled = dict(reversed(list(enumerate(said.transcripts))))
    scored = said.scorer.score(said.predicted(shuffled))
    assert scored == {"word_error_rate": 0.0, "eval_samples": len(said.transcripts)}


def test_wrong_words_count_against_all_words_of_the_set(said):
    texts = dict(enumerate(said.transcripts))
    words = sum(len(text.split()) for text in texts.values())
    texts[1] = texts[1] + " " + texts[0].split()[0]
    texts[2] = ""
    lost = len(said.transcripts[2].split())
    assert said.scorer.score(said.predicted(texts))["word_error_rate"] == (1 + lost) / words


def test_a_set_that_was_not_recognised_wholly_or_twice_is_refused(said):
    texts = dict(enumerate(said.transcripts))
    fewer = {number: text for number, text in texts.items() if number != 3}
    with pytest.raises(RuntimeError, match=f"{len(fewer)} of {len(texts)} utterances were evaluated"):
        said.scorer.score(said.predicted(fewer))
    twice = said.predicted(texts)
    twice.values["utterance"][0] = twice.values["utterance"][1]
    with pytest.raises(RuntimeError, match=f"{len(fewer)} of {len(texts)} utterances were evaluated"):
        said.scorer.score(twice)


def test_another_vocabulary_is_refused(data_of):
    with pytest.raises(DataError, match="1023"):
        WordErrorRate(1023).open_data(data_of("rnnt"))
