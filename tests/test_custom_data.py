"""Test prepare, train, check and verify with data that are neither synthetic nor the benchmark's."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import WORKLOADS
from benchmarks.gpt3.prepare import CORPUS as GPT3
from benchmarks.llama31_8b.prepare import CORPUS
from common import cli
from common.data.manifest import UNDECIDED, Manifest, digest
from common.data.megatron import preparation
from common.data.megatron.preparation import commands_for
from common.data.published import Published, PublishedFile
from common.errors import DataError
from common.mlperf.parsed_log import read_log
from tests import toy

DataOf = Callable[[str], Path]


def pairs(data: Path, folder: Path) -> list[str]:
    folder.mkdir()
    for path in (*data.glob("*.bin"), *data.glob("*.idx")):
        (folder / path.name).symlink_to(path)
    return ["--raw-dir", str(folder)]


def unmarked(data: Path, folder: Path) -> list[str]:
    shutil.copytree(data.parent / "raw", folder)
    (folder / "SYNTHETIC").unlink()
    return ["--raw-dir", str(folder)]


CASES = {
    "llama31_8b": (pairs, "c4-train.en_6_text_document.bin has 4444 bytes, published are 83976774280"),
    "gpt3": (pairs, "published is 317a1c1b0b17fbd658e3e0b09d118ce9"),
    "retinanet": (unmarked, "published is 1170301"),
    "toy": (unmarked, "published is 524288"),
}
"""Workload to a function that changes its synthetic data, and the end of the message about the difference."""


@pytest.fixture(autouse=True, scope="module")
def toy_workload() -> Iterator[None]:
    with toy.known(pictures=False):
        yield


@pytest.fixture(scope="module")
def custom_of(data_of: DataOf, tmp_path_factory: pytest.TempPathFactory) -> DataOf:
    """Return a function that returns custom data of a workload."""
    made: dict[str, Path] = {}

    def find(workload: str) -> Path:
        if workload not in made:
            root = tmp_path_factory.mktemp(workload)
            options = CASES[workload][0](data_of(workload), root / "raw")
            arguments = ["prepare", f"benchmark={workload}", *options, "--data-dir", str(root / "data")]
            assert cli.run(arguments) == 0
            made[workload] = root / "data"
        return made[workload]

    return find


@pytest.mark.parametrize("workload", CASES)
def test_prepare_notes_the_first_difference_once(workload, custom_of, capsys):
    data = custom_of(workload)
    found = json.loads((data / "manifest.json").read_text())
    assert not found["synthetic"]
    assert found["custom"].endswith(CASES[workload][1])
    capsys.readouterr()
    assert cli.run(["verify", f"benchmark={workload}", "--data-dir", str(data)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{data}: custom data in place of ")
    assert [line for line in lines if line.endswith(f"the open division alone: {found['custom']}")] == [lines[1]]


@pytest.mark.parametrize("workload", CASES)
def test_the_closed_division_trains_on_the_benchmarks_data_alone(workload, custom_of, tmp_path, capsys):
    given = [f"benchmark={workload}", "scale=test", f"data_dir={custom_of(workload)}", f"output_dir={tmp_path / 'out'}"]
    given += ["benchmark.data_set=c4", "submission.division=closed"]
    assert cli.run(["train", *given]) == DataError.exit_code
    printed = capsys.readouterr().err
    assert CASES[workload][1] in printed
    assert "submission.division=open" in printed
    assert f"mlperf-suite download benchmark={workload}" in printed
    assert not (tmp_path / "out").exists()


OPEN = {
    "llama31_8b": ["benchmark.targets.log_perplexity.value=99"],
    "gpt3": ["benchmark.targets.log_perplexity.value=99"],
    "toy": ["benchmark.targets.mean_absolute_error.value=99"],
}
"""Workload to settings with which its first evaluation reaches the target."""
SMALL = {"llama31_8b": replace(CORPUS, vocabulary=256), "gpt3": replace(GPT3, vocabulary=400)}
"""Workload to its corpus with the vocabulary of the test recipe, for a small model."""


@pytest.mark.parametrize("workload", OPEN)
def test_the_open_division_logs_them_as_custom_and_check_gives_them_no_more_than_format(
    workload, custom_of, tmp_path, capsys
):
    data = custom_of(workload)
    if workload in SMALL:
        data = tmp_path / "data"
        preparation.prepare(custom_of(workload).parent / "raw", data, SMALL[workload])
    given = [f"benchmark={workload}", "scale=test", f"data_dir={data}", f"output_dir={tmp_path / 'out'}"]
    given += ["benchmark.data_set=c4", "submission.division=open", *OPEN[workload]]
    assert cli.run(["train", *given]) == 0
    capsys.readouterr()
    log = tmp_path / "out" / "mlperf.log"
    assert [event.value for event in read_log(log).all("data_set")] == ["custom"]
    assert cli.run(["check", str(log)]) == 0
    printed = capsys.readouterr().out
    assert ": FORMAT (" in printed
    assert "the data are custom, not the benchmark's: not an MLPerf result of any division" in printed


def published(data: Path) -> Published:
    """Return the checksums as if the pairs of ``data`` were the benchmark's."""
    return Published(
        files={
            path.name: PublishedFile(path.stat().st_size, digest(path, "md5"))
            for path in sorted((*data.glob("*.bin"), *data.glob("*.idx")))
        }
    )


