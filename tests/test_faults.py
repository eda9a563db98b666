"""Test that full disks, bad checkpoints and failing ranks end a run in time, with one message and no partial file."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from common.mlperf.verdict import judge
from tests import toy
from tests.command_line import (
    PROGRESS,
    assert_closed_as_aborted,
    await_that,
    descendants,
    endless,
    events,
    finish,
    launcher,
    rank_process,
    started,
    the_message,
    training,
)
from tests.conftest import SECONDS, Finished, suite

TIMEOUT_SECONDS = 8  # of the ranks in these tests; healthy ones are never silent as long, on a busy machine either
END_SECONDS = 60  # within which a process that was killed is gone
ERROR, CHECKPOINT, RANK_FAILURE = 1, 4, 7  # exit codes
LARGE = "model.width=1024"
"""Override with which a checkpoint has more than 500 kB."""


# Full disks. A limit on the size of a file fails a write in the same way on every machine.


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_does_not_fit_leaves_nothing_and_closes_the_log(ranks, data_of, tmp_path):
    output = tmp_path / "out"
    overrides = ["checkpoint_every=2", LARGE, f"scale.gpus_per_node={ranks}"]
    with started(training(data_of(toy.NAME), output, *overrides), file_size=200_000) as process:
        done = finish(process, SECONDS)
    message = the_message(done)
    assert done.code == CHECKPOINT, message
    assert "step_00000002" in message
    assert "rank 0: " in message  # the one that writes model and optimizer
    assert "File too large" in message
    assert list((output / "checkpoints").iterdir()) == []
    assert_closed_as_aborted(output / "mlperf.log")


def test_an_earlier_checkpoint_survives_one_that_does_not_fit(data_of, tmp_path):
    output = tmp_path / "out"
    kept = suite(*training(data_of(toy.NAME), output, LARGE, "checkpoint_every=2", "benchmark.schedule.last_epoch=1"))
    assert kept.code in (0, 10), kept.errors
    before = {path: path.read_bytes() for path in (output / "checkpoints").rglob("*.pt")}
    assert before
    (output / "mlperf.log").unlink()
    with started(training(data_of(toy.NAME), output, LARGE, "checkpoint_every=2"), file_size=200_000) as process:
        done = finish(process, SECONDS)
    assert done.code == CHECKPOINT, done.errors
    assert {path: path.read_bytes() for path in (output / "checkpoints").rglob("*.pt")} == before


def test_a_log_that_does_not_fit_ends_the_run_after_its_last_whole_line(data_of, tmp_path):
    output = tmp_path / "out"
    with started(training(data_of(toy.NAME), output), file_size=6_000) as process:
        done = finish(process, SECONDS)
    message = the_message(done)
    assert done.code == ERROR, message
    assert "File too large" in message
    assert "log" in message
    assert len(events(output / "mlperf.log")) > 10
    assert judge(output / "mlperf.log").kind == "refused"


def test_a_full_disk_keeps_no_part_of_a_checkpoint(data_of, tmp_path):
    mounting = _mount_command(tmp_path)
    folder, copy = tmp_path / "disk", tmp_path / "copy"
    script = f'mount -t tmpfs -o size=400k none "{folder}" && "$@"; code=$?; cp -a "{folder}/." "{copy}"; exit $code'
    arguments = training(data_of(toy.NAME), folder / "out", LARGE, "checkpoint_every=2")
    with started([*launcher(arguments), *arguments], command=[*mounting, "sh", "-c", script, "sh"]) as process:
        done = finish(process, SECONDS)
    message = the_message(done)
    assert done.code == CHECKPOINT, message
    assert "No space left on device" in message
    assert list((copy / "out" / "checkpoints").iterdir()) == []
    assert_closed_as_aborted(copy / "out" / "mlperf.log")


def _mount_command(tmp_path: Path) -> list[str]:
    """Return a command prefix that allows this user to mount; skip the test if there is none."""
    for name in ("disk", "copy"):
        (tmp_path / name).mkdir()
    for command in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        trial = [*command, "mount", "-t", "tmpfs", "none", str(tmp_path / "disk")]
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run(trial, capture_output=True, check=False).returncode == 0:
                return command
    pytest.skip("mounting a small disk is not permitted here")


# Checkpoints that are none, or another run's.


@pytest.fixture(scope="module")
def saved(data_of, tmp_path_factory) -> dict[int, Path]:
    """Return checkpoints by the number of ranks of their run."""
    root = tmp_path_factory.mktemp("saved")

    def save(ranks: int) -> Path:
        output = root / str(ranks)
        overrides = ["checkpoint_every=2", "benchmark.schedule.last_epoch=1", f"scale.gpus_per_node={ranks}"]
        done = suite(*training(data_of(toy.NAME), output, *overrides))
        assert done.code in (0, 10), done.errors
        return max((output / "checkpoints").iterdir())

    data_of(toy.NAME)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip((1, 2), pool.map(save, (1, 2)), strict=True))


def _halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _replace(file: Path) -> None:
    file.write_text("not a checkpoint")


@pytest.mark.parametrize("spoil", [_halve, _empty, _replace])
def test_resuming_from_a_damaged_file(spoil, saved, data_of, tmp_path):
    folder = shutil.copytree(saved[1], tmp_path / "step")
    spoil(folder / "rank_0.pt")
    message = _refused(tmp_path, data_of(toy.NAME), f"resume={folder}")
    assert str(folder / "rank_0.pt") in message
    assert "unreadable" in message


def test_resuming_from_a_folder_that_is_no_checkpoint(data_of, tmp_path):
    (tmp_path / "folder").mkdir()
    message = _refused(tmp_path, data_of(toy.NAME), f"resume={tmp_path / 'folder'}")
    assert f"resume={tmp_path / 'folder'}: no checkpoint there" in message


@pytest.mark.parametrize(("written", "started_with"), [(1, 2), (2, 1)])
def test_resuming_on_another_number_of_ranks_says_what_starts_anew(written, started_with, saved, data_of, tmp_path):
    overrides = [f"resume={saved[written]}", f"scale.gpus_per_node={started_with}"]
    done = suite(*training(data_of(toy.NAME), tmp_path / "out", *overrides), timeout=SECONDS)
    assert done.code in (0, 10), done.errors
    assert f"is of {written} replicas, this run has {started_with}" in done.errors


@pytest.mark.parametrize(
    ("override", "differs"),
    [
        ("micro_batch=4", "micro_batch=8, this run has micro_batch=4"),
        ("hparams.global_batch_size=32", "hparams.global_batch_size=16, this run has hparams.global_batch_size=32"),
        ("seed=1235", "seed=1234, this run has seed=1235"),
    ],
)
def test_resuming_with_settings_under_which_the_position_means_other_samples(
    override, differs, saved, data_of, tmp_path
):
    assert differs in _refused(tmp_path, data_of(toy.NAME), f"resume={saved[1]}", override)


def test_resuming_with_other_settings_names_them(saved, data_of, tmp_path):
    changed = ["hparams.weight_decay=0.25", "deterministic=true", "optimizer.bucket_mb=8", "submission.org=Other"]
    done = suite(*training(data_of(toy.NAME), tmp_path / "out", f"resume={saved[1]}", *changed), timeout=SECONDS)
    assert done.code in (0, 10), done.errors
    (remark,) = [line for line in done.errors.splitlines() if "other settings" in line]
    named = set(re.findall(r"(\S+) instead of \S+", remark))
    assert named == {*changed[:2], "optimizer.bucket_mb=8.0", changed[3], "benchmark.schedule.last_epoch=20"}
    assert "deterministic=true instead of false" in remark


def test_resuming_with_another_width_of_the_model(saved, data_of, tmp_path):
    message = _refused(tmp_path, data_of(toy.NAME), f"resume={saved[1]}", "model.width=24")
    # 16 and 24 units on 4 x 4 x 4 voxels
    assert "torch.Size([16, 64])" in message
    assert "torch.Size([24, 64])" in message


def _refused(tmp_path: Path, data: Path, *overrides: str) -> str:
    done = suite(*training(data, tmp_path / "out", *overrides), timeout=SECONDS)
    message = the_message(done)
    assert done.code == CHECKPOINT, message
    assert not list(tmp_path.glob("out/mlperf.log")), "a run that resumes has a log of another name"
    assert "run_start" not in "".join(path.read_text() for path in tmp_path.glob("out/*.log"))
    return message


# Ranks that fail.


def _fault(data: Path, output: Path, signum: signal.Signals) -> tuple[Finished, list[psutil.Process]]:
    """Send ``signum`` to rank 1 of 2 in training. Return the result of the run, and its remaining processes."""
    arguments = endless(data, output, "scale.gpus_per_node=2", f"timeout_seconds={TIMEOUT_SECONDS}")
    with started(arguments) as process:
        # Each rank reports its progress to the others ten times per timeout.
        await_that(lambda: _seconds_of_steps(output / "metrics_rank1.jsonl") > TIMEOUT_SECONDS / 5, process)
        family = descendants(process.pid)
        rank_process(process.pid, 1).send_signal(signum)
        done = finish(process, SECONDS)
        _, alive = psutil.wait_procs(family, timeout=END_SECONDS)
    return done, alive


def _seconds_of_steps(metrics: Path) -> float:
    """Return the time between the first and the last step in ``metrics``."""
    text = metrics.read_text() if metrics.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last line may be half written
    return json.loads(lines[-1])["time"] - json.loads(lines[0])["time"] if lines else 0.0


def _messages(done: Finished) -> list[str]:
    """Return the lines on standard error, except those of a healthy run."""
    assert "Traceback" not in done.errors, done.errors
    return [line for line in done.errors.splitlines() if not PROGRESS.fullmatch(line)]


def test_a_rank_that_is_killed_ends_the_run_and_is_named(data_of, tmp_path):
    done, alive = _fault(data_of(toy.NAME), tmp_path / "out", signal.SIGKILL)
    assert done.code == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in the_message(done)
    assert not alive


@pytest.mark.slow
def test_a_rank_that_stops_ends_the_run_and_is_named(data_of, tmp_path):
    done, alive = _fault(data_of(toy.NAME), tmp_path / "out", signal.SIGSTOP)
    assert done.code == RANK_FAILURE, done.errors
    error, where = _messages(done)
    assert error.startswith("error: rank 1 gives no sign of life")
    assert re.search(r"step \d+, phase", error)
    assert "stacks_rank0.txt" in where
    assert "Thread" in (tmp_path / "out" / "stacks_rank0.txt").read_text()
    assert not alive


def test_a_collective_that_one_rank_skips_ends_the_run_and_says_where_each_rank_waits(data_of, tmp_path):
    output, step = tmp_path / "out", 4
    # Rank 1 goes on to the checkpoint's collective while rank 0 waits in the report's.
    overrides = ["scale.gpus_per_node=2", f"timeout_seconds={TIMEOUT_SECONDS}", f"checkpoint_every={step}"]
    command = [sys.executable, "-m", "tests.skip_a_collective", str(step)]
    with started(endless(data_of(toy.NAME), output, *overrides), command=command) as process:
        await_that(lambda: (output / "mlperf.log").exists(), process)
        family = descendants(process.pid)
        done = finish(process, SECONDS)
        _, alive = psutil.wait_procs(family, timeout=END_SECONDS)
    assert done.code == RANK_FAILURE, done.errors
    messages = _messages(done)
    assert len(messages) == 3, done.errors
    assert "skipped a collective" in messages[0]
    for rank, file in enumerate(("step.py", "checkpoint.py")):
        assert f"rank {rank} " in messages[rank]
        assert f"step {step}," in messages[rank]
        assert file in messages[rank]
    assert not alive
