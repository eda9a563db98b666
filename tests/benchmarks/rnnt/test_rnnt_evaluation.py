"""The evaluation against plain ``torch.nn`` layers, one utterance and one token at a time; and its scorer."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.rnnt.config import Facts, ModelConfig, RnntConfig
from benchmarks.rnnt.data import PADDING, FeaturePreparer
from benchmarks.rnnt.data_settings import ReaderConfig
from benchmarks.rnnt.evaluate import CHUNK, Transcription, WordErrorRate, WordErrors
from benchmarks.rnnt.model import Rnnt
from benchmarks.rnnt.prepared import open_prepared
from benchmarks.rnnt.synthetic_evaluation import TOKENS_A_SECOND, SyntheticTranscription, synthetic_lengths
from benchmarks.rnnt.workload import SpeechRecognition
from common.config import loading
from common.config.composition import compose
from common.contract.evaluation import Predictions, Weights
from common.data.batches import HostBatch
from common.distributed.layout import Layout
from common.errors import DataError
from common.mlperf.fixed import fixed_facts
from tests.benchmarks.rnnt.transducer_oracle import PlainRnnt

FEATURES = 9
FRAMES = [21, 20, 13, 8, 7, 2, 1]
"""Frames of the evaluation set's utterances, the longest first."""
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
    """Evaluation set in batches of three, the longest first; slots without an utterance repeat the shortest."""

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
    """Replacement of :class:`FeaturePreparer` that returns noise instead of features of audio."""

    def tensors(self, tensors: Mapping[str, Tensor], frames: int, training: bool) -> dict[str, Tensor]:
        assert not training
        features_TBF = torch.zeros(frames, 3, FEATURES, dtype=torch.float64)
        rows = tensors["rows"].tolist()
        for slot, row in enumerate(rows):
            features_TBF[: FRAMES[row], slot] = features_of(NUMBERS[row], FRAMES[row])
        lengths = torch.tensor([FRAMES[row] for row in rows], dtype=torch.int32)
        return {"features": features_TBF, "feature_lengths": lengths, "utterance": tensors["utterance"]}


def network(seed: int) -> Rnnt:
    """Return a network whose weights are so large that its tokens depend on the features."""
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
    """Return the tokens of each utterance; the prediction network runs over all tokens for each decision."""
    widths = [SHAPE[f"{part}_width"] for part in ("encoder", "prediction", "joint")]
    plain = PlainRnnt(FEATURES, *widths, SHAPE["classes"])
    plain.double().load_state_dict({n.removeprefix("joint."): w for n, w in model.state_dict().items()})
    found: dict[int, list[int]] = {}
    for number, frames in zip(NUMBERS, FRAMES, strict=True):
        features_TF, tokens, here, frame = features_of(number, frames), [], 0, 0
        while frame < -(-frames // 2) and len(tokens) < SHAPE["max_symbols"]:
            classes_V = plain.logits(features_TF, tokens)[frame, -1]
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
    """Return the tokens of each utterance, in the order of their numbers."""
    assert predictions is not None
    values = predictions.values
    assert len(values["utterance"]) == len(FRAMES)
    parts = np.split(values["tokens"], np.cumsum(values["token_lengths"])[:-1])
    found = {int(number): part.tolist() for number, part in zip(values["utterance"], parts, strict=True)}
    return [found[number] for number in range(len(FRAMES))]


@pytest.mark.parametrize("seed", [1, 3, 6])
def test_predictions_equal_token_by_token_decoding(seed):
    model = network(seed)
    evaluation = evaluation_of(model, Utterances())
    evaluation.warm_up()
    evaluation.open_data(Path())
    expected = token_by_token(model)
    assert sum(map(len, expected)) > 0
    assert tokens_of(evaluation.predict(Weights(dict(model.named_parameters())))) == expected


def test_given_weights_are_evaluated_and_the_networks_own_are_restored():
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


def test_an_evaluation_set_of_another_size_is_refused(tmp_path):
    model = network(1)
    evaluation = evaluation_of(model, Utterances())
    evaluation._eval_samples = 9
    with pytest.raises(DataError, match="has 7 utterances to evaluate, where there must be 9"):
        evaluation.open_data(tmp_path)


class Scored:
    """A prepared evaluation set, its scorer, and predictions for given texts."""

    def __init__(self, root: Path) -> None:
        prepared = open_prepared(root)
        self.tokenizer, self.transcripts = prepared.tokenizer(), prepared.split("eval").transcripts()
        self.scorer: WordErrorRate = pickle.loads(pickle.dumps(WordErrorRate(prepared.vocabulary)))
        self.scorer.warm_up()
        self.scorer.open_data(root)

    def predicted(self, texts: Mapping[int, str]) -> Predictions:
        """Return the prediction of ``texts``: text by number of the utterance, in the order of the mapping."""
        pieces = self.tokenizer.encode(list(texts.values()))
        lengths = np.array([len(found) for found in pieces], np.int32)
        tokens = np.array([piece for found in pieces for piece in found], np.int32)
        return Predictions({"utterance": np.array(list(texts), np.int32), "token_lengths": lengths, "tokens": tokens})


@pytest.fixture(scope="module")
def scored(data_of) -> Scored:
    return Scored(data_of("rnnt"))


def test_correct_transcripts_score_zero_in_any_order(scored):
    shuffled = dict(reversed(list(enumerate(scored.transcripts))))
    assert scored.scorer.score(scored.predicted(shuffled)) == {
        "word_error_rate": 0.0,
        "eval_samples": len(scored.transcripts),
    }


def test_the_score_divides_wrong_words_by_all_words_of_the_set(scored):
    texts = dict(enumerate(scored.transcripts))
    words = sum(len(text.split()) for text in texts.values())
    texts[1] = texts[1] + " " + texts[0].split()[0]
    texts[2] = ""
    lost = len(scored.transcripts[2].split())
    assert scored.scorer.score(scored.predicted(texts))["word_error_rate"] == (1 + lost) / words


def test_missing_and_repeated_utterances_are_refused(scored):
    texts = dict(enumerate(scored.transcripts))
    fewer = {number: text for number, text in texts.items() if number != 3}
    with pytest.raises(RuntimeError, match=f"{len(fewer)} of {len(texts)} utterances were evaluated"):
        scored.scorer.score(scored.predicted(fewer))
    twice = scored.predicted(texts)
    twice.values["utterance"][0] = twice.values["utterance"][1]
    with pytest.raises(RuntimeError, match=f"{len(fewer)} of {len(texts)} utterances were evaluated"):
        scored.scorer.score(twice)


def test_a_scorer_refuses_another_vocabulary(data_of):
    with pytest.raises(DataError, match="1023"):
        WordErrorRate(1023).open_data(data_of("rnnt"))


def table_distance(reference: list[str], hypothesis: list[str]) -> int:
    """Return the edit distance by the algorithm of Wagner and Fischer (1974), cell by cell."""
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, start=1):
        diagonal, row[0] = row[0], i
        for j, heard in enumerate(hypothesis, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != heard))
    return row[-1]


