"""The whole preparation: what is written, interruptions, damage, other people's shards, the command line."""

import json
import re
import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest
import small_text

from benchmarks.bert import raw as raw_module
from benchmarks.bert.prepare import COMMANDS, PrepareOptions, adopt_packed, prepare, verify
from benchmarks.bert.raw import PreparationSizes
from benchmarks.bert.synthetic import SyntheticArticles, generate
from common.data.published import Published
from common.data.synthetic import mark
from common.errors import ConfigError, DataError

SMALL = ["--articles", "60", "--vocabulary", "1000", "--max-sequence-length", "64", "--parts", "2", "--shards", "3"]
SMALL += ["--eval", "30", "--eval-articles", "10"]


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory):
    return small_text.write_raw(tmp_path_factory.mktemp("raw") / "raw")


@pytest.fixture(scope="module")
def articles(tmp_path_factory):
    """Generated articles, whose preparation has every stage."""
    folder = tmp_path_factory.mktemp("articles") / "raw"
    assert COMMANDS.run("generate", ["--raw-dir", str(folder), *SMALL]) == 0
    return folder


@pytest.fixture(scope="module")
def whole_text(raw_dir, tmp_path_factory):
    data = tmp_path_factory.mktemp("whole_text") / "data"
    prepare(raw_dir, data, PrepareOptions(unpacked=True))
    return data


@pytest.fixture(scope="module")
def whole(articles, tmp_path_factory):
    data = tmp_path_factory.mktemp("whole") / "data"
    prepare(articles, data, PrepareOptions(unpacked=True))
    return data


def contents(data):
    return {
        str(path.relative_to(data)): path.read_bytes()
        for folder in ("packed", "varlength", "eval_varlength")
        for path in sorted((data / folder).iterdir())
    }


def sequences_of(path):
    """(ids, segments, positions, labels, next) of every sequence of a packed or an unpacked file, as tuples."""
    found = []
    with h5py.File(path) as file:
        content = {name: file[name][:] for name in file}
    for row in range(len(content["input_ids"])):
        ids, segments, positions, labels = (
            content[name][row] for name in ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")
        )
        following = np.atleast_1d(content["next_sentence_labels"][row])
        lengths = content["packed_input_len"][row] if "packed_input_len" in content else [len(ids)]
        masked = content["packed_masked_lm_len"][row] if "packed_masked_lm_len" in content else [len(labels)]
        token, mask = 0, 0
        for length, count, label in zip(lengths, masked, following, strict=True):
            own = slice(token, token + length)
            found.append(
                (
                    tuple(ids[own]),
                    tuple(segments[own]),
                    tuple(positions[mask : mask + count] - token),
                    tuple(labels[mask : mask + count]),
                    int(label),
                )
            )
            token, mask = token + length, mask + count
        assert (token, mask) == (len(ids), len(labels))
    return found


