"""What measures an evaluation: a made-up set is evaluated as a whole, and says about as much as people do."""

from __future__ import annotations

import pytest

from benchmarks.rnnt.evaluate_bench import TOKENS_A_SECOND, Measured, described, main, measure
from benchmarks.rnnt.model import Rnnt
from benchmarks.rnnt.workload import SpeechRecognition
from common.config import loading
from common.config.composition import compose
from common.config.schema import RunConfig
from common.distributed.layout import Layout

SMALL = ["benchmark=rnnt", "scale=test", "device=cpu", "benchmark.eval_samples=24", "benchmark.facts.classes=65"]


@pytest.fixture(scope="module")
def run() -> RunConfig:
    return loading.load(compose(SMALL), lambda _: SpeechRecognition)[0]


@pytest.fixture(scope="module")
def measured(run: RunConfig) -> Measured:
    return measure(SpeechRecognition(run, Layout(run.layout, seed=1)), times=1)


def test_about_as_many_tokens_are_found_as_people_say(measured):
    asked = TOKENS_A_SECOND * measured.audio_seconds
    assert 0.5 * asked < measured.tokens < 1.5 * asked


def test_the_utterances_that_are_decoded_alone_have_the_same_tokens(measured):
    assert (measured.alike, measured.compared) == (12, 12)


def test_times_are_told(run, measured):
    assert measured.predict > 0
    assert measured.faster > 0
    assert f"24 utterances of {measured.audio_seconds / 3600:.2f} h" in described(run, measured)


def test_an_encoder_that_gives_no_numbers_is_not_measured(run, monkeypatch):
    def nothing(model, features_TBF, frames_B):
        encoded_SBJ, joined_B = encode(model, features_TBF, frames_B)
        return encoded_SBJ.fill_(float("nan")), joined_B

    encode = Rnnt.encode
    monkeypatch.setattr(Rnnt, "encode", nothing)
    with pytest.raises(RuntimeError, match="not finite"):
        measure(SpeechRecognition(run, Layout(run.layout, seed=1)), times=1)


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="PyTorch sees no GPU"):
        main([])
