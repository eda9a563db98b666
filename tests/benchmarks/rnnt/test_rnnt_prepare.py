"""The whole preparation: what is written, interruptions, damage, and every kind of bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import raw_speech
from raw_speech import VOCABULARY, samples_of, write_flac
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from benchmarks.rnnt.preparation import flac, pipeline
from benchmarks.rnnt.prepare import COMMANDS, prepare, verify
from benchmarks.rnnt.prepared import open_prepared
from benchmarks.rnnt.raw import open_raw
from common.data.manifest import digest
from common.errors import ConfigError, DataError

CHAPTER = Path("LibriSpeech/train-clean-100/19/198")
NAMES = ["103-1240-0000", "19-198-0000", "19-198-0001", "14-208-0000", "14-208-0001"]
NAMES += ["20-205-0000", "20-205-0001", "20-205-0002"]
"""Of training, subset by subset, by the names of speakers."""


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raw_speech.write(tmp_path_factory.mktemp("raw") / "raw")


@pytest.fixture(scope="module")
def data_dir(raw_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data") / "data"
    prepare(raw_dir, data)
    return data


@pytest.fixture
def copied(raw_dir: Path, tmp_path: Path) -> Path:
    """A raw folder to be damaged."""
    return Path(shutil.copytree(raw_dir, tmp_path / "raw"))


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SMALLEST_SHARD_BYTES", 20_000)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but those that say when."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", "prepare.lock")
    }


def test_the_stream_is_every_files_samples_one_after_the_other(raw_dir, small_shards, tmp_path):
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
        assert first + count <= split.shard_bounds[shard + 1], "an utterance lies in two files"


def test_transcripts_are_pieces_of_the_tokenizer_that_lies_beside_them(data_dir):
    prepared = open_prepared(data_dir)
    known = SentencePieceProcessor(model_file=str(data_dir / "tokenizer.model"))
    train, held_out = prepared.split("train"), prepared.split("eval")

    assert prepared.vocabulary == known.vocab_size() == VOCABULARY
    said = [known.decode(train.tokens_of(utterance).tolist()) for utterance in range(len(train))]
    assert said[:3] == ["a mill stands by the river", "the river runs", "it's a river"]
    assert held_out.transcripts() == ["the miller runs", "all stands still"]
    assert [known.decode(held_out.tokens_of(utterance).tolist()) for utterance in (0, 1)] == held_out.transcripts()


def test_the_tokenizer_has_the_benchmarks_options_and_is_made_of_training_alone(data_dir):
    known = SentencePieceProcessor(model_file=str(data_dir / "tokenizer.model"))

    assert (known.unk_id(), known.bos_id(), known.eos_id(), known.pad_id()) == (0, -1, -1, -1)
    letters = {letter for piece in map(known.id_to_piece, range(1, VOCABULARY)) for letter in piece}
    said = " ".join(line for place, lines in raw_speech.TEXTS.items() if "dev" not in place for line in lines)
    assert letters == set(said.lower().replace(" ", "▁"))


def test_the_tokenizer_is_what_the_reference_trains_of_a_file(data_dir, tmp_path):
    text = tmp_path / "transcripts.txt"
    said = [line for place, lines in sorted(raw_speech.TEXTS.items()) if "dev" not in place for line in lines]
    text.write_text("".join(f"{line.lower()}\n" for line in said))
    SentencePieceTrainer.train(
        f"--input={text} --model_prefix={tmp_path / 'reference'} --model_type=unigram --vocab_size={VOCABULARY} "
        "--character_coverage=1.0 --bos_id=-1 --eos_id=-1 --minloglevel=2"
    )
    reference = SentencePieceProcessor(model_file=str(tmp_path / "reference.model"))
    ours = SentencePieceProcessor(model_file=str(data_dir / "tokenizer.model"))

    def scores(model: SentencePieceProcessor) -> list[tuple[str, float]]:
        return [(model.id_to_piece(place), model.get_score(place)) for place in range(model.vocab_size())]

    assert scores(ours) == scores(reference)


def test_a_stand_in_is_one_however_its_folder_is_named(raw_dir):
    assert open_raw(raw_dir / "LibriSpeech").stand_in == open_raw(raw_dir).stand_in == {"vocabulary": VOCABULARY}


def test_the_manifest_counts_what_is_there(data_dir):
    counts = verify(data_dir).counts

    samples = [len(samples_of(name)) for name in NAMES]
    assert (counts["train_samples"], counts["eval_samples"], counts["vocabulary"]) == (8, 2, VOCABULARY)
    assert (counts["train_audio_samples"], counts["train_longest_samples"]) == (sum(samples), max(samples))
    assert open_prepared(data_dir).stand_in


def test_a_second_preparation_has_nothing_to_do_and_another_one_is_refused(raw_dir, data_dir, copied):
    before = contents(data_dir)
    prepare(raw_dir, data_dir)
    assert contents(data_dir) == before
    with pytest.raises(DataError, match=r"was prepared with .*not with"):
        prepare(raw_dir, data_dir, vocabulary=VOCABULARY - 1)
    path = copied / CHAPTER / "19-198.trans.txt"
    path.write_text(path.read_text().replace("RUNS", "RISES"))
    with pytest.raises(DataError, match="from other raw data"):
        prepare(copied, data_dir)


def test_an_interrupted_preparation_continues_to_the_same_bytes(raw_dir, small_shards, tmp_path, monkeypatch):
    prepare(raw_dir, tmp_path / "whole")
    read, decoded = flac.read, []

    def fails(path: Path) -> np.ndarray:
        if path.stem == "14-208-0001":
            raise DataError("cut off")
        decoded.append(path.stem)
        return read(path)

    monkeypatch.setattr(flac, "read", fails)
    with pytest.raises(DataError, match="cut off"):
        prepare(raw_dir, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()
    first = list(decoded)
    monkeypatch.setattr(flac, "read", lambda path: (decoded.append(path.stem), read(path))[1])
    prepare(raw_dir, tmp_path / "data")
    again = decoded[len(first) :]

    assert contents(tmp_path / "data") == contents(tmp_path / "whole")
    assert "103-1240-0000" in first
    assert "103-1240-0000" not in again


def test_several_processes_write_the_same_bytes(raw_dir, small_shards, forked_pools, tmp_path):
    prepare(raw_dir, tmp_path / "one")
    prepare(raw_dir, tmp_path / "three", workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_fewer_subsets_are_custom_data(tmp_path):
    raw = raw_speech.write(tmp_path / "raw", stand_in=False)
    made = prepare(raw, tmp_path / "data", 12, train_subsets=["train-other-500"])
    assert (made.stand_in, made.custom) == (False, "train_samples is 3, published is 281241")
    assert open_prepared(tmp_path / "data").split("train").names() == NAMES[5:]
    with pytest.raises(ConfigError, match="--train-subsets dev-clean: some of train-clean-100"):
        prepare(raw, tmp_path / "data", train_subsets=["dev-clean"])
    shutil.rmtree(raw / "LibriSpeech" / "train-clean-360")
    with pytest.raises(DataError, match="train-clean-360 is missing; 'mlperf-suite download benchmark=rnnt'"):
        prepare(raw, tmp_path / "other")


def test_another_tokenizer_takes_the_place_of_a_trained_one(raw_dir, data_dir, tmp_path):
    model = tmp_path / "given.model"
    shutil.copyfile(data_dir / "tokenizer.model", model)
    prepare(raw_dir, tmp_path / "data", tokenizer=model)
    assert digest(tmp_path / "data" / "tokenizer.model", "sha256") == digest(model, "sha256")
    with pytest.raises(DataError, match=rf"given.model has {VOCABULARY} pieces, expected 1023"):
        prepare(raw_dir, tmp_path / "other", 1023, model)
    model.write_bytes(b"no model")
    with pytest.raises(DataError, match=r"given\.model is no SentencePiece model"):
        prepare(raw_dir, tmp_path / "other", tokenizer=model)


def test_a_tokenizer_that_lacks_letters_of_training_is_refused(raw_dir, tmp_path):
    strange = raw_speech.write(tmp_path / "strange", {place: ["XYZ QUAZ"] for place in raw_speech.TEXTS})
    prepare(strange, tmp_path / "first", 9)
    with pytest.raises(DataError, match=r"103-1240-0000\.flac: the tokenizer, which was made of other transcripts"):
        prepare(raw_dir, tmp_path / "data", 9, tmp_path / "first" / "tokenizer.model")


def test_a_model_of_another_size_is_refused(data_dir):
    prepared = open_prepared(data_dir)
    prepared.require_vocabulary(VOCABULARY)
    with pytest.raises(DataError, match=rf"tokenizer of {VOCABULARY} pieces where the model has 1023.*--vocabulary"):
        prepared.require_vocabulary(1023)


def test_more_pieces_than_the_transcripts_make_are_refused(raw_dir, tmp_path):
    with pytest.raises(DataError, match="no tokenizer of 1023 pieces can be made of these transcripts: Vocabulary"):
        prepare(raw_dir, tmp_path / "data", 1023)


def test_verify_finds_a_changed_byte(raw_dir, data_dir, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(data_dir, data)
    path = data / "eval" / "audio_00000.pcm"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"audio_00000.pcm: SHA-256"):
        verify(data)
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"audio_00000.pcm has \d+ bytes where"):
        open_prepared(data)


def test_columns_that_contradict_each_other_are_refused(data_dir, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(data_dir, data)
    column = np.load(data / "train" / "samples.npy")
    column[0] += 1
    np.save(data / "train" / "samples.npy", column)
    with pytest.raises(DataError, match="samples of audio by their lengths where"):
        open_prepared(data).split("train")


def missing_file(chapter: Path) -> None:
    (chapter / "19-198-0001.flac").unlink()


def missing_line(chapter: Path) -> None:
    path = chapter / "19-198.trans.txt"
    path.write_text(path.read_text().splitlines()[0])


def missing_transcripts(chapter: Path) -> None:
    (chapter / "19-198.trans.txt").unlink()


def second_line(chapter: Path) -> None:
    path = chapter / "19-198.trans.txt"
    path.write_text(path.read_text() + "19-198-0000 AGAIN\n")


def strange_letter(chapter: Path) -> None:
    path = chapter / "19-198.trans.txt"
    path.write_text(path.read_text().replace("RUNS", "RÜNS"))


def nothing_said(chapter: Path) -> None:
    path = chapter / "19-198.trans.txt"
    path.write_text(path.read_text().replace(" THE RIVER RUNS", ""))


def truncated(chapter: Path) -> None:
    path = chapter / "19-198-0001.flac"
    path.write_bytes(path.read_bytes()[:-1000])


def truncated_to_its_head(chapter: Path) -> None:
    path = chapter / "19-198-0001.flac"
    path.write_bytes(path.read_bytes()[:30])


def damaged(chapter: Path) -> None:
    """A file whose frames are sound, but not those that it promises."""
    path = chapter / "19-198-0001.flac"
    content = bytearray(path.read_bytes())
    content[30] ^= 255  # of the MD5
    path.write_bytes(content)


def no_flac(chapter: Path) -> None:
    (chapter / "19-198-0001.flac").write_bytes(b"RIFF" * 100)


def other_rate(chapter: Path) -> None:
    write_flac(chapter / "19-198-0001.flac", np.ones(8000, np.int16), 8000)


def two_channels(chapter: Path) -> None:
    write_flac(chapter / "19-198-0001.flac", np.ones((8000, 2), np.int16))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (missing_file, r"trans.txt, line 2: the transcript of .*19-198-0001.flac, which is missing"),
        (missing_line, r"19-198-0001.flac has no transcript in .*19-198.trans.txt"),
        (missing_transcripts, r"19-198.trans.txt is missing: what is said in the chapter's 2 files"),
        (second_line, r"trans.txt, line 3: a second transcript of 19-198-0000"),
        (strange_letter, r"trans.txt, line 1: 'ü' is outside the alphabet"),
        (nothing_said, r"trans.txt, line 1: an empty transcript"),
        (truncated, r"19-198-0001.flac is (truncated|no FLAC file, or a damaged one)"),
        (truncated_to_its_head, r"19-198-0001.flac is no FLAC file, or a damaged one"),
        (damaged, r"19-198-0001.flac is damaged: its samples have another MD5"),
        (no_flac, r"19-198-0001.flac is no FLAC file, or a damaged one"),
        (other_rate, r"19-198-0001.flac has a sample rate of 8000 Hz, expected 16000"),
        (two_channels, r"19-198-0001.flac has 2 channels, expected one"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_bad_input_is_one_clear_error(damage, says, copied, tmp_path):
    damage(copied / CHAPTER)
    with pytest.raises(DataError, match=says):
        prepare(copied, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_stand_in_without_its_vocabulary_is_refused(copied, tmp_path):
    (copied / "STAND_IN").write_text(json.dumps({"vocabulary": "many"}))
    with pytest.raises(DataError, match="has a missing or invalid vocabulary"):
        prepare(copied, tmp_path / "data")


def test_the_commands_say_hours_and_pieces(raw_dir, tmp_path, capsys):
    folders = ["--raw-dir", str(raw_dir), "--data-dir", str(tmp_path / "data")]
    assert COMMANDS.run("prepare", [*folders, "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "stand-in, train_samples 8" in said
    assert "an utterance, the longest 0.48 s" in said
    assert COMMANDS.run("verify", folders[2:]) == 0