def synthetic_sentences(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Return sentences of 0 to 30 words of a small alphabet, and hypotheses that are similar, unrelated or empty."""
    random.seed(seed)
    references, hypotheses = ["a"], ["b a"]
    while len(references) < count:
        words = random.choices("abcdefg", k=random.randrange(31))
        heard = [w for word in words for w in random.choice(([word],) * 6 + ([], ["x"], [word, "y"]))]
        references.append(" ".join(words))
        hypotheses.append(" ".join(random.choice((heard, heard, heard, random.choices("abc", k=40), []))))
    return references, hypotheses


@pytest.mark.parametrize(
    ("reference", "hypothesis", "edits"),
    [
        ("the cat sat", "the cat sat", 0),
        ("the cat sat", "the bat sat", 1),
        ("the cat sat", "cat sat", 1),
        ("the cat sat", "the cat cat sat", 1),
        ("the cat sat", "", 3),
        ("the cat sat", "a a a a a a", 6),
        ("", "noise where nobody speaks", 4),
        ("", "", 0),
        ("a b c d", "b c d a", 2),
        ("  the   cat ", "the\tcat", 0),
        ("it's", "its", 1),
        ("ab c", "a bc", 2),
        ("no", "well I never said so", 5),
    ],
)
def test_word_errors_of_a_pair_equal_those_counted_by_hand(reference, hypothesis, edits):
    assert WordErrors([reference, "sure"]).edits([hypothesis, "sure"]) == edits


def test_word_errors_of_many_utterances_equal_wagner_and_fischers():
    references, hypotheses = synthetic_sentences(2 * CHUNK + 17, seed=3)
    pairs = zip(references, hypotheses, strict=True)
    expected = sum(table_distance(reference.split(), hypothesis.split()) for reference, hypothesis in pairs)
    errors = WordErrors(references)
    assert errors.edits(hypotheses) == expected
    assert errors.edits(references) == 0, "a second call counts from zero"


def test_another_number_of_hypotheses_is_refused():
    with pytest.raises(ValueError, match="1 hypotheses for 2 references"):
        WordErrors(["a", "b"]).edits(["a"])


def test_references_without_words_are_refused():
    with pytest.raises(ValueError, match="2 references have no words"):
        WordErrors(["", " "])


UTTERANCES = 24


def built_synthetic() -> tuple[SpeechRecognition, SyntheticTranscription]:
    small = [f"benchmark.eval_samples={UTTERANCES}", "benchmark.facts.classes=65"]
    run, _ = loading.load(compose(["benchmark=rnnt", "scale=test", "device=cpu", *small]), lambda _: SpeechRecognition)
    workload = SpeechRecognition(run, Layout(run.layout, seed=1))
    return workload, workload.synthetic_evaluation(workload.layout)


def test_the_synthetic_evaluation_emits_tokens_at_the_rate_of_transcripts():
    workload, evaluation = built_synthetic()
    evaluation.warm_up()
    evaluation.open_data(Path())
    predictions = evaluation.predict(workload.weights())
    evaluation.close()
    assert sorted(predictions.values["utterance"]) == list(range(UTTERANCES))
    seconds = synthetic_lengths(UTTERANCES, workload.own).sum() / workload.own.facts.sample_rate
    assert 0.5 * TOKENS_A_SECOND < len(predictions.values["tokens"]) / seconds < 1.5 * TOKENS_A_SECOND


def test_the_synthetic_evaluation_refuses_a_network_with_nan(monkeypatch):
    def nan_encoding(model, features_TBF, frames_B):
        encoded_SBJ, joined_B = encode(model, features_TBF, frames_B)
        return encoded_SBJ.fill_(float("nan")), joined_B

    encode = Rnnt.encode
    monkeypatch.setattr(Rnnt, "encode", nan_encoding)
    _, evaluation = built_synthetic()
    with pytest.raises(RuntimeError, match="not finite"):
        evaluation.open_data(Path())
