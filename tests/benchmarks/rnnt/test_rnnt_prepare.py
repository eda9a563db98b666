"""The whole preparation: what is written, interruptions, damage, and every kind of bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import soundfile
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from benchmarks.rnnt import prepare as prepare_module
from benchmarks.rnnt.prepare import COMMANDS, prepare
from benchmarks.rnnt.prepared import open_prepared
from benchmarks.rnnt.raw import open_raw
from common.data.manifest import digest
from common.errors import ConfigError, DataError

VOCABULARY = 24
TEXTS = {
    "train-clean-100/19/198": ["THE RIVER RUNS", "IT'S A RIVER"],
    "train-clean-100/103/1240": ["A MILL STANDS BY THE RIVER"],
    "train-clean-360/14/208": ["THE MILL RUNS", "THE MILLER STANDS STILL"],
    "train-other-500/20/205": ["THAT IS ALL", "A RIVER", "THE MILL"],
    "dev-clean/84/121": ["THE MILLER RUNS", "ALL STANDS STILL"],
}


def samples_of(name: str) -> np.ndarray:
    """Samples of the utterance ``name``, (N,) int16."""
    random = np.random.default_rng([ord(letter) for letter in name])
    return random.integers(-20_000, 20_000, int(random.integers(1_000, 9_000))).astype(np.int16)


def write_flac(path: Path, samples: np.ndarray, rate: int = 16_000) -> None:
    """Write ``samples``, (N,) or (N, channels)."""
    soundfile.write(path, samples, rate, format="FLAC", subtype="PCM_16")


def write(raw_dir: Path, texts: Mapping[str, list[str]] = TEXTS, synthetic: bool = True) -> Path:
    """Write chapters of ``texts`` in LibriSpeech's layout below ``raw_dir``."""
    for chapter_folder, lines in texts.items():
        folder = raw_dir / "LibriSpeech" / chapter_folder
        folder.mkdir(parents=True)
        speaker, chapter = folder.parts[-2:]
        transcripts = []
        for number, text in enumerate(lines):
            name = f"{speaker}-{chapter}-{number:04d}"
            write_flac(folder / f"{name}.flac", samples_of(name))
            transcripts.append(f"{name} {text}\n")
        (folder / f"{speaker}-{chapter}.trans.txt").write_text("".join(transcripts))
    if synthetic:
        (raw_dir / "SYNTHETIC").write_text(json.dumps({"vocabulary": VOCABULARY}))
    return raw_dir


CHAPTER = Path("LibriSpeech/train-clean-100/19/198")
NAMES = ["103-1240-0000", "19-198-0000", "19-198-0001", "14-208-0000", "14-208-0001"]
NAMES += ["20-205-0000", "20-205-0001", "20-205-0002"]
"""Names of the training utterances, sorted by subset and then by the speaker's name."""


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("raw") / "raw")


@pytest.fixture(scope="module")
def data_dir(raw_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data") / "data"
    prepare(raw_dir, data)
    return data


@pytest.fixture
def copied(raw_dir: Path, tmp_path: Path) -> Path:
    """A copy of the raw folder that a test may damage."""
    return Path(shutil.copytree(raw_dir, tmp_path / "raw"))


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "SMALLEST_SHARD_BYTES", 20_000)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but those that say when."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", "prepare.lock")
    }


def test_audio_files_hold_all_samples_in_order(raw_dir, small_shards, tmp_path):
    prepare(raw_dir, tmp_path / "data")
    split = open_prepared(tmp_path / "data").split("train")

    stream = np.concatenate([np.fromfile(path, "<i2") for path in split.shards])
    assert len(split.shards) > 2
    assert split.names() == NAMES
    np.testing.assert_array_equal(stream, np.concatenate([samples_of(name) for name in NAMES]))
    audio = split.audio()
    for utterance, name in enumerate(NAMES):
        first, count = int(split.offsets[utterance]), int(split.samples[utterance])
        np.testing.assert_array_equal(stream[first : first + count], samples_of(name))
        np.testing.assert_array_equal(audio[utterance], samples_of(name))
        shard = np.searchsorted(split.shard_bounds, first, "right") - 1
        assert first + count <= split.shard_bounds[shard + 1], "an utterance spans two files"


def test_tokens_decode_to_the_transcripts_with_the_prepared_tokenizer(data_dir):
    prepared = open_prepared(data_dir)
    known = SentencePieceProcessor(model_file=str(data_dir / "tokenizer.model"))
    train, held_out = prepared.split("train"), prepared.split("eval")

    assert prepared.vocabulary == known.vocab_size() == VOCABULARY
    decoded = [known.decode(train.tokens_of(utterance).tolist()) for utterance in range(len(train))]
    assert decoded[:3] == ["a mill stands by the river", "the river runs", "it's a river"]
    assert held_out.transcripts() == ["the miller runs", "all stands still"]
    assert [known.decode(held_out.tokens_of(utterance).tolist()) for utterance in (0, 1)] == held_out.transcripts()


