"""Test the synthesised speech: its sound, its texts and its durations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import soundfile

from benchmarks.rnnt import raw
from benchmarks.rnnt.prepare import COMMANDS, prepare
from benchmarks.rnnt.synthesis import Voice, speak
from benchmarks.rnnt.synthetic import SyntheticSpeech, eval_seconds, generate, train_seconds
from common.errors import ConfigError

QUIET = Voice(pitch=100.0, tempo=1.0, tract=1.0, noise=-90.0, silence=(0.2, 0.2))


def test_both_ends_and_spaces_are_silent():
    spoken = speak("aaaa aaaa", QUIET, np.random.default_rng(0)).astype(float)
    loud = np.sqrt(np.convolve(spoken**2, np.ones(160) / 160, "same"))
    times = np.arange(len(spoken)) / 16_000
    speech = len(spoken) / 16_000 - 0.4
    middle = 0.2 + speech / 2
    assert loud[times < 0.19].max() < 0.002 * loud.max()
    assert loud[times > times[-1] - 0.15].max() < 0.002 * loud.max()
    assert loud[(times > middle - 0.2) & (times < middle + 0.2)].min() < 0.05 * loud.max()
    assert loud[(times > 0.3) & (times < 0.4)].min() > 0.05 * loud.max()


def test_tempo_and_seconds_determine_the_duration():
    text = "to be read aloud"
    slow = dataclasses.replace(QUIET, tempo=1.15)
    lengths = [len(speak(text, voice, np.random.default_rng(1))) / 16_000 - 0.4 for voice in (QUIET, slow)]
    assert lengths[0] == pytest.approx(7 * 0.085 + 6 * 0.065 + 3 * 0.055, rel=0.08)  # vowels, consonants, spaces
    assert lengths[1] / lengths[0] == pytest.approx(1.15, rel=0.001)
    assert len(speak(text, QUIET, np.random.default_rng(1), 3.21)) == 51_360


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "raw"
    generate(folder, SyntheticSpeech(train=60, eval=12, words=6, sentence=(1, 3), voices=4))
    return folder


def test_synthetic_data_have_librispeechs_layout(small):
    source = raw.open_raw(small)
    train, held_out = (source.utterances(split) for split in ("train", "eval"))
    assert source.subsets == {"train": ("train-clean-100",), "eval": ("dev-clean",)}
    assert (len(train), len(held_out)) == (60, 12)
    for utterance in (*train, *held_out):
        about = soundfile.info(utterance.path)
        assert (about.samplerate, about.channels, about.subtype, about.format) == (16_000, 1, "PCM_16", "FLAC")
        speaker, chapter, _ = utterance.name.split("-")
        assert Path(utterance.folder).parts[-2:] == (speaker, chapter)
    lines = (Path(train[0].folder) / f"{train[0].name[:-5]}.trans.txt").read_text()
    assert lines == lines.upper()


def test_evaluation_has_new_sentences_and_other_voices(small):
    source = raw.open_raw(small)
    train, held_out = (source.utterances(split) for split in ("train", "eval"))
    assert not {u.transcript for u in train} & {u.transcript for u in held_out}
    assert {word for u in held_out for word in u.transcript.split()} <= {
        word for u in train for word in u.transcript.split()
    }
    assert not {u.name.split("-")[0] for u in train} & {u.name.split("-")[0] for u in held_out}


def test_files_depend_on_the_seed_and_not_on_processes(small, forked_pools, tmp_path):
    request = SyntheticSpeech(train=60, eval=12, words=6, sentence=(1, 3), voices=4)
    generate(tmp_path / "same", request, workers=3)
    generate(tmp_path / "other", dataclasses.replace(request, seed=1))

    def content(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert content(tmp_path / "same") == content(small)
    assert content(tmp_path / "other") != content(small)


def test_durations_have_librispeechs_statistics():
    random = np.random.default_rng(0)
    train, held_out = train_seconds(20_000, random), eval_seconds(20_000, random)
    assert 1.0 <= train.min() <= train.max() <= 17.0
    assert train.mean() == pytest.approx(12.3, abs=0.1)
    assert train.std() == pytest.approx(3.8, abs=0.2)
    assert held_out.mean() == pytest.approx(7.2, abs=0.2)
    assert 1.4 <= held_out.min() <= held_out.max() == 32.7


@pytest.mark.slow
def test_librispeech_sized_data_have_librispeechs_pieces_per_second(tmp_path):
    sizes = ["--kind", "librispeech-sized", "--train", "400", "--eval", "2", "--voices", "2", "--workers", "1"]
    assert COMMANDS.run("generate", ["--raw-dir", str(tmp_path / "raw"), *sizes]) == 0
    made = prepare(tmp_path / "raw", tmp_path / "data").counts
    seconds = made["train_audio_samples"] / 16_000
    assert seconds / 400 == pytest.approx(12.3, abs=0.6)
    assert made["train_tokens"] / seconds == pytest.approx(4.6, rel=0.06)
    assert made["train_longest_tokens"] <= 125
    assert made["vocabulary"] == 1023


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train", "0"], "--train=0: at least 1"),
        (["--words", "1"], "--words=1: at least 2"),
        (["--sentence", "3", "2"], "--sentence 3 2"),
        (["--words", "2", "--sentence", "1", "1"], "too few sentences"),
    ],
)
def test_invalid_options_are_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        COMMANDS.run("generate", ["--raw-dir", str(tmp_path / "raw"), "--workers", "1", *options])
