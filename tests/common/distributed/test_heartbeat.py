"""Real ranks that stop, sleep, die or skip a collective: every run ends with one message that names the rank."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import heartbeat_ranks
import pytest
import torch.distributed as dist

from common.distributed.diagnosis import View
from common.distributed.faults import GracefulStop, Heartbeat, lost_peer
from common.distributed.rank_info import RankInfo
from common.distributed.status_store import SharedStatusStore, StatusFiles
from common.errors import Interrupted, RankFailure
from tests.forked import FORKS

END_SECONDS = 200  # A run that does not hang ends within, on a busy machine too.


class Job:
    """Exit codes and messages of the ranks of one run."""

    def __init__(self, folder, fault, world_size, launcher_store):
        is_master = launcher_store
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=200)
        )
        port = self.store.port
        if not is_master:
            self.store = None  # Frees the port for rank 0.
        arguments = [(rank, world_size, port, str(folder), fault, launcher_store) for rank in range(world_size)]
        self.ranks = [FORKS.Process(target=heartbeat_ranks.run, args=given) for given in arguments]
        for process in self.ranks:
            process.start()
        self.folder = folder

    def finish(self, stopped=()):
        deadline = time.monotonic() + END_SECONDS
        for rank, process in enumerate(self.ranks):
            if rank not in stopped:
                process.join(max(0.1, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.ranks]
        for process in self.ranks:
            process.kill()
            process.join()
        return codes

    def messages(self):
        text = "".join((self.folder / f"stderr{rank}").read_text() for rank in range(len(self.ranks)))
        return text, [line for line in text.splitlines() if line.startswith("error:")]


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(fault, world_size=2, launcher_store=True):
        jobs.append(Job(tmp_path, fault, world_size, launcher_store))
        return jobs[-1]

    yield start
    for started in jobs:
        for process in started.ranks:
            process.kill()


def test_a_healthy_run_ends_without_a_word(job):
    run = job("none")
    assert run.finish() == [0, 0]
    assert run.messages()[1] == []


def test_ranks_may_wait_for_one_in_an_extended_phase(job):
    run = job("long evaluation")
    assert run.finish() == [0, 0]
    assert run.messages()[1] == []


@pytest.mark.slow
def test_a_stopped_rank_is_named(job, tmp_path):
    run = job("stop", world_size=3)
    codes = run.finish(stopped=[1])
    text, errors = run.messages()
    assert [codes[0], codes[2]] == [RankFailure.exit_code] * 2, text
    assert len(errors) == 1, text
    assert "rank 1 gives no sign of life" in errors[0]
    assert f"last heard of: step {heartbeat_ranks.FAULTY_STEP}, phase 'train'" in errors[0], text
    assert "all_reduce" in (tmp_path / "stacks_rank0.txt").read_text()
    assert (tmp_path / "stacks_rank2.txt").exists()


def test_a_rank_stuck_outside_of_collectives_is_named_with_its_line(job, tmp_path):
    run = job("sleep")
    codes = run.finish()
    text, errors = run.messages()
    assert codes == [RankFailure.exit_code] * 2, text
    assert len(errors) == 1, text
    assert "rank 1 makes no progress" in errors[0]
    assert "heartbeat_ranks.py" in errors[0]
    assert "_meet" in (tmp_path / "stacks_rank1.txt").read_text()


def test_a_rank_that_skipped_a_collective_is_named(job):
    run = job("skip", world_size=3)
    codes = run.finish()
    text, errors = run.messages()
    assert codes == [RankFailure.exit_code] * 3, text
    assert len(errors) == 1, text
    assert "rank 1 skipped a collective" in errors[0], text
    assert "ranks 0, 2 wait in step 5, barrier from" in errors[0], text


@pytest.mark.slow
def test_a_rank_in_another_collective_is_named(job):
    run = job("other collective", world_size=3)
    codes = run.finish()
    text, errors = run.messages()
    assert codes == [RankFailure.exit_code] * 3, text
    assert len(errors) == 1, text
    assert errors[0].startswith("error: rank 1 "), text


def test_a_stopped_host_of_the_store_is_named_by_the_survivors(job):
    run = job("stop rank 0", launcher_store=False)
    codes = run.finish(stopped=[0])
    text, errors = run.messages()
    assert codes[1] == RankFailure.exit_code, text
    assert len(errors) == 1, text
    assert "rank 0, which hosts the store" in errors[0]


def test_nobody_is_blamed_for_a_store_that_does_not_answer(tmp_path):
    """Ranks were last heard of up to an interval before the store's last answer: their silence must not count first."""
    heartbeat = Heartbeat(RankInfo(1, 3, 1, 3, 0, "torchrun"), tmp_path, 6.0)
    heartbeat._status = SharedStatusStore(dist.HashStore(), 6.0)
    now = time.monotonic()
    heartbeat._exchanged = now
    heartbeat._state = (4, "train", now)
    for rank in (0, 2):
        view = View(rank, 4, 4, "train", beat_age=1.0, silence=0.0, allowance=6.0)
        heartbeat._peers[rank] = (view, now - 0.5)
    assert [heartbeat._diagnose(now + late) for late in (0.0, 4.9, 5.1, 5.6, 6.0)] == [None] * 5
    diagnosis = heartbeat._diagnose(now + 6.1)
    assert diagnosis.ranks == (0,)
    assert "hosts the store" in diagnosis.text
    heartbeat._exchanged = now + 6.1  # It answers, and still nothing new: now it is their silence.
    silent = heartbeat._diagnose(now + 6.2)
    assert silent.ranks == (0, 2)