@pytest.fixture
def benchmarks_own(data_of: DataOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with adopted pairs that have the published sizes and MD5 sums."""
    corpus = replace(CORPUS, published=published(data_of("llama31_8b")))
    monkeypatch.setattr("benchmarks.llama31_8b.prepare.COMMANDS", commands_for(corpus))
    options = pairs(data_of("llama31_8b"), tmp_path / "raw")
    arguments = ["benchmark=llama31_8b", *options, "--data-dir", str(tmp_path / "data")]
    assert cli.run(["prepare", *arguments]) == 0
    return tmp_path / "data"


def test_files_with_the_published_md5s_are_the_benchmarks(benchmarks_own, capsys):
    assert json.loads((benchmarks_own / "manifest.json").read_text())["custom"] == ""
    assert cli.run(["verify", "benchmark=llama31_8b", "--data-dir", str(benchmarks_own)]) == 0
    assert capsys.readouterr().out.endswith("as published: 4 files\n")


@pytest.mark.parametrize("claim", ["custom", "md5"])
def test_verify_refuses_a_manifest_that_claims_the_benchmarks_data(claim, custom_of, tmp_path, capsys):
    data = Path(shutil.copytree(custom_of("gpt3"), tmp_path / "data"))
    found = json.loads((data / "manifest.json").read_text())
    found["custom"] = ""
    if claim == "md5":
        for name, file in GPT3.published.files.items():
            found["files"][name]["md5"] = file.md5
    (data / "manifest.json").write_text(json.dumps(found))
    assert cli.run(["verify", "benchmark=gpt3", "--data-dir", str(data)]) == DataError.exit_code
    assert "317a1c1b0b17fbd658e3e0b09d118ce9" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["custom", "synthetic"])
def test_preparing_again_completes_the_manifest_of_an_older_version(kind, custom_of, data_of, tmp_path, capsys):
    source = custom_of("llama31_8b") if kind == "custom" else data_of("llama31_8b")
    data, raw = Path(shutil.copytree(source, tmp_path / "data")), source.parent / "raw"
    complete = json.loads((data / "manifest.json").read_text())
    older = {name: value for name, value in complete.items() if name != "custom"}
    older["files"] = {name: {**file, "md5": ""} for name, file in complete["files"].items()}
    (data / "manifest.json").write_text(json.dumps(older))
    before = {path.name: path.stat().st_mtime_ns for path in data.glob("*.bin")}
    assert cli.run(["verify", "benchmark=llama31_8b", "--data-dir", str(data)]) == DataError.exit_code
    assert "'mlperf-suite prepare' again" in capsys.readouterr().err
    arguments = ["prepare", "benchmark=llama31_8b", "--raw-dir", str(raw), "--data-dir", str(data)]
    assert cli.run(arguments) == 0
    assert json.loads((data / "manifest.json").read_text()) == complete
    assert {path.name: path.stat().st_mtime_ns for path in data.glob("*.bin")} == before


def test_data_that_an_older_version_marked_as_reduced_stay_no_benchmark_data(tmp_path):
    older = Manifest("x/1", {}, {"train_samples": 3}, True, {}, UNDECIDED)
    made = Published({"train_samples": 3}).settled(tmp_path, older, "prepare")
    assert (made.synthetic, made.custom.startswith("an older version")) == (False, True)
    assert Published({"train_samples": 3}).settled(tmp_path, replace(older, synthetic=False), "prepare").custom == ""


def test_a_changed_file_is_not_taken_over_from_an_older_version(custom_of, tmp_path, capsys):
    data = Path(shutil.copytree(custom_of("llama31_8b"), tmp_path / "data"))
    found = json.loads((data / "manifest.json").read_text())
    del found["custom"]
    for file in found["files"].values():
        del file["md5"]
    (data / "manifest.json").write_text(json.dumps(found))
    changed = data / f"{CORPUS.parts[0].name}.bin"
    changed.write_bytes(bytes(changed.stat().st_size))
    raw = custom_of("llama31_8b").parent / "raw"
    arguments = ["prepare", "benchmark=llama31_8b", "--raw-dir", str(raw), "--data-dir", str(data)]
    assert cli.run(arguments) == DataError.exit_code
    assert f"{changed}: SHA-256" in capsys.readouterr().err


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_every_workload_says_what_is_published(workload):
    package = WORKLOADS[workload].partition(":")[0].rpartition(".")[0]
    known = importlib.import_module(f"{package}.prepare").COMMANDS.published
    assert known.counts or known.files or known.known
