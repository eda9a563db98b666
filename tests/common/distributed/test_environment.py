"""Variables of the environment that cannot be used: one message, in every command that may be a rank."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable

import pytest
import torch

from common.distributed import startup
from common.distributed.startup import expand_nodelist, find_rank_info
from common.errors import ConfigError, RankFailure
from tests.command_line import the_message, training
from tests.conftest import suite

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_CPUS_PER_TASK": "1",
}
TRAIN = tuple(training("data", "out", "scale.gpus_per_node=2"))
BENCH = ("bench", *TRAIN[1:])
DOCTOR = ("doctor", "--quick", "--timeout", "5")
MEASURE = ("measure", "--gpus=1", "--override=device=cpu", "resnet")
NO_INTEGERS = ["abc", "", "-1", "1.5", "1_0", " 1", "²", "٣", "9" * 5000]


@pytest.mark.parametrize(
    ("command", "variables", "named"),
    [
        (TRAIN, TORCHRUN | MEETING | {"MASTER_PORT": "abc"}, "MASTER_PORT='abc'"),
        (DOCTOR, TORCHRUN | MEETING | {"MASTER_PORT": "99999"}, "MASTER_PORT='99999'"),
        (BENCH, TORCHRUN | MEETING | {"MASTER_PORT": ""}, "MASTER_PORT=''"),
        (TRAIN, TORCHRUN | MEETING | {"MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        (DOCTOR, TORCHRUN | MEETING | {"MASTER_ADDR": "127.0.0.1:29500"}, "MASTER_ADDR='127.0.0.1:29500'"),
        (DOCTOR, TORCHRUN | MEETING | {"MASTER_ADDR": "n" * 64}, f"MASTER_ADDR='{'n' * 64}'"),
        (DOCTOR, TORCHRUN | MEETING | {"GLOO_SOCKET_IFNAME": "nope0"}, "GLOO_SOCKET_IFNAME='nope0'"),
        (MEASURE, TORCHRUN | {"RANK": "abc"}, "RANK='abc'"),
        (DOCTOR, SLURM | {"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID='x'"),
        (TRAIN, TORCHRUN | MEETING | {"MLPERF_SUITE_LAUNCHER_PID": "me"}, "MLPERF_SUITE_LAUNCHER_PID='me'"),
        (TRAIN, {"MLPERF_CACHE_CLEARED": "{"}, "the environment variable MLPERF_CACHE_CLEARED is '{'"),
    ],
    ids=[
        "port-text", "port-large", "port-empty", "address-empty", "address-with-port", "address-unencodable",
        "interface", "rank-of-measure", "slurm-job", "launcher", "configuration",
    ],
)  # fmt: skip
def test_a_variable_that_cannot_be_used_is_named_with_its_value(command, variables, named, tmp_path):
    done = suite(*command, cwd=tmp_path, **variables)
    assert done.code == ConfigError.exit_code, done.errors
    assert the_message(done).count(named) == 1


@pytest.mark.parametrize("value", NO_INTEGERS, ids=range(len(NO_INTEGERS)))
@pytest.mark.parametrize("name", [name for name in SLURM if name not in ("SLURM_STEP_NODELIST", "SLURM_JOB_ID")])
def test_every_variable_of_slurm_must_be_an_integer(name, value, monkeypatch):
    for each, text in (SLURM | {name: value, "OMP_NUM_THREADS": "", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(each, text)
    with pytest.raises(ConfigError, match=f"^{name}={re.escape(repr(value))}"):
        startup._threads(find_rank_info(SLURM | {name: value}), 1, torch.device("cpu"))


@pytest.mark.parametrize("value", NO_INTEGERS, ids=range(len(NO_INTEGERS)))
@pytest.mark.parametrize("name", TORCHRUN)
def test_every_variable_of_torchrun_must_be_an_integer(name, value):
    with pytest.raises(ConfigError, match=f"^{name}={re.escape(repr(value))}.*unset {name}"):
        find_rank_info(TORCHRUN | {name: value})


@pytest.mark.parametrize("text", ["²", "5" * 5000, "9" * 30, "99999999999"], ids=["superscript", "5000", "30", "11"])
def test_a_number_of_threads_that_openmp_ignores_is_ignored(text, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert startup._threads(find_rank_info({}), 1, torch.device("cpu")) == 2


@pytest.mark.parametrize(
    "text", ["gpu[1-99999999999]", f"gpu[{'9' * 5000}]", "gpu[٣]"], ids=["many", "digits", "another-script"]
)
def test_a_node_list_of_impossible_size_is_refused(text):
    with pytest.raises(ConfigError, match="cannot read the range"):
        expand_nodelist(text)


def test_a_count_of_tasks_of_impossible_size_is_refused():
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
        find_rank_info(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x9999999)"})


def occupied(ports: Iterable[int]) -> tuple[socket.socket, int]:
    """A socket that listens on the first of ``ports`` that is free, and the port."""
    for port in ports:
        listening = socket.socket()
        try:
            listening.bind(("", port))
            listening.listen()
        except OSError:
            listening.close()
        else:
            return listening, listening.getsockname()[1]
    raise AssertionError("no port is free")


def test_the_message_for_an_occupied_port_says_so(tmp_path):
    listening, port = occupied([0])
    with listening:
        done = suite(*DOCTOR, cwd=tmp_path, **TORCHRUN | MEETING | {"RANK": "0", "MASTER_PORT": str(port)})
    assert done.code == RankFailure.exit_code, done.errors
    message = the_message(done)
    assert f"rank 0 cannot listen on 127.0.0.1:{port}" in message
    assert "another program may have this port: set MASTER_PORT" in message


def test_the_message_for_an_occupied_port_of_the_job_explains_its_number(tmp_path):
    ports = {startup._slurm_port(SLURM | {"SLURM_JOB_ID": str(job)}): str(job) for job in range(1, 100)}
    listening, port = occupied(ports)
    with listening:
        done = suite(*DOCTOR, cwd=tmp_path, **SLURM | {"SLURM_PROCID": "0", "SLURM_JOB_ID": ports[port]})
    assert done.code == RankFailure.exit_code, done.errors
    message = the_message(done)
    assert f"rank 0 cannot listen on localhost:{port}" in message
    assert "which follows from the Slurm job's number: set MASTER_PORT" in message
