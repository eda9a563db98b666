"""Test ``generate``, ``prepare`` and ``verify`` of all workloads with the data of ``scale=test``."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import threading
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks import WORKLOADS
from common import cli
from common.data.manifest import NAME
from common.data.preparation import LOCK
from common.errors import DataError
from tests.conftest import ROOT, one_of_each_family

OTHER = {"bert": ["--articles", "399"]}
"""Options of other raw data; those of the other workloads have another seed."""
MORE = {"bert": ["--unpacked"], "stable_diffusion": ["--members", "moments"]}
"""Options with which a preparation has all stages."""
LINKED = ("flux1", "retinanet")
"""Workloads whose prepared samples are links to raw files, which take no space."""
pytestmark = pytest.mark.parametrize("workload", one_of_each_family(sorted(WORKLOADS)))


def run(command: str, workload: str, *options: object) -> None:
    assert cli.COMMANDS[command]([f"benchmark={workload}", *map(str, options)]) == 0


def prepare(workload: str, raw: Path, data: Path, *more: str) -> None:
    run("prepare", workload, "--raw-dir", raw, "--data-dir", data, "--workers", 1, *more)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in files(folder)}


def written(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is written or replaced, but not when it is read."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@pytest.fixture
def raw(workload, data_of):
    return data_of(workload).parent / "raw"


@pytest.fixture
def copied(workload, data_of, tmp_path):
    """Return prepared data whose files are links. A test must replace a file to change it."""
    return shutil.copytree(data_of(workload), tmp_path / "data", copy_function=os.link)


@pytest.mark.slow_cases("openfold")
def test_the_same_options_generate_the_same_bytes(workload, raw, tmp_path):
    run("generate", workload, "scale=test", "--raw-dir", tmp_path / "raw")
    assert contents(tmp_path / "raw") == contents(raw)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_a_used_folder_is_not_generated_into(workload, tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(DataError, match=rf"^{tmp_path} is not empty"):
        run("generate", workload, "scale=test", "--raw-dir", tmp_path)
    assert contents(tmp_path) == {"mine": b"mine"}


def test_synthetic_data_are_verified_as_such(workload, data_of, capsys):
    run("verify", workload, "--data-dir", data_of(workload))
    assert f"{data_of(workload)}: synthetic, " in capsys.readouterr().out
    assert not set(data_of(workload).parent.rglob("*.partial"))


def test_data_that_an_earlier_version_marked_as_synthetic_never_count_as_real(workload, raw, data_of, tmp_path):
    """Neither the former marker of raw data nor the former field of the manifest is ignored."""
    former = shutil.copytree(raw, tmp_path / "raw", copy_function=os.link)
    (former / "SYNTHETIC").rename(former / "STAND_IN")
    with pytest.raises(DataError, match=r"/STAND_IN marks synthetic data .*; rename this file to SYNTHETIC$"):
        prepare(workload, former, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()
    data = shutil.copytree(data_of(workload), tmp_path / "former", copy_function=os.link)
    text = (data / "manifest.json").read_text()
    (data / "manifest.json").unlink()
    (data / "manifest.json").write_text(text.replace('"synthetic": true', '"stand_in": true'))
    for use in (lambda: run("verify", workload, "--data-dir", data), lambda: prepare(workload, raw, data)):
        with pytest.raises(DataError, match="written by an earlier version: rename its field stand_in to synthetic: "):
            use()


def test_preparing_again_changes_nothing_and_says_how_to_replace_a_file(workload, raw, data_of, capsys):
    before = {path: written(path) for path in files(data_of(workload))}
    prepare(workload, raw, data_of(workload))
    assert (
        "was complete, and nothing was made. If a file is damaged, delete it and manifest.json"
        in capsys.readouterr().out
    )
    assert {path: written(path) for path in files(data_of(workload))} == before


def test_other_raw_data_are_refused(workload, copied, tmp_path):
    run("generate", workload, "scale=test", "--raw-dir", tmp_path / "raw", *OTHER.get(workload, ["--seed", "1"]))
    before = contents(copied)
    with pytest.raises(DataError, match="was prepared from other raw data; delete it or name another --data-dir"):
        prepare(workload, tmp_path / "raw", copied)
    assert contents(copied) == before


def test_a_lost_file_is_made_again_by_what_the_message_says(workload, raw, data_of, tmp_path, capsys):
    data = shutil.copytree(data_of(workload), tmp_path / "data")
    before, files = contents(data), json.loads((data / NAME).read_text())["files"]
    (data / max(files, key=lambda name: files[name]["bytes"])).unlink()
    with pytest.raises(DataError, match=rf"is missing though {NAME} names it; delete {NAME}, then run 'mlperf-suite "):
        prepare(workload, raw, data)
    (data / NAME).unlink()
    capsys.readouterr()
    prepare(workload, raw, data)
    assert "was complete" not in capsys.readouterr().out
    assert without_time(contents(data)) == without_time(before)


def test_two_preparations_at_once_are_refused(workload, raw, tmp_path):
    (tmp_path / "data").mkdir()
    with open(tmp_path / "data" / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is preparing"):
            prepare(workload, raw, tmp_path / "data")


def test_a_full_disk_is_noticed_before_the_work(workload, raw, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("common.data.preparation.shutil.disk_usage", lambda path: usage(1, 1, 0))
    refused = pytest.raises(DataError, match=r" needs \d+\.\d GB( more)?; its disk has 0\.0 GB left$")
    with nullcontext() if workload in LINKED else refused:
        prepare(workload, raw, tmp_path / "data")


@pytest.mark.slow_cases("bert", "minigo", "openfold")
def test_a_killed_preparation_continues_to_the_same_bytes(workload, raw, tmp_path):
    """The first process is killed after a quarter of the calls. A later one may need too few calls to be killed."""
    whole, data = tmp_path / "whole", tmp_path / "data"
    calls = killed_after(None, workload, raw, whole)
    for number, share in enumerate((0.25, 0.5, 0.75)):
        made = killed_after(int(share * calls), workload, raw, data)
        assert made < calls if number else made == 0 and not (data / NAME).exists()
    prepare(workload, raw, data, *MORE.get(workload, ()))
    assert without_time(contents(data)) == without_time(contents(whole))
    assert not set(tmp_path.rglob("*.partial"))


def killed_after(calls: int | None, workload: str, raw: Path, data: Path) -> int:
    """Prepare in another process, and kill it at a number of calls. Return the number of its calls, or 0 if it was
    killed."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        count = 0

        def profile(frame, event, argument):
            nonlocal count
            if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
                count += 1
                if count == calls:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            torch.set_num_threads(1)  # the threads of the parent's operations do not exist here
            threading.setprofile(profile)
            sys.setprofile(profile)
            prepare(workload, raw, data, *MORE.get(workload, ()))
            os.write(writing, str(count).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) in (-signal.SIGKILL, 0)
    with open(reading) as pipe:
        return int(pipe.read() or 0)


def without_time(files: dict[str, bytes]) -> dict[str, object]:
    described = json.loads(files[NAME])
    del described["source"]["prepared"]
    return {**files, NAME: described}


def test_verify_finds_a_changed_byte(workload, copied):
    files = json.loads((copied / NAME).read_text())["files"]
    for name in sorted(name for name in files if (copied / name).stat().st_size)[:3]:
        whole = (copied / name).read_bytes()
        (copied / name).unlink()
        (copied / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(DataError, match=Path(name).name):
            run("verify", workload, "--data-dir", copied)
        (copied / name).write_bytes(whole)
