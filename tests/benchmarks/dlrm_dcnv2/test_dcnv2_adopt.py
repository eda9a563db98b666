"""``prepare --adopt``: MLCommons' prepared files of DLRM-DCNv2, in their layout, as prepared data."""

import hashlib
import json
import os
from dataclasses import replace

import pytest

from benchmarks.dlrm_dcnv2.data import FORMAT
from benchmarks.dlrm_dcnv2.prepare import COMMANDS
from common.data import preparation
from common.errors import ConfigError, DataError
from common.recommendation.criteo.preparation.raw_days import PUBLISHED_COUNTS
from common.recommendation.criteo.prepare import published_logs

FILES = ("train_data.bin", "val_data.bin")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Synthetic data that this suite prepared, with a raw folder beside them."""
    root = tmp_path_factory.mktemp("own")
    COMMANDS.run(
        "generate", ["--raw-dir", f"{root}/raw", "--train", "60", "--eval", "7", "--cap", "9", "--workers", "1"]
    )
    COMMANDS.run("prepare", ["--raw-dir", f"{root}/raw", "--data-dir", f"{root}/data", "--workers", "1"])
    return root


@pytest.fixture
def published(own, tmp_path):
    """The same samples as MLCommons' downloader leaves its files."""
    folder = tmp_path / "preprocessed_criteo_click_logs"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_bytes((own / "data" / name).read_bytes())
    (folder / "test_data.bin").write_bytes(bytes(912))
    for name in ("LICENSE.txt", "NOTICE.txt", "dlrmv2-preprocessed-criteo-click-logs.md5"):
        (folder / name).write_text("as it is\n")
    (folder / "SYNTHETIC").write_text('{"kind": "test"}\n')
    return folder


def adopt(folder, data_dir, *more):
    return COMMANDS.run("prepare", ["--adopt", str(folder), "--data-dir", str(data_dir), "--workers", "2", *more])


@pytest.mark.parametrize("place", ["in its place", "elsewhere", "on another disk"])
def test_published_files_become_prepared_data(own, published, tmp_path, monkeypatch, capsys, place):
    data = published if place == "in its place" else tmp_path / "data"
    if place == "on another disk":
        monkeypatch.setattr(preparation.os, "link", lambda *paths: (_ for _ in ()).throw(OSError(18, "another device")))
    assert adopt(published, data) == 0
    written = (data / "manifest.json").read_bytes()
    assert adopt(published, data) == 0
    assert (data / "manifest.json").read_bytes() == written
    assert COMMANDS.run("verify", ["--data-dir", str(data)]) == 0
    assert f"{data}: synthetic, eval_samples 7, train_samples 60" in capsys.readouterr().out
    for name in FILES:
        assert (data / name).samefile(published / name) == (place != "on another disk")
    found, expected = (json.loads((folder / "manifest.json").read_text()) for folder in (data, own / "data"))
    for key in ("files", "counts", "format", "synthetic"):
        assert found[key] == expected[key]
    rows = [json.loads(each["source"]["table_rows"]) for each in (found, expected)]
    assert all(0 < own_rows <= prepared_rows for own_rows, prepared_rows in zip(*rows, strict=True))


@pytest.fixture
def real(published, monkeypatch):
    """Files that are the benchmark's, by its counts and MD5s."""
    (published / "SYNTHETIC").unlink()
    for name, count in zip(FILES, ("train_samples", "eval_samples"), strict=True):
        content = (published / name).read_bytes()
        monkeypatch.setitem(FORMAT.checksums, name, hashlib.md5(content).hexdigest())
        monkeypatch.setitem(PUBLISHED_COUNTS, count, len(content) // 912)
    return published


def test_files_with_the_published_md5s_are_the_benchmarks(real, tmp_path, capsys):
    assert adopt(real, tmp_path / "data") == 0
    assert f"{tmp_path / 'data'}: Criteo's click logs, train_samples 60, eval_samples 7" in capsys.readouterr().out
    found = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert found["synthetic"] is False
    assert max(json.loads(found["source"]["table_rows"])) == 40_000_000


def test_verify_compares_real_data_with_the_published_md5s(real, monkeypatch, capsys):
    adopt(real, real)
    capsys.readouterr()
    verify = ["--data-dir", str(real)]
    assert replace(COMMANDS, published=published_logs(FORMAT)).run("verify", verify) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "as published: 2 files"
    monkeypatch.setitem(FORMAT.checksums, "val_data.bin", "0" * 32)
    with pytest.raises(DataError, match=r"val_data\.bin has the MD5 [0-9a-f]{32}, published is 0{32}"):
        replace(COMMANDS, published=published_logs(FORMAT)).run("verify", verify)


def test_prepared_files_as_raw_data_are_pointed_to_the_option(published, tmp_path):
    with pytest.raises(DataError, match="holds prepared files and no raw days; 'prepare --adopt'"):
        COMMANDS.run("prepare", ["--raw-dir", str(published), "--data-dir", str(tmp_path / "data")])


def changed(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "val_data.bin").unlink(), "preprocessed_criteo_click_logs lacks val_data.bin"),
        (lambda folder: [(folder / name).unlink() for name in FILES], "lacks val_data.bin and train_data.bin"),
        (
            lambda folder: os.truncate(folder / "train_data.bin", 1000),
            r"train_data.bin has 1,000 bytes, no whole number",
        ),
        (lambda folder: os.truncate(folder / "train_data.bin", 0), r"train_data.bin has 0 bytes"),
        (lambda folder: os.truncate(folder / "train_data.bin", 912), r"train_data.bin has 1 samples and not 60"),
        (
            lambda folder: changed(folder / "train_data.bin"),
            "train_data.bin has the MD5 [0-9a-f]{32}, published is",
        ),
    ],
    ids=["no evaluation", "neither", "no whole number", "empty", "cut off", "changed"],
)
def test_a_wrong_folder_is_refused_by_name(real, tmp_path, damage, message):
    damage(real)
    with pytest.raises(DataError, match=f"{real}.*{message}" if "folder" in message else message):
        adopt(real, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()
    assert not (tmp_path / "data" / "train_data.bin").exists()


def test_impossible_synthetic_samples_are_refused(published, tmp_path):
    changed(published / "train_data.bin")
    content = bytearray((published / "train_data.bin").read_bytes())
    content[-4:] = (36).to_bytes(4, "little")
    (published / "train_data.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"train_data.bin: row 59 has category 36 of table C26, which has 36 rows"):
        adopt(published, tmp_path / "data")


def test_a_folder_with_other_data_is_left_alone(own, published, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "val_data.bin").write_bytes(bytes(912))
    with pytest.raises(DataError, match=r"data/val_data.bin is another file than"):
        adopt(published, tmp_path / "data")
    assert (tmp_path / "data" / "val_data.bin").read_bytes() == bytes(912)
    with pytest.raises(DataError, match="was prepared from other raw data"):
        adopt(published, own / "data")


@pytest.mark.parametrize("option", [["--table-cap", "5"], ["--raw-dir", "raw"]], ids=lambda option: option[0])
def test_options_of_preparing_do_not_go_with_it(published, tmp_path, option):
    with pytest.raises(ConfigError, match=f"^prepare --adopt {' '.join(option)}: no such option; the options are "):
        adopt(published, tmp_path / "data", *option)
