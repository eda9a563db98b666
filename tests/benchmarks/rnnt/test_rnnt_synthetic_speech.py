"""The synthetic evaluation of RNN-T recognises each utterance once, and finds about as many tokens as people say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rnnt.model import Rnnt
from benchmarks.rnnt.synthetic_speech import TOKENS_A_SECOND, SyntheticTranscription, synthetic_lengths
from benchmarks.rnnt.workload import SpeechRecognition
from common.config import loading
from common.config.composition import compose
from common.distributed.layout import Layout

UTTERANCES = 24


def built() -> tuple[SpeechRecognition, SyntheticTranscription]:
    small = [f"benchmark.eval_samples={UTTERANCES}", "benchmark.facts.classes=65"]
    run, _ = loading.load(compose(["benchmark=rnnt", "scale=test", "device=cpu", *small]), lambda _: SpeechRecognition)
    workload = SpeechRecognition(run, Layout(run.layout, seed=1))
    return workload, workload.synthetic_evaluation(workload.layout)


def test_about_as_many_tokens_are_found_as_people_say() -> None:
    workload, evaluation = built()
    evaluation.warm_up()
    evaluation.open_data(Path())
    predictions = evaluation.predict(workload.weights())
    evaluation.close()
    assert predictions is not None
    assert sorted(predictions.values["utterance"]) == list(range(UTTERANCES))
    seconds = synthetic_lengths(UTTERANCES, workload.own).sum() / workload.own.facts.sample_rate
    assert 0.5 * TOKENS_A_SECOND < len(predictions.values["tokens"]) / seconds < 1.5 * TOKENS_A_SECOND


def test_an_encoder_that_gives_no_numbers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(model, features_TBF, frames_B):
        encoded_SBJ, joined_B = encode(model, features_TBF, frames_B)
        return encoded_SBJ.fill_(float("nan")), joined_B

    encode = Rnnt.encode
    monkeypatch.setattr(Rnnt, "encode", nothing)
    _, evaluation = built()
    with pytest.raises(RuntimeError, match="not finite"):
        evaluation.open_data(Path())
