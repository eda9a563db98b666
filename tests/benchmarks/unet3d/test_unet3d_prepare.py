"""Test the whole preparation: files and checksums, interruptions, damage, sources, and the command line."""

import dataclasses
import hashlib
import json
import struct
import subprocess

import numpy as np
import pytest
import small_scans

from benchmarks.unet3d import prepare as prepare_module
from benchmarks.unet3d import raw
from benchmarks.unet3d.prepare import COMMANDS, adopt, prepare, verify
from benchmarks.unet3d.preprocess import load_scan, preprocess
from benchmarks.unet3d.volumes import open_volumes
from common.errors import ConfigError, DataError

NAMES = {f"{case}_{kind}.npy" for case in small_scans.CASES for kind in "xy"}


@pytest.fixture
def raw_dir(tmp_path):
    return small_scans.write_raw(tmp_path / "raw")


@pytest.fixture
def data(raw_dir, tmp_path):
    prepare(raw_dir, tmp_path / "data")
    return tmp_path / "data"


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.npy"))}


def test_files_have_numpys_format(data):
    for kind, code, size in (("x", "<f4", 4), ("y", "|u1", 1)):
        content = (data / f"case_00001_{kind}.npy").read_bytes()
        # Version 1.0 of the format: magic, version, length of the header, header, voxels.
        magic, version, length = struct.unpack_from("<6s2sH", content)
        assert (magic, version, 10 + length) == (b"\x93NUMPY", b"\1\0", 128)
        header = eval(content[10:128])
        # 40 x 24 x 26 voxels, 1 x 1.5 x 1.5 mm apart: 25 x 30 x 32.5
        assert header == {"descr": code, "fortran_order": False, "shape": (1, 25, 30, 32)}
        assert len(content) == 128 + size * 25 * 30 * 32


def test_files_equal_the_preprocessing(raw_dir, data):
    for name in small_scans.CASES:
        made = preprocess(load_scan(raw_dir / name / raw.IMAGE, raw_dir / name / raw.LABEL), small_scans.PATCH)
        for kind, array in zip("xy", made, strict=True):
            np.testing.assert_array_equal(np.load(data / f"{name}_{kind}.npy"), array)


def test_checksums_equal_md5sums(data):
    output = subprocess.run(["md5sum", *sorted(NAMES)], cwd=data, capture_output=True, text=True, check=True).stdout
    expected = {name: md5 for md5, name in (line.split() for line in output.splitlines())}
    assert json.loads((data / "checksum.json").read_text()) == expected