def test_the_manifest_s_counts_are_those_of_the_files(whole):
    found = json.loads((whole / "manifest.json").read_text())
    assert (found["format"], found["synthetic"]) == ("bert-hdf5/1", True)
    sizes = []
    for shard in range(3):
        with h5py.File(whole / "packed" / f"part_{shard:05d}") as file:
            own = [len(row) for row in file["packed_input_len"][:]]
            assert max(len(row) for row in file["input_ids"][:]) <= 64
        sizes.append(own)
    every = [size for own in sizes for size in own]
    rows = len(every)
    assert [len(own) for own in sizes] == [rows // 3 + (shard < rows % 3) for shard in range(3)]
    assert found["counts"] == {
        "train_samples": sum(every),
        "train_packs": rows,
        **{f"packs_of_{size}": every.count(size) for size in (1, 2, 3)},
        "shards": 3,
        "eval_samples": 30,
        "vocabulary": 1000,
        "max_sequence_length": 64,
    }
    assert "Punkt without parameters" in found["source"]["settings"]


def test_packed_and_unpacked_shards_hold_the_same_sequences(whole):
    packed = [row for shard in range(3) for row in sequences_of(whole / "packed" / f"part_{shard:05d}")]
    single = [
        row for shard in range(3) for row in sequences_of(whole / "varlength" / f"part_{shard:05d}_of_00003.hdf5")
    ]
    assert len(packed) > 500
    assert sorted(packed) == sorted(single)
    assert packed != single


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pools")
def test_workers_change_nothing(articles, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.bert.prepare.TEXT_PER_WORKER", 1)
    prepare(articles, tmp_path / "data", PrepareOptions(unpacked=True), workers=2)
    assert contents(tmp_path / "data") == contents(whole)


def test_articles_of_evaluation_are_not_trained_on(articles, tmp_path):
    prepare(articles, tmp_path / "data", PrepareOptions(keep_intermediate=True))
    folder = tmp_path / "data" / "intermediate" / "text"
    parts = "".join((folder / f"part-{part:05d}-of-00002").read_text() for part in range(2))
    held_out = (folder / "eval.txt").read_text()
    training, evaluation = (re.split(r"\n{2,}", text.strip("\n")) for text in (parts, held_out))
    assert len(training) + len(evaluation) == 60
    assert 0 < len(evaluation) <= 10  # of ten pieces, some are the empty ones at the ends of files
    assert not set(evaluation) & set(training)


def test_the_distributed_layout_is_prepared_without_articles(raw_dir, tmp_path):
    made = prepare(raw_dir, tmp_path / "data")
    assert (made.counts["eval_samples"], made.counts["shards"]) == (20, 3)
    held_out = sequences_of(tmp_path / "data" / "eval_varlength" / "part_eval_10k.hdf5")
    assert len(held_out) == 20


def test_synthetic_data_have_exactly_the_requested_sequences(tmp_path):
    raw_dir = small_text.write_raw(tmp_path / "raw", train_samples=333)
    assert prepare(raw_dir, tmp_path / "data").counts["train_samples"] == 333
    short = small_text.write_raw(tmp_path / "short", train_samples=999_999)
    with pytest.raises(DataError, match="sequences where 999999 are needed to train"):
        prepare(short, tmp_path / "other")


def failing(*arguments):
    raise DataError("x")


KILL = """
import os, pathlib, signal, sys
from benchmarks.bert import prepare as module
from benchmarks.bert.preparation import hdf5
from common.data import stages
raw, data, stage, moment = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4]
def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
keep, seen = stages.Stages.keep, []
def counted(self, name, task, record):
    seen.append(name)
    if name == stage and moment == "before" and (seen.count(name) == 2 or stage in ("plan", "evaluation")):
        die()
    keep(self, name, task, record)
    if name == stage and moment == "after":
        die()
stages.Stages.keep = counted
if moment == "within":
    name = "_padded" if stage == "samples" else "_ragged"
    original, calls = getattr(hdf5, name), []
    def dying(*arguments):
        calls.append(1)
        if len(calls) == 6:
            die()
        return original(*arguments)
    setattr(hdf5, name, dying)
module.prepare(raw, data, module.PrepareOptions(unpacked=True))
"""


@pytest.mark.parametrize(
    ("stage", "moment"),
    [
        ("sentences", "before"),
        ("text", "before"),
        ("samples", "before"),
        ("samples", "within"),
        ("evaluation", "before"),
        ("plan", "before"),
        ("plan", "after"),
        ("scatter", "before"),
        ("scatter", "after"),
        ("gather-packed", "before"),
        ("gather-packed", "within"),
        ("gather-varlength", "after"),
    ],
)
@pytest.mark.slow
def test_a_killed_preparation_continues_to_the_same_bytes(
    articles, whole, raw_dir, whole_text, tmp_path, stage, moment
):
    data = tmp_path / "data"
    source, expected = (articles, whole) if stage in ("sentences", "text") else (raw_dir, whole_text)
    process = subprocess.run(
        [sys.executable, "-c", KILL, str(source), str(data), stage, moment], timeout=250, check=False
    )
    assert process.returncode == -signal.SIGKILL
    assert not (data / "manifest.json").exists()
    prepare(source, data, PrepareOptions(unpacked=True))
    assert contents(data) == contents(expected)
    assert not list(data.rglob("*.partial"))


def test_sizes_can_be_chosen_for_synthetic_data_only(raw_dir, tmp_path, monkeypatch):
    made = prepare(raw_dir, tmp_path / "data", PrepareOptions(shards=2, max_sequence_length=32))
    assert (made.counts["shards"], made.counts["max_sequence_length"]) == (2, 32)
    real = small_text.write_raw(tmp_path / "real")
    (real / "SYNTHETIC").unlink()
    with pytest.raises(ConfigError, match="only those of synthetic data may differ"):
        prepare(real, tmp_path / "other", PrepareOptions(max_sequence_length=32))


def test_other_text_cannot_pass_as_wikipedia(tmp_path, monkeypatch):
    real = small_text.write_raw(tmp_path / "real")
    (real / "SYNTHETIC").unlink()
    with pytest.raises(
        DataError, match=r"vocab\.txt: MD5 .* where the benchmark's has 64800d5d8528ce344256daf115d4965e"
    ):
        prepare(real, tmp_path / "data")
    monkeypatch.setattr(raw_module, "VOCABULARY_MD5", "9" * 32)
    monkeypatch.setattr("benchmarks.bert.prepare.digest", lambda *_: "9" * 32)
    with pytest.raises(
        DataError, match=r"eval\.txt: MD5 9+ where the benchmark's has 2a220f790517261547b1b45ed3ada07a"
    ):
        prepare(real, tmp_path / "data")


def test_rebuilt_articles_with_another_evaluation_set_are_custom(articles, tmp_path, monkeypatch, capsys):
    """WikiExtractor writes the current date into some articles: only the distributed text is the benchmark's."""
    real = tmp_path / "raw"
    real.mkdir()
    (real / "vocab.txt").write_bytes((articles / "vocab.txt").read_bytes())
    (real / "text").symlink_to(articles / "text")
    monkeypatch.setattr("benchmarks.bert.prepare.digest", lambda *_: raw_module.VOCABULARY_MD5)
    sizes = {"max_sequence_length": 64, "shards": 3, "parts": 2, "eval_articles": 10, "eval_samples": 30}
    monkeypatch.setattr("benchmarks.bert.raw.settings_of", lambda source: PreparationSizes(**sizes))
    assert (
        COMMANDS.run("prepare", ["--raw-dir", str(real), "--data-dir", str(tmp_path / "data"), "--workers", "1"]) == 0
    )
    assert "the open division alone: the held-out text has the MD5" in capsys.readouterr().out
    made = verify(tmp_path / "data")
    assert (made.synthetic, made.custom.endswith(f"published is {raw_module.EVALUATION_MD5}")) == (False, True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: (raw / "results4" / "part-00001-of-00002").unlink(), r"lacks part-00001-of-00002"),
        (lambda raw: (raw / "results4" / "part-00000-of-00003").write_text("x"), r"is none of the 2 parts|lacks"),
        (lambda raw: (raw / "results4" / "eval.txt").unlink(), r"eval\.txt is missing: there is nothing to evaluate"),
        (lambda raw: (raw / "results4" / "eval.txt").write_text("One.\n"), r"makes \d+ sequences where 20 are needed"),
        (
            lambda raw: (raw / "results4" / "part-00001-of-00002").write_text("\n\n"),
            "part-00001-of-00002 holds no text",
        ),
        (lambda raw: (raw / "results4" / "part-00001-of-00002").write_bytes(b"a\n\xff\xfe\n"), "part-00001.*not UTF-8"),
        (lambda raw: (raw / "vocab.txt").unlink(), r"vocab\.txt is missing"),
        (lambda raw: (raw / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n"), r"has no \[MASK\]"),
        (lambda raw: (raw / "SYNTHETIC").write_text("{"), "SYNTHETIC is damaged"),
        (lambda raw: (raw / "SYNTHETIC").write_text('{"settings": {"shard": 2}}'), "invalid settings"),
    ],
)
def test_bad_input_is_named(tmp_path, damage, message):
    raw_dir = small_text.write_raw(tmp_path / "raw")
    damage(raw_dir)
    with pytest.raises(DataError, match=message):
        prepare(raw_dir, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_missing_and_empty_raw_folders_are_named(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        prepare(tmp_path / "nowhere", tmp_path / "data")
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    with pytest.raises(DataError, match=r"holds neither results4/part-00000-of-00500"):
        prepare(tmp_path, tmp_path / "data")


def test_more_shards_than_packs_are_refused(raw_dir, tmp_path):
    with pytest.raises(DataError, match=r"\d+ packs cannot fill 4320 shards; use fewer"):
        prepare(raw_dir, tmp_path / "data", PrepareOptions(shards=4320))


def test_a_truncated_intermediate_is_named(raw_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.bert.preparation.pipeline.make_plan", failing)
    with pytest.raises(DataError, match="x"):
        prepare(raw_dir, tmp_path / "data")
    monkeypatch.undo()
    path = tmp_path / "data" / "intermediate" / "samples" / "part-00001-of-00002.hdf5"
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(DataError, match=r"part-00001-of-00002\.hdf5 is truncated"):
        prepare(raw_dir, tmp_path / "data")


def test_a_shard_that_vanished_is_named(raw_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("common.data.manifest.write", lambda *_: (_ for _ in ()).throw(DataError("disk full")))
    with pytest.raises(DataError, match="disk full"):
        prepare(raw_dir, tmp_path / "data")
    monkeypatch.undo()
    (tmp_path / "data" / "packed" / "part_00001").unlink()
    with pytest.raises(DataError, match="part_00001 is not as it was prepared; delete"):
        prepare(raw_dir, tmp_path / "data")


@pytest.mark.parametrize("stage", ["samples", "gather-packed"])
def test_a_disk_that_fills_up_is_one_error_and_no_loss(raw_dir, whole_text, tmp_path, monkeypatch, stage):
    function = {"samples": "make_samples", "gather-packed": "gather_shard"}[stage]

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"benchmarks.bert.preparation.pipeline.{function}", full)
    with pytest.raises(DataError, match=f"stopped at stage {stage}: .*No space left on device; .* it continues"):
        prepare(raw_dir, tmp_path / "data", PrepareOptions(unpacked=True))
    monkeypatch.undo()
    prepare(raw_dir, tmp_path / "data", PrepareOptions(unpacked=True))
    assert contents(tmp_path / "data") == contents(whole_text)


def packed_elsewhere(whole, tmp_path):
    """Shards and evaluation file as other tools leave them: without a manifest."""
    folder = tmp_path / "nvidia" / "packed_data"
    folder.mkdir(parents=True)
    for path in (whole / "packed").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    evaluation = tmp_path / "nvidia" / "part_eval_10k.hdf5"
    evaluation.write_bytes((whole / "eval_varlength" / "part_eval_10k.hdf5").read_bytes())
    return folder, evaluation


def test_shards_of_other_tools_are_counted_where_they_lie(whole, tmp_path, capsys):
    folder, evaluation = packed_elsewhere(whole, tmp_path)
    data = tmp_path / "data"
    options = ["--adopt", str(folder), "--eval-file", str(evaluation), "--data-dir", str(data), "--workers", "1"]
    assert COMMANDS.run("prepare", options) == 0
    assert COMMANDS.run("prepare", options) == 0
    expected = json.loads((whole / "manifest.json").read_text())["counts"]
    found = verify(data)
    for name in ("train_samples", "train_packs", "packs_of_1", "packs_of_2", "packs_of_3", "shards", "eval_samples"):
        assert found.counts[name] == expected[name]
    assert found.custom == f"train_samples is {expected['train_samples']}, published is 156726829"
    assert (data / "packed").is_symlink()
    assert "custom" in capsys.readouterr().out


def test_shards_with_the_benchmark_s_counts_are_wikipedia(whole, tmp_path, monkeypatch):
    folder, evaluation = packed_elsewhere(whole, tmp_path)
    counts = json.loads((whole / "manifest.json").read_text())["counts"]
    published = Published({name: counts[name] for name in ("train_samples", "eval_samples")})
    monkeypatch.setattr("benchmarks.bert.prepare.PUBLISHED", published)
    found = adopt_packed(folder, tmp_path / "data", evaluation)
    assert (found.synthetic, found.custom) == (False, "")
    mark(folder, {"kind": "test"})
    assert adopt_packed(folder, tmp_path / "synthetic", evaluation).synthetic is True
    assert (found.counts["vocabulary"], found.counts["max_sequence_length"]) == (30_522, 512)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "part_00001").unlink(), "lacks part_00001"),
        (lambda folder: (folder / "part_00001").write_bytes(b"HDF"), "part_00001 is truncated or no HDF5"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "holds no shards"),
        (lambda folder: (folder.parent / "part_eval_10k.hdf5").unlink(), r"part_eval_10k\.hdf5 is missing"),
    ],
)
def test_damaged_shards_of_other_tools_are_named(whole, tmp_path, damage, message):
    folder, evaluation = packed_elsewhere(whole, tmp_path)
    damage(folder)
    with pytest.raises(DataError, match=message):
        adopt_packed(folder, tmp_path / "data", evaluation)


def test_a_shard_of_other_tools_that_is_not_whole_is_named(whole, tmp_path):
    folder, evaluation = packed_elsewhere(whole, tmp_path)
    with h5py.File(folder / "part_00001") as file:
        half = len(file["packed_input_len"]) // 2
    with h5py.File(folder / "part_00001", "r+") as file:
        rows = file["packed_input_len"][:half]
        del file["packed_input_len"]
        file.create_dataset("packed_input_len", (half,), dtype=h5py.vlen_dtype(np.int16))
        for number, row in enumerate(rows):
            file["packed_input_len"][number] = row
    with pytest.raises(DataError, match="a shard is not whole"):
        adopt_packed(folder, tmp_path / "data", evaluation)


def test_packed_folder_and_evaluation_file_go_together(tmp_path):
    with pytest.raises(ConfigError, match="--adopt and --eval-file go together"):
        COMMANDS.run("prepare", ["--adopt", str(tmp_path)])
    with pytest.raises(ConfigError, match="prepare without --adopt --eval-file e: no such option"):
        COMMANDS.run("prepare", ["--eval-file", "e"])


@pytest.mark.parametrize("option", [["--unpacked"], ["--shards", "3"], ["--keep-intermediate"]])
def test_options_of_preparing_do_not_fit_shards_that_are_packed(tmp_path, option):
    with pytest.raises(ConfigError, match=f"prepare --adopt {' '.join(option)}: no such option"):
        COMMANDS.run("prepare", ["--adopt", str(tmp_path), "--eval-file", str(tmp_path / "e"), *option])


def test_counts_that_differ_from_the_benchmark_are_reported(raw_dir, tmp_path, monkeypatch, capsys):
    real = tmp_path / "real"
    real.mkdir()
    for name in ("results4", "vocab.txt"):
        (real / name).symlink_to(raw_dir / name)
    monkeypatch.setattr("benchmarks.bert.prepare._check_real", lambda source: None)
    sizes = {"max_sequence_length": 64, "shards": 3, "eval_samples": 20}
    monkeypatch.setattr("benchmarks.bert.raw.settings_of", lambda source: PreparationSizes(**sizes))
    assert COMMANDS.run("prepare", ["--raw-dir", str(real), "--data-dir", str(tmp_path / "data")]) == 0
    output = capsys.readouterr().out
    assert "Wikipedia, train_samples" in output
    assert "published is 156726829" in output


def test_generated_text_is_real_and_its_vocabulary_knows_it(articles):
    pieces = (articles / "vocab.txt").read_text().splitlines()
    assert len(pieces) == 1000 == len(set(pieces))
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert [pieces.index(piece) for piece in special] == [0, 100, 101, 102, 103]
    assert {"the", "of", "##a", "a"} <= set(pieces)


def test_small_vocabularies_begin_with_the_special_pieces(tmp_path):
    options = SyntheticArticles(20, 300, max_sequence_length=32, eval_samples=5, eval_articles=2, parts=2)
    generate(tmp_path / "raw", options)
    assert (tmp_path / "raw" / "vocab.txt").read_text().split()[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def test_generate_refuses_impossible_numbers(tmp_path):
    for options, message in (
        (["--vocabulary", "50"], "vocabulary=50: 200 to 32767"),
        (["--articles", "5"], "articles=5: at least two for each of 4 parts"),
        (["--max-sequence-length", "513"], "max_sequence_length=513: 16 to 512"),
        (["--shards", "0"], "shards=0: at least 1"),
        (["--articles", "40", "--eval-articles", "40"], "--eval-articles=40"),
    ):
        with pytest.raises(ConfigError, match=message):
            COMMANDS.run("generate", ["--raw-dir", str(tmp_path / "raw"), *options])


def test_data_go_into_the_default_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLPERF_DATA_DIR", str(tmp_path / "d"))
    assert COMMANDS.run("generate", SMALL) == 0
    raw = tmp_path / "d" / "bert-synthetic-raw"
    assert COMMANDS.run("prepare", ["--raw-dir", str(raw), "--workers", "1"]) == 0
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"bert", "bert-synthetic-raw"}