def test_the_tokenizer_has_the_benchmarks_options_and_only_training_letters(data_dir):
    known = SentencePieceProcessor(model_file=str(data_dir / "tokenizer.model"))

    assert (known.unk_id(), known.bos_id(), known.eos_id(), known.pad_id()) == (0, -1, -1, -1)
    letters = {letter for piece in map(known.id_to_piece, range(1, VOCABULARY)) for letter in piece}
    train = " ".join(line for chapter, lines in TEXTS.items() if "dev" not in chapter for line in lines)
    assert letters == set(train.lower().replace(" ", "▁"))


def test_the_tokenizer_equals_the_one_that_the_reference_trains(data_dir, tmp_path):
    text = tmp_path / "transcripts.txt"
    train = [line for chapter, lines in sorted(TEXTS.items()) if "dev" not in chapter for line in lines]
    text.write_text("".join(f"{line.lower()}\n" for line in train))
    SentencePieceTrainer.train(
        f"--input={text} --model_prefix={tmp_path / 'reference'} --model_type=unigram --vocab_size={VOCABULARY} "
        "--character_coverage=1.0 --bos_id=-1 --eos_id=-1 --minloglevel=2"
    )
    reference = SentencePieceProcessor(model_file=str(tmp_path / "reference.model"))
    ours = SentencePieceProcessor(model_file=str(data_dir / "tokenizer.model"))

    def scores(model: SentencePieceProcessor) -> list[tuple[str, float]]:
        return [(model.id_to_piece(piece), model.get_score(piece)) for piece in range(model.vocab_size())]

    assert scores(ours) == scores(reference)


def test_synthetic_data_are_recognised_from_either_folder(raw_dir):
    assert open_raw(raw_dir / "LibriSpeech").synthetic == open_raw(raw_dir).synthetic == {"vocabulary": VOCABULARY}


def test_the_manifest_counts_utterances_samples_and_pieces(data_dir):
    counts = open_prepared(data_dir).manifest.counts

    samples = [len(samples_of(name)) for name in NAMES]
    assert (counts["train_samples"], counts["eval_samples"], counts["vocabulary"]) == (8, 2, VOCABULARY)
    assert (counts["train_audio_samples"], counts["train_longest_samples"]) == (sum(samples), max(samples))
    assert open_prepared(data_dir).synthetic


def test_other_settings_are_refused(raw_dir, data_dir):
    with pytest.raises(DataError, match=r"was prepared with .*not with"):
        prepare(raw_dir, data_dir, vocabulary=VOCABULARY - 1)