def test_a_dead_rank_fails_the_collective_of_the_others_with_one_line(job):
    run = job("die")
    codes = run.finish()
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None)
    text, _ = run.messages()
    reason = next(line for line in text.splitlines() if line.startswith("RuntimeError") or "Error:" in line)
    assert lost_peer(RuntimeError(reason), 0) is not None, text


def test_a_single_rank_watches_itself(tmp_path):
    process = FORKS.Process(target=heartbeat_ranks.run_alone, args=(str(tmp_path),))
    process.start()
    process.join(END_SECONDS)
    assert process.exitcode == RankFailure.exit_code
    assert "rank 0 makes no progress" in (tmp_path / "stderr0").read_text()


def test_stop_before_start_and_zero_timeout_do_nothing(tmp_path):
    heartbeat = Heartbeat(RankInfo(0, 1, 0, 1, 0, "single"), tmp_path, 0)
    heartbeat.start()
    heartbeat.beat(1, "train")
    heartbeat.stop()
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_not_lost_peers():
    assert lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 0) is None
    assert lost_peer(KeyError("Connection closed"), 0) is None


def test_the_first_signal_only_sets_a_flag():
    with GracefulStop() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        assert stop.signal == signal.SIGTERM


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_has_the_exit_code_of_its_signal(signum, code):
    error = Interrupted("stopped")
    with contextlib.suppress(Interrupted), GracefulStop():
        signal.raise_signal(signum)
        raise error
    assert error.exit_code == code


@pytest.mark.usefixtures("interrupting_sigint")
def test_the_second_signal_has_its_default_action():
    with GracefulStop():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ranks_with_equal_process_ids_agree_on_the_first_claim(tmp_path, monkeypatch):
    """The second rank claims between the first rank's write and its link."""
    first, second = StatusFiles(tmp_path), StatusFiles(tmp_path)
    link, answers = os.link, []

    def link_later(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        answers.append(second.claim("verdict", b"second"))
        link(source, target)

    monkeypatch.setattr(os, "link", link_later)
    answers.append(first.claim("verdict", b"first"))
    assert answers == [b"second", b"second"]
    assert [path.name for path in tmp_path.iterdir()] == ["verdict"]


def test_values_are_read_in_order_and_missing_ones_are_none(tmp_path):
    store = StatusFiles(tmp_path / "store")
    store.post("a", b"1")
    store.post("a", b"2")
    assert store.read(["b", "a"]) == [None, b"2"]
