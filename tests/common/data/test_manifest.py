"""manifest.json: what is wrong is named, with the command that mends it."""

import hashlib
import json
import shlex
import subprocess

import pytest

from common.data import manifest
from common.data.manifest import Manifest
from common.errors import DataError


@pytest.fixture
def root(tmp_path):
    (tmp_path / "a.rec").write_bytes(b"hello")
    files = manifest.describe_files(tmp_path, ["a.rec"])
    manifest.write(tmp_path, Manifest("f/1", files, {"train_samples": 3}, True, {"made": "today"}))
    return tmp_path


def edit(root, **changes):
    path = root / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_sizes_and_checksums_are_written(root):
    entry = json.loads((root / "manifest.json").read_text())["files"]["a.rec"]
    assert entry == {"bytes": 5, "sha256": hashlib.sha256(b"hello").hexdigest()}


def test_what_was_written_is_read(root):
    found = manifest.verify(root, "f/1", "prepare it")
    assert (found.counts, found.synthetic, found.source) == ({"train_samples": 3}, True, {"made": "today"})


def test_missing_folder_names_the_command(tmp_path):
    with pytest.raises(DataError, match=r"nowhere does not exist; run 'prepare it'"):
        manifest.read(tmp_path / "nowhere", "f/1", "prepare it")


def test_a_file_in_place_of_the_folder_is_named(root):
    with pytest.raises(DataError, match="is no folder; run 'prepare it'"):
        manifest.read(root / "manifest.json", "f/1", "prepare it")


def test_missing_manifest_names_the_command(tmp_path):
    with pytest.raises(DataError, match=r"manifest\.json is missing.*run 'prepare it'"):
        manifest.read(tmp_path, "f/1", "prepare it")


def test_other_format_is_refused(root):
    with pytest.raises(DataError, match="format 'f/1' where 'g/1' is needed"):
        manifest.read(root, "g/1", "prepare it")


def test_missing_file_is_named(root):
    (root / "a.rec").unlink()
    with pytest.raises(DataError, match=r"a\.rec is missing"):
        manifest.read(root, "f/1", "prepare it")


def test_other_size_is_named(root):
    (root / "a.rec").write_bytes(b"hell")
    with pytest.raises(DataError, match=r"a\.rec has 4 bytes where manifest\.json says 5"):
        manifest.read(root, "f/1", "prepare it")


def test_changed_byte_is_found_by_verify_alone(root):
    (root / "a.rec").write_bytes(b"hallo")
    manifest.read(root, "f/1", "prepare it")
    with pytest.raises(DataError, match=r"a\.rec: SHA-256"):
        manifest.verify(root, "f/1", "prepare it")


@pytest.mark.parametrize(
    "changes",
    [{"synthetic": "no"}, {"synthetic": None}, {"counts": {"n": "x"}}, {"files": []}, {"files": {"a.rec": 1}}],
)
def test_garbled_fields_are_refused(root, changes):
    edit(root, **changes)
    with pytest.raises(DataError, match="has a missing or invalid field"):
        manifest.read(root, "f/1", "prepare it")


@pytest.mark.parametrize("synthetic", [True, False])
@pytest.mark.parametrize("undecided", [True, False])
def test_the_field_of_an_earlier_version_is_an_error_whose_command_renames_it(root, synthetic, undecided):
    edit(root, synthetic=synthetic)
    path = root / "manifest.json"
    current = path.read_text()
    path.write_text(current.replace('"synthetic"', '"stand_in"'))
    with pytest.raises(DataError) as caught:
        manifest.read(root, "f/1", "prepare it", undecided=undecided)
    said, _, command = str(caught.value).rpartition(": ")
    assert said == f"{path} was written by an earlier version: rename its field stand_in to synthetic"
    subprocess.run(shlex.split(command), check=True)
    assert path.read_text() == current
    assert manifest.read(root, "f/1", "prepare it").synthetic is synthetic


def test_half_a_manifest_is_refused(root):
    path = root / "manifest.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(DataError, match="not valid JSON"):
        manifest.read(root, "f/1", "prepare it")


def test_a_manifest_that_cannot_be_read_is_refused(root):
    (root / "manifest.json").unlink()
    (root / "manifest.json").mkdir()
    with pytest.raises(DataError, match=r"manifest\.json: is a folder.*; make it a readable file, or delete it"):
        manifest.read(root, "f/1", "prepare it")


def test_a_count_that_is_needed_is_named(root):
    assert manifest.read(root, "f/1", "prepare it", ("train_samples",)).counts == {"train_samples": 3}
    with pytest.raises(DataError, match=r"manifest\.json has no classes; run 'prepare it'"):
        manifest.read(root, "f/1", "prepare it", ("train_samples", "classes"))


def test_reading_a_missing_count_is_an_error_of_the_data(root):
    counts = manifest.read(root, "f/1", "prepare it").counts
    with pytest.raises(DataError, match=r"manifest\.json has no classes; run 'prepare it'$"):
        counts["classes"]
    assert counts.get("classes") is None
    assert manifest.read(root, "f/1", "prepare it") == Manifest(
        "f/1", manifest.describe_files(root, ["a.rec"]), {"train_samples": 3}, True, {"made": "today"}
    )
