"""`check` recognises submissions, also if a part is missing, and plain folders of results."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import SERIES, SYSTEM, log_of

from common.errors import DataError
from common.submission import check, found_files

pytestmark = pytest.mark.usefixtures("answers", "content_checkers")

Damage = Callable[[Path], object]
RESULTS = f"results/{SYSTEM}/resnet"


def moved(part: Path) -> Path:
    """Move a part out of the submission."""
    return part.rename(part.parent.parent / "elsewhere")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "missing": (moved, "is missing: a submission has a folder of this name"),
    "link to a folder": (lambda part: part.symlink_to(moved(part)), "is a link"),
    "relative link": (lambda part: (moved(part), part.symlink_to("../elsewhere")), "is a link"),
    "link to nothing": (lambda part: (moved(part), part.symlink_to("nowhere")), "is a link"),
    "link to itself": (lambda part: (moved(part), part.symlink_to(part.name)), "is a link"),
    "file": (lambda part: (moved(part), part.write_text("")), "is a file: a submission has a folder of this name"),
    "pipe": (lambda part: (moved(part), os.mkfifo(part)), "is a pipe"),
}


def checked(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, str]:
    code = check.main([*map(str, paths), "--ruleset", "4.0.0"])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["systems", "results"])
def test_part_that_is_no_folder_is_refused(tree, name, damage, capsys):
    change, words = DAMAGES[damage]
    change(tree / name)
    code, out = checked(capsys, tree)
    assert code == 1
    assert [line for line in out.splitlines() if f"acme/{name}" in line and words in line], out


@pytest.mark.parametrize("name", ["systems", "results", RESULTS])
def test_part_that_cannot_be_read_is_refused(tree, name, monkeypatch, capsys):
    entries = found_files._entries

    def readable(folder: Path) -> list[tuple[str, int, int]]:
        if folder == tree / name:
            raise PermissionError(13, "Permission denied")
        return entries(folder)

    monkeypatch.setattr(found_files, "_entries", readable)
    code, out = checked(capsys, tree)
    assert code == 1
    assert f"acme/{name}: cannot be read: Permission denied" in out


@pytest.mark.parametrize("damage", ["missing", "file", "link to a folder"])
def test_missing_systems_are_refused_in_a_submission_without_code(tree, damage, capsys):
    shutil.rmtree(tree / "benchmarks")
    DAMAGES[damage][0](tree / "systems")
    code, out = checked(capsys, tree)
    assert code == 1
    assert "files: acme: NOT ACCEPTED\n  - acme/systems" in out


@pytest.mark.parametrize("damage", ["link to nothing", "file", "pipe"])
def test_folder_with_neither_part_is_an_error(tree, damage):
    DAMAGES[damage][0](tree / "results")
    shutil.rmtree(tree / "systems")
    with pytest.raises(DataError, match="acme"):
        check.main([str(tree), "--ruleset", "4.0.0"])


def test_submission_can_be_named_by_a_link(tree, capsys):
    link = tree.parent / "link"
    link.symlink_to(tree)
    assert checked(capsys, tree) == checked(capsys, tree / ".")
    code, out = checked(capsys, link)
    assert code == 0
    assert "package_checker: acme: accepted" in out


@pytest.mark.parametrize("name", ["results", f"results/{SYSTEM}", RESULTS])
def test_folder_of_results_is_no_submission(tree, name, capsys):
    code, out = checked(capsys, tree / name)
    assert code == 0
    assert "package_checker" not in out
    assert out.count("SUBMITTABLE") == 1


@pytest.mark.parametrize("name", ["results", "results/resnet", "results/h200/resnet"])
def test_folder_above_a_series_is_no_submission(results, name, capsys):
    target = results.parent / "runs" / name
    target.parent.mkdir(parents=True)
    results.rename(target)
    code, out = checked(capsys, results.parent / "runs")
    assert code == 0
    assert "package_checker" not in out


@pytest.mark.parametrize("above", ["round", "round/..", ""], ids=["round", "folder above", "two submitters"])
def test_folder_above_submissions_is_an_error_that_names_them(tree, above):
    folder = tree.parent / "round" / "v4.0"
    folder.mkdir(parents=True)
    tree.rename(folder / "acme")
    if not above:
        shutil.copytree(folder / "acme", folder / "other")
        shutil.rmtree(folder / "other" / "systems")
    path = folder.parent.parent / above
    named = "acme" if above else "acme .*other"
    with pytest.raises(DataError, match=rf"holds [12] submission.*check --ruleset X\.Y\.Z .*{named}$"):
        check.main([str(path), "--ruleset", "4.0.0"])


@pytest.mark.parametrize("below", ["backup", f"{SERIES}_1", "a/b/c"])
def test_logs_in_subfolders_of_a_series_are_noted(results, below, capsys):
    before = checked(capsys, results)[1]
    (results / below).mkdir(parents=True, exist_ok=True)
    for number in range(5):
        shutil.copyfile(log_of(results, number + 1), results / below / f"result_{number}.txt")
    code, out = checked(capsys, results)
    assert code == 0
    note = f"  note: {results / below}: its logs are not judged, because runs.jsonl above it does not name them"
    assert [line for line in out.splitlines() if line not in before.splitlines()] == [note]


def test_logs_that_cannot_be_read_are_noted_in_a_subfolder(results, capsys):
    (results / "backup").mkdir()
    (results / "backup" / "result_0.txt").write_text("cut off")
    code, out = checked(capsys, results)
    assert code == 0
    assert "its logs are not judged" in out


def test_a_link_to_a_folder_beside_results_is_noted(results, tmp_path, capsys):
    """The link may hold results of another benchmark, which nobody judges."""
    (tmp_path / "elsewhere").mkdir()
    (results / "bert").symlink_to(tmp_path / "elsewhere")
    code, out = checked(capsys, results)
    assert code == 0
    assert f"note: {results / 'bert'}: is a link to a folder, which is not followed" in out
