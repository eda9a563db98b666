"""The launcher with tiny scripts as ranks: exit codes, one message, signals, and the store it hosts."""

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from common.distributed import launcher
from common.distributed.launcher import relaunch
from common.errors import NOT_CONVERGED, Interrupted

# The ranks don't import torch, so that they start at once.
PRELUDE = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
"""


# After the first rank ended, the launcher sends the others SIGCONT last of all it sends.
HOLD_SIGCONT = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})"
WAIT_FOR_THE_LAUNCHER = "signal.sigwait({signal.SIGCONT})"


def launch(body, nproc=2, grace_seconds=200.0, argv=()):
    return relaunch(nproc, list(argv), command=[sys.executable, "-c", PRELUDE + body], grace_seconds=grace_seconds)


def test_all_ranks_succeed(capfd):
    # One write a line: the ranks share the output.
    line = "f\"{rank} {os.environ['WORLD_SIZE']} {os.environ['LOCAL_RANK']} {sys.argv[1]}\\n\""
    assert launch(f"os.write(1, {line}.encode())", argv=["a=1"]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["0 2 0 a=1", "1 2 1 a=1"]
    assert err == ""


def test_own_exit_code_is_returned_without_a_second_message(capfd):
    assert launch("if rank == 1: sys.exit(5)\ntime.sleep(200)") == 5
    assert capfd.readouterr().err == ""


def test_a_target_that_was_not_reached_is_no_failure_and_the_others_end_by_themselves(capfd, tmp_path):
    # Rank 1 writes after rank 0, which alone tells the result, has ended; SIGTERM would cut it off.
    body = f"""
{HOLD_SIGCONT}
ready, written = (os.path.join(sys.argv[1], name) for name in ("ready", "written"))
if rank == 0:
    while not os.path.exists(ready): time.sleep(0.01)
    sys.exit({NOT_CONVERGED})
open(ready, "w").close()
{WAIT_FOR_THE_LAUNCHER}
open(written, "w").close()
"""
    assert launch(body, argv=[str(tmp_path)]) == NOT_CONVERGED
    assert (tmp_path / "written").exists()
    assert capfd.readouterr().err == ""


def test_foreign_exit_code_is_reported_once(capfd):
    assert launch("if rank == 1: sys.exit(42)\ntime.sleep(200)", nproc=3) == 42
    assert capfd.readouterr().err == "error: rank 1 ended with exit code 42; the other ranks are being stopped\n"


def test_a_killed_rank_is_named_with_its_signal(capfd):
    assert launch("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(200)") == 128 + signal.SIGKILL
    err = capfd.readouterr().err
    assert err.startswith("error: rank 1 was killed by SIGKILL")
    assert err.count("\n") == 1


def test_the_first_failure_is_named_although_a_rank_that_lost_it_was_seen_before(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "SETTLE_SECONDS", 200.0)
    # A process that ended is there until the launcher has asked after it.
    body = """
path = os.path.join(sys.argv[1], "pid")
if rank == 0:
    open(path + ".tmp", "w").write(str(os.getpid())); os.rename(path + ".tmp", path)
    sys.exit(9)
while not os.path.exists(path): time.sleep(0.01)
while os.path.exists("/proc/" + open(path).read()): time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert launch(body, argv=[str(tmp_path)]) == 128 + signal.SIGKILL
    err = capfd.readouterr().err
    assert err.startswith("error: rank 1 was killed by SIGKILL")
    assert err.count("\n") == 1


def test_a_lost_peer_without_a_cause_is_still_one_message(capfd):
    assert launch("if rank == 0: sys.exit(9)") == 7
    assert capfd.readouterr().err.startswith("error: rank 0 lost the connection to another rank")


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace_period(tmp_path):
    body = """
ready, outlived = (os.path.join(sys.argv[1], name) for name in ("ready", "outlived"))
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(ready, "w").close()
else:
    while not os.path.exists(ready): time.sleep(0.01)
    sys.exit(42)
time.sleep(200)
open(outlived, "w").close()
"""
    assert launch(body, grace_seconds=1.0, argv=[str(tmp_path)]) == 42
    assert (tmp_path / "ready").exists()
    assert not (tmp_path / "outlived").exists()


