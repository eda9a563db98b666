"""How a process ends that is a rank."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.distributed.rank_info import RankInfo
from common.errors import NOT_CONVERGED

PROGRAM = f"""
import atexit, ctypes, json, os, sys
from datetime import timedelta
from types import SimpleNamespace
import torch
import torch.distributed as dist
from common.distributed import job_store
from common.distributed.startup import leave
from common.distributed.rank_info import RankInfo

for line in sys.stdin:
    output, errors, work = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        break
    print(os.waitpid(child, 0)[1], flush=True)
else:
    sys.exit()

class Held:
    def __del__(self):
        print("the interpreter is taken down", flush=True)

held = Held()
atexit.register(print, "an exit handler ran")
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))

def in_a_job():
    job_store.join(store, {RankInfo(0, 2, 0, 2, 0, "torchrun")!r})
    job_store.leave()

exec("def work():\\n    " + work)
leave(work)
"""
"""Does each work that standard input names in a child, which ends as the program does. PyTorch is imported once."""

Ended = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def program() -> Iterator[subprocess.Popen[str]]:
    """The program that has imported everything."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.communicate(timeout=120)


@pytest.fixture
def ended(program: subprocess.Popen[str], tmp_path: Path) -> Ended:
    """A function that has a process do some work, and returns how it ended."""

    def run(work: str) -> subprocess.CompletedProcess[str]:
        assert program.stdin is not None
        assert program.stdout is not None
        streams = [tmp_path / "output", tmp_path / "errors"]
        program.stdin.write(json.dumps([*map(str, streams), work]) + "\n")
        program.stdin.flush()
        code = os.waitstatus_to_exitcode(int(program.stdout.readline()))
        return subprocess.CompletedProcess([work], code, *(stream.read_text() for stream in streams))

    return run


def test_a_process_alone_ends_as_any_program(ended):
    process = ended("return 7")
    assert process.returncode == 7
    assert process.stdout.splitlines() == ["an exit handler ran", "the interpreter is taken down"]


@pytest.mark.parametrize("code", [0, 7])
def test_a_rank_is_gone_after_its_exit_handlers(ended, code):
    process = ended(f"in_a_job(); return {code}")
    assert process.returncode == code
    assert process.stdout.splitlines() == ["an exit handler ran"]


FLUSH = """torch.cuda.is_initialized = lambda: True
    torch.cuda.cudart = lambda: SimpleNamespace(cudaProfilerStop=lambda: print("profiled"))
    in_a_job()
    return """


@pytest.mark.parametrize(("code", "flushed"), [(0, ["profiled"]), (NOT_CONVERGED, ["profiled"]), (7, [])])
def test_profilers_flush_their_buffers_after_a_successful_run(ended, code, flushed):
    process = ended(f"{FLUSH}{code}")
    assert process.returncode == code
    assert process.stdout.splitlines() == [*flushed, "an exit handler ran"]


@pytest.mark.parametrize("before", ["", "in_a_job(); "])
def test_an_exception_is_shown_and_ends_with_1(ended, before):
    process = ended(f"{before}raise ValueError('a broken table')")
    assert process.returncode == 1
    assert process.stderr.count("ValueError: a broken table") == 1
    assert "Traceback" in process.stderr


@pytest.mark.parametrize(
    ("how", "code", "stderr"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(10)", 10, ""),
        ("sys.exit('no such table')", 1, "no such table"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_a_rank_that_calls_exit_runs_its_exit_handlers(ended, how, code, stderr):
    process = ended(f"in_a_job(); {how}")
    assert process.returncode == code
    assert process.stdout.splitlines() == ["an exit handler ran"]
    assert process.stderr.strip().endswith(stderr)


def test_a_crash_prints_its_traceback(ended):
    process = ended("ctypes.string_at(0)")
    assert process.returncode < 0
    assert "Segmentation fault" in process.stderr
    assert "in work" in process.stderr