def test_manifest_and_cases_describe_the_data(data):
    found = json.loads((data / "manifest.json").read_text())
    assert found["counts"] == {"train_samples": 2, "eval_samples": 2}
    assert found["synthetic"] is True
    assert set(found["files"]) == NAMES | {"cases.json", "checksum.json"}
    for name, entry in found["files"].items():
        content = (data / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    cases = json.loads((data / "cases.json").read_text())
    assert cases["case_00003"]["split"] == "eval"
    assert cases["case_00003"]["shape"] == [30, 20, 23]  # 16 * 3 / 1.6, 25 * 0.9 / 1.2 padded to 20, 31 * 0.9 / 1.2
    np.testing.assert_allclose(cases["case_00003"]["spacing_of_scan_mm"], [3.0, 0.9, 0.9], rtol=1e-6)


def test_42_of_210_cases_are_for_evaluation():
    splits = [raw.split_of(number) for number in range(raw.LABELLED_CASES)]
    assert (splits.count("train"), splits.count("eval")) == (168, 42)
    # The first and last of the reference's evaluation_cases.txt, and neighbours that it does not have.
    assert [raw.split_of(number) for number in (0, 1, 3, 206, 207, 208)] == [
        "eval", "train", "eval", "eval", "eval", "train"
    ]  # fmt: skip


def test_cases_without_public_labels_are_ignored(raw_dir, tmp_path):
    small_scans.write_case(raw_dir / "case_00210", (4, 4, 4), (1.0, 1.0, 1.0))
    (raw_dir / "case_00211").mkdir()
    prepare(raw_dir, tmp_path / "data")
    assert set(contents(tmp_path / "data")) == NAMES


@pytest.mark.parametrize("subfolder", ["data", "kits19/data"])
def test_cases_are_found_in_a_clone_of_the_repository(raw_dir, tmp_path, subfolder):
    target = tmp_path / "clone" / subfolder
    target.parent.mkdir(parents=True)
    raw_dir.rename(target)
    prepare(tmp_path / "clone", tmp_path / "data")
    assert set(contents(tmp_path / "data")) == NAMES


@pytest.mark.parametrize("name", [raw.IMAGE, raw.LABEL])
def test_the_error_for_a_missing_file_of_a_case_names_it(raw_dir, tmp_path, name):
    (raw_dir / "case_00002" / name).unlink()
    with pytest.raises(DataError, match=rf"case_00002/{name} is missing; generate"):
        prepare(raw_dir, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_incomplete_scans_are_not_accepted_as_kits19(raw_dir, tmp_path):
    (raw_dir / "SYNTHETIC").unlink()
    # Four cases of 210 are there.
    with pytest.raises(DataError, match=r"case_00004/imaging.nii.gz is missing and 411 more; .* download"):
        prepare(raw_dir, tmp_path / "data")


@pytest.mark.parametrize("left", [{"case_00000", "case_00003"}, {"case_00001", "case_00002"}])
def test_a_split_without_cases_is_an_error(raw_dir, tmp_path, left):
    for name in set(small_scans.CASES) - left:
        (raw_dir / name).rename(tmp_path / name)
    with pytest.raises(DataError, match=r"has no case for (train|eval)"):
        prepare(raw_dir, tmp_path / "data")


def test_the_error_for_a_folder_without_cases_has_the_command(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        prepare(tmp_path / "nowhere", tmp_path / "data")
    with pytest.raises(DataError, match=r"has no folders case_00000 …; 'mlperf-suite download"):
        prepare(tmp_path, tmp_path / "data")


@pytest.mark.parametrize("content", ["nothing", "[]", "{}", '{"settings": {"patch": [1, 2]}}', '{"settings": 1}'])
def test_the_error_for_a_damaged_marker_names_it(raw_dir, tmp_path, content):
    (raw_dir / "SYNTHETIC").write_text(content)
    with pytest.raises(DataError, match=r"raw/SYNTHETIC (is damaged|has missing or invalid settings)"):
        prepare(raw_dir, tmp_path / "data")


def test_another_crop_size_is_an_error(raw_dir, data):
    small_scans.mark(raw_dir, (32, 32, 32))
    with pytest.raises(DataError, match=r"was prepared with .*24.*, not with .*32.*; delete it"):
        prepare(raw_dir, data)


@pytest.mark.usefixtures("forked_pools")
def test_files_do_not_depend_on_the_workers(raw_dir, data, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "VOXELS_PER_WORKER", 1)
    prepare(raw_dir, tmp_path / "parallel", workers=2)
    assert contents(tmp_path / "parallel") == contents(data)


@pytest.mark.usefixtures("forked_pools")
def test_a_damaged_scan_stops_all_workers(raw_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "VOXELS_PER_WORKER", 1)
    path = raw_dir / "case_00001" / raw.LABEL
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"case_00001/segmentation.nii.gz cannot be read"):
        prepare(raw_dir, tmp_path / "data", workers=2)
    assert not (tmp_path / "data" / "manifest.json").exists()


def interrupted(raw_dir, folder, monkeypatch):
    """Run a preparation that fails before its last case."""
    with monkeypatch.context() as patch:
        left = [3]

        def fails(case, *rest):
            left[0] -= 1
            if left[0] < 0:
                raise DataError("read error")
            return original(case, *rest)

        original = prepare_module.prepare_case
        patch.setattr(prepare_module, "prepare_case", fails)
        with pytest.raises(DataError, match="read error"):
            prepare(raw_dir, folder)


def counting(monkeypatch):
    """Return a list to which the names of prepared cases are appended."""
    asked = []
    original = prepare_module.prepare_case
    monkeypatch.setattr(
        prepare_module, "prepare_case", lambda case, *rest: asked.append(case.name) or original(case, *rest)
    )
    return asked


def test_recorded_cases_are_not_prepared_again(raw_dir, tmp_path, monkeypatch):
    interrupted(raw_dir, tmp_path / "data", monkeypatch)
    done = {path.stem for path in (tmp_path / "data" / "records" / "cases").glob("case_*.json")}
    asked = counting(monkeypatch)
    prepare(raw_dir, tmp_path / "data")
    assert len(done) == 3
    assert set(asked) == set(small_scans.CASES) - done


@pytest.mark.parametrize("loss", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_recorded_case_with_a_missing_file_is_prepared_again(raw_dir, data, tmp_path, monkeypatch, loss):
    again = tmp_path / "again"
    interrupted(raw_dir, again, monkeypatch)
    lost = sorted((again / "records" / "cases").glob("case_*.json"))[0].stem
    loss(again / f"{lost}_y.npy")
    asked = counting(monkeypatch)
    prepare(raw_dir, again)
    assert lost in asked
    assert contents(again) == contents(data)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("source.json", '{"files": 1'),
        ("cases/case_*.json", '{"files": 1'),
        ("cases/case_*.json", '{"files": 1}'),
        ("cases/case_*.json", '{"files": {"a": {"bytes": 1}}}'),
    ],
)
def test_the_error_for_a_damaged_record_names_it(raw_dir, tmp_path, monkeypatch, name, content):
    interrupted(raw_dir, tmp_path / "data", monkeypatch)
    path = sorted((tmp_path / "data" / "records").glob(name))[0]
    path.write_text(content)
    with pytest.raises(DataError, match=rf"{path.name} is damaged"):
        prepare(raw_dir, tmp_path / "data")


def test_verify_counts_the_volumes(data):
    (data / "case_00009_x.npy").write_bytes((data / "case_00001_x.npy").read_bytes())
    with pytest.raises(DataError, match=r"has case_00009_x.npy, which .*checksum.json does not have"):
        verify(data)


def test_verify_compares_with_other_checksums(data, tmp_path, capsys):
    md5s = json.loads((data / "checksum.json").read_text())
    others = tmp_path / "published.json"
    others.write_text(json.dumps(dict(reversed(md5s.items()))))
    assert COMMANDS.run("verify", ["--data-dir", str(data), "--checksums", str(others)]) == 0
    assert f"All volumes are those of {others}" in capsys.readouterr().out
    others.write_text(json.dumps({**md5s, "case_00001_x.npy": "0" * 32, "case_00002_x.npy": "1" * 32}))
    with pytest.raises(DataError, match=r"2 images and 0 labels have other MD5s than .*: case_00001_x.npy, case_00002"):
        verify(data, others)
    others.write_text(json.dumps({**md5s, "case_00005_y.npy": "0" * 32}))
    with pytest.raises(DataError, match=r"lacks case_00005_y.npy: 8 volumes, but .*published.json has 9"):
        verify(data, others)
    others.write_text("[]")
    with pytest.raises(DataError, match=r"published.json cannot be read as names and MD5s"):
        verify(data, others)


@pytest.mark.parametrize("patch", [["32", "32"], ["0"], ["32", "-1", "32"], ["2000"]])
def test_an_invalid_patch_is_an_error(patch, tmp_path):
    with pytest.raises(ConfigError, match="patch"):
        COMMANDS.run("generate", ["--raw-dir", str(tmp_path / "raw"), "--patch", *patch])


@pytest.fixture
def foreign(data, tmp_path, monkeypatch):
    """Return a folder as the reference's script writes it: only arrays."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name, content in contents(data).items():
        (folder / name).write_bytes(content)
    monkeypatch.setattr(raw, "LABELLED_CASES", len(small_scans.CASES))
    return folder


def test_volumes_of_the_reference_can_be_adopted_in_place(foreign, data, capsys):
    before = {path: path.stat().st_mtime_ns for path in foreign.iterdir()}
    options = ["--adopt", str(foreign), "--data-dir", str(foreign), "--workers", "2"]
    assert COMMANDS.run("prepare", options) == 0
    assert capsys.readouterr().out == f"{foreign}: KiTS19, train_samples 2, eval_samples 2\n"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (foreign / "checksum.json").read_text() == (data / "checksum.json").read_text()
    own, others = (json.loads((folder / "manifest.json").read_text()) for folder in (data, foreign))
    assert {name: own["files"][name] for name in NAMES} == {name: others["files"][name] for name in NAMES}
    opened = open_volumes(foreign, small_scans.PATCH)
    assert (opened.train, opened.eval) == (open_volumes(data, small_scans.PATCH).train, opened.eval)
    assert not opened.synthetic
    verify(foreign)


@pytest.mark.parametrize("kind", ["real", "synthetic"])
def test_volumes_of_the_reference_can_be_adopted_into_another_folder(foreign, data, tmp_path, capsys, kind):
    commands = dataclasses.replace(COMMANDS, published=prepare_module.published_cases())  # of the cases of this test
    if kind == "synthetic":
        (foreign / "SYNTHETIC").write_text('{"kind": "test"}')
        for part in "xy":
            (foreign / f"case_00002_{part}.npy").unlink()
    target = tmp_path / "target"
    for _ in range(2):
        assert commands.run("prepare", ["--adopt", str(foreign), "--data-dir", str(target), "--workers", "2"]) == 0
    assert commands.run("verify", ["--data-dir", str(target)]) == 0
    found = (
        "KiTS19, eval_samples 2, train_samples 2" if kind == "real" else "synthetic, eval_samples 2, train_samples 1"
    )
    assert capsys.readouterr().out.splitlines()[1:] == [f"{target}: {found}"] * 2
    assert not (foreign / "manifest.json").exists()
    names = sorted(path.name for path in foreign.glob("*.npy"))
    assert len(names) == (8 if kind == "real" else 6)
    assert all((target / name).samefile(foreign / name) for name in names)
    with pytest.raises(DataError, match="was prepared from other raw data"):
        commands.run("prepare", ["--adopt", str(foreign), "--data-dir", str(data)])


def test_adoption_reports_a_missing_volume(foreign):
    (foreign / "case_00002_y.npy").unlink()
    with pytest.raises(DataError, match=r"lacks case_00002_y.npy: 7 volumes, but KiTS19 has 8"):
        adopt(foreign, foreign)


def test_adoption_of_a_missing_folder_creates_nothing(tmp_path):
    with pytest.raises(DataError, match=r"--adopt: .*/none does not exist"):
        COMMANDS.run("prepare", ["--adopt", str(tmp_path / "none"), "--data-dir", str(tmp_path / "data")])
    assert sorted(tmp_path.iterdir()) == []


def test_adoption_compares_existing_checksums(foreign, data):
    md5s = json.loads((data / "checksum.json").read_text())
    (foreign / "checksum.json").write_text(json.dumps({**md5s, "case_00003_y.npy": "0" * 32}))
    with pytest.raises(DataError, match=r"0 images and 1 labels have other MD5s than .*: case_00003_y.npy"):
        adopt(foreign, foreign)
    assert not (foreign / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("case_00002_x.npy", np.zeros((1, 24, 22, 22)), r"case_00002_x.npy: float64 of shape \(1, 24, 22, 22\)"),
        ("case_00002_x.npy", np.zeros((24, 22, 22), np.float32), r"case_00002_x.npy: float32 of shape \(24, 22"),
        ("case_00002_y.npy", np.zeros((1, 9, 9, 9), np.uint8), r"labels of case_00002: \(1, 9, 9, 9\) up to 0"),
        ("case_00002_y.npy", np.full((1, 24, 22, 22), 3, np.uint8), r"labels of case_00002: .* up to 3"),
    ],
)
def test_adoption_rejects_other_arrays(foreign, name, array, message):
    np.save(foreign / name, array)
    with pytest.raises(DataError, match=message):
        adopt(foreign, foreign)


def test_adoption_names_a_volume_that_was_cut_off(foreign):
    (foreign / "case_00002_x.npy").write_bytes((foreign / "case_00002_x.npy").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"case_00002_x.npy cannot be read"):
        adopt(foreign, foreign)