def test_a_stopped_rank_does_not_hold_the_group(capfd):
    body = "if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)\nelse: sys.exit(7)\ntime.sleep(200)"
    assert launch(body) == 7
    assert capfd.readouterr().err == ""


@contextlib.contextmanager
def signal_when_ready(folder, signum):
    """Send this process, which launches two ranks meanwhile, a signal once both have made a file in ``folder``."""

    def send():
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signum)

    sender = threading.Thread(target=send)
    sender.start()
    yield
    sender.join()


SAY_READY = """
open(os.path.join(sys.argv[1], str(rank)), "w").close()
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_forwarded_and_a_clean_stop_is_a_success(tmp_path, signum):
    body = f"""
signal.signal({int(signum)}, lambda *_: sys.exit(0))
{SAY_READY}
time.sleep(200)
"""
    with signal_when_ready(tmp_path, signum):
        assert launch(body, argv=[str(tmp_path)]) == 0
    assert signal.getsignal(signum) is not None


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_is_printed_about_ranks_that_a_forwarded_signal_stopped(tmp_path, capfd, signum, code):
    body = f"""
signal.signal({int(signum)}, lambda *_: sys.exit({code}))
{SAY_READY}
time.sleep(200)
"""
    with signal_when_ready(tmp_path, signum):
        assert launch(body, argv=[str(tmp_path)]) == code
    assert capfd.readouterr().err == ""


def test_after_a_forwarded_signal_a_rank_that_ended_does_not_hurry_the_others(tmp_path, capfd):
    # Rank 0 still writes when rank 1 has ended; a second SIGTERM would end it there.
    body = f"""
{HOLD_SIGCONT}
def stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if rank == 0:
        {WAIT_FOR_THE_LAUNCHER}
        open(os.path.join(sys.argv[1], "written"), "w").close()
    sys.exit({Interrupted.exit_code})
signal.signal(signal.SIGTERM, stop)
{SAY_READY}
time.sleep(200)
"""
    with signal_when_ready(tmp_path, signal.SIGTERM):
        assert launch(body, argv=[str(tmp_path)]) == Interrupted.exit_code
    assert (tmp_path / "written").exists()
    assert capfd.readouterr().err == ""


def test_ranks_that_survive_a_forwarded_signal_are_killed_after_the_grace_period(tmp_path):
    body = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == 0 else lambda *_: sys.exit({Interrupted.exit_code}))
{SAY_READY}
time.sleep(200)
open(os.path.join(sys.argv[1], "outlived"), "w").close()
"""
    with signal_when_ready(tmp_path, signal.SIGTERM):
        assert launch(body, grace_seconds=1.0, argv=[str(tmp_path)]) == Interrupted.exit_code
    assert not (tmp_path / "outlived").exists()


def test_the_store_is_served_by_the_launcher(tmp_path):
    body = """
path = os.path.join(sys.argv[1], "port")
if rank == 0:
    open(path + ".tmp", "w").write(os.environ["MASTER_PORT"]); os.rename(path + ".tmp", path)
while not os.path.exists(os.path.join(sys.argv[1], "done")): time.sleep(0.01)
"""
    values = []

    def use_store():
        while not (tmp_path / "port").exists():
            time.sleep(0.01)
        port = int((tmp_path / "port").read_text())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=200))
        store.set("key", "value")
        values.append(store.get("key"))
        (tmp_path / "done").touch()

    user = threading.Thread(target=use_store)
    user.start()
    assert launch(body, argv=[str(tmp_path)]) == 0
    user.join()
    assert values == [b"value"]