def test_several_processes_write_the_same_files(raw_dir, small_shards, forked_pools, tmp_path):
    prepare(raw_dir, tmp_path / "one")
    prepare(raw_dir, tmp_path / "three", workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_fewer_subsets_are_custom_data(tmp_path):
    raw = write(tmp_path / "raw", synthetic=False)
    made = prepare(raw, tmp_path / "data", 12, train_subsets=["train-other-500"])
    assert (made.synthetic, made.custom) == (False, "train_samples is 3, published is 281241")
    assert open_prepared(tmp_path / "data").split("train").names() == NAMES[5:]
    with pytest.raises(ConfigError, match="--train-subsets dev-clean: some of train-clean-100"):
        prepare(raw, tmp_path / "data", train_subsets=["dev-clean"])
    shutil.rmtree(raw / "LibriSpeech" / "train-clean-360")
    with pytest.raises(DataError, match="train-clean-360 is missing; 'mlperf-suite download benchmark=rnnt'"):
        prepare(raw, tmp_path / "other")


def test_a_given_tokenizer_is_copied_and_checked(raw_dir, data_dir, tmp_path):
    model = tmp_path / "given.model"
    shutil.copyfile(data_dir / "tokenizer.model", model)
    prepare(raw_dir, tmp_path / "data", tokenizer=model)
    assert digest(tmp_path / "data" / "tokenizer.model", "sha256") == digest(model, "sha256")
    with pytest.raises(DataError, match=rf"given.model has {VOCABULARY} pieces, expected 1023"):
        prepare(raw_dir, tmp_path / "other", 1023, model)
    model.write_bytes(b"no model")
    with pytest.raises(DataError, match=r"given\.model is no SentencePiece model"):
        prepare(raw_dir, tmp_path / "other", tokenizer=model)


def test_a_tokenizer_without_some_training_letters_is_refused(raw_dir, tmp_path):
    strange = write(tmp_path / "strange", {chapter: ["XYZ QUAZ"] for chapter in TEXTS})
    prepare(strange, tmp_path / "first", 9)
    with pytest.raises(DataError, match=r"103-1240-0000\.flac: the tokenizer, trained on other transcripts"):
        prepare(raw_dir, tmp_path / "data", 9, tmp_path / "first" / "tokenizer.model")


def test_a_vocabulary_that_differs_from_the_model_is_refused(data_dir):
    prepared = open_prepared(data_dir)
    prepared.require_vocabulary(VOCABULARY)
    with pytest.raises(DataError, match=rf"tokenizer of {VOCABULARY} pieces, but the model has 1023.*--vocabulary"):
        prepared.require_vocabulary(1023)


def test_a_vocabulary_larger_than_the_transcripts_allow_is_refused(raw_dir, tmp_path):
    with pytest.raises(DataError, match="no tokenizer of 1023 pieces can be trained on these transcripts: Vocabulary"):
        prepare(raw_dir, tmp_path / "data", 1023)


def test_opening_finds_a_missing_byte(raw_dir, data_dir, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(data_dir, data)
    path = data / "eval" / "audio_00000.pcm"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"audio_00000.pcm has \d+ bytes where"):
        open_prepared(data)


def test_columns_that_contradict_each_other_are_refused(data_dir, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(data_dir, data)
    column = np.load(data / "train" / "samples.npy")
    column[0] += 1
    np.save(data / "train" / "samples.npy", column)
    with pytest.raises(DataError, match=r"add up to \d+ samples of audio, expected"):
        open_prepared(data).split("train")


TRANSCRIPTS, FLAC = "19-198.trans.txt", "19-198-0001.flac"


def replaced(old: str, new: str) -> Callable[[Path], None]:
    """Return a function that replaces text in the transcripts of a chapter."""
    return lambda chapter: (chapter / TRANSCRIPTS).write_text((chapter / TRANSCRIPTS).read_text().replace(old, new))


def cut(end: int) -> Callable[[Path], None]:
    """Return a function that keeps the bytes of a FLAC file up to ``end``."""
    return lambda chapter: (chapter / FLAC).write_bytes((chapter / FLAC).read_bytes()[:end])


def other_md5(chapter: Path) -> None:
    """Change a byte of the MD5 in the file's header, so that it differs from that of the samples."""
    content = bytearray((chapter / FLAC).read_bytes())
    content[30] ^= 255
    (chapter / FLAC).write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing file": (
        lambda chapter: (chapter / FLAC).unlink(),
        rf"line 2: the transcript of .*{FLAC}, which is missing",
    ),
    "missing line": (replaced("19-198-0001 IT'S A RIVER\n", ""), rf"{FLAC} has no transcript in .*{TRANSCRIPTS}"),
    "no transcripts": (
        lambda chapter: (chapter / TRANSCRIPTS).unlink(),
        rf"{TRANSCRIPTS} is missing: the transcripts of the chapter's 2 files",
    ),
    "second line": (replaced("RIVER\n", "RIVER\n19-198-0000 AGAIN\n"), "line 3: a second transcript of 19-198-0000"),
    "other letter": (replaced("RUNS", "RÜNS"), "line 1: 'ü' is outside the alphabet"),
    "empty transcript": (replaced(" THE RIVER RUNS", ""), "line 1: an empty transcript"),
    "truncated": (cut(-1000), rf"{FLAC} is (truncated|no FLAC file, or a damaged one)"),
    "truncated header": (cut(30), f"{FLAC} is no FLAC file, or a damaged one"),
    "other MD5": (other_md5, f"{FLAC} is damaged: the MD5 of its samples"),
    "no FLAC": (lambda chapter: (chapter / FLAC).write_bytes(b"RIFF" * 100), f"{FLAC} is no FLAC file"),
    "other rate": (
        lambda chapter: write_flac(chapter / FLAC, np.ones(8000, np.int16), 8000),
        f"{FLAC} has a sample rate of 8000 Hz, expected 16000",
    ),
    "two channels": (
        lambda chapter: write_flac(chapter / FLAC, np.ones((8000, 2), np.int16)),
        f"{FLAC} has 2 channels, expected one",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_bad_input_is_one_clear_error(damage, message, copied, tmp_path):
    damage(copied / CHAPTER)
    with pytest.raises(DataError, match=message):
        prepare(copied, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_an_invalid_vocabulary_in_the_marker_is_refused(copied, tmp_path):
    (copied / "SYNTHETIC").write_text(json.dumps({"vocabulary": "many"}))
    with pytest.raises(DataError, match="has a missing or invalid vocabulary"):
        prepare(copied, tmp_path / "data")


def test_the_commands_print_hours_and_pieces(raw_dir, tmp_path, capsys):
    folders = ["--raw-dir", str(raw_dir), "--data-dir", str(tmp_path / "data")]
    assert COMMANDS.run("prepare", [*folders, "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "synthetic, train_samples 8" in printed
    assert "an utterance, the longest 0.48 s" in printed
    assert COMMANDS.run("verify", folders[2:]) == 0
