"""What the ranks of the heartbeat tests do; started in processes of their own."""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from common.distributed import faults
from common.distributed.faults import Heartbeat
from common.distributed.startup import find_rank_info, initialise

TIMEOUT_SECONDS = 6.0  # that no healthy rank is silent, on a busy machine either
CULPRIT = 1
STEPS = 200
FAULTY_STEP = 5


def run(rank: int, world_size: int, port: int, folder: str, fault: str, launcher_store: bool) -> None:
    """One rank: all-reduces in a loop; the culprit meets ``fault`` in one step."""
    stderr = os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if launcher_store:
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    rank_info = find_rank_info(os.environ)
    initialise(rank_info, torch.device("cpu"), 200)
    faults.ACKNOWLEDGE_SECONDS = 60.0  # one message, however slowly the ranks write their stacks
    with Heartbeat(rank_info, Path(folder), TIMEOUT_SECONDS) as heartbeat:
        _train(heartbeat, rank, fault)
    dist.destroy_process_group()


def _train(heartbeat: Heartbeat, rank: int, fault: str) -> None:
    culprit = 0 if fault.endswith("rank 0") else CULPRIT
    value = torch.ones(4)
    for step in range(STEPS):
        heartbeat.beat(step, "train")
        meets = rank == culprit and step == FAULTY_STEP
        if meets:
            _meet(heartbeat, fault)
        if fault == "long evaluation" and step == FAULTY_STEP:
            _evaluate(heartbeat, rank)
        dist.all_reduce(value)
        if not (meets and fault == "skip"):
            dist.barrier()
        if step == FAULTY_STEP and fault in ("none", "long evaluation"):
            break
        time.sleep(0.1)


def _evaluate(heartbeat: Heartbeat, rank: int) -> None:
    """One rank works longer than the limit while the others wait for it in the next collective."""
    if rank == CULPRIT:
        with heartbeat.extended(60, "evaluation"):
            time.sleep(TIMEOUT_SECONDS + 1.5)


def _meet(heartbeat: Heartbeat, fault: str) -> None:
    if fault.startswith("stop"):
        _await_post(heartbeat, FAULTY_STEP)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.startswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "sleep":
        time.sleep(600)
    elif fault == "other collective":
        dist.barrier()


def _await_post(heartbeat: Heartbeat, step: int) -> None:
    """Wait until this rank's exchange thread has sent ``step`` to the others."""
    name = f"rank{heartbeat.rank_info.rank}"
    while (payload := heartbeat._status.read([name])[0]) is None or json.loads(payload)["view"]["step"] < step:
        time.sleep(0.01)


def run_alone(folder: str) -> None:
    """A job of one rank that gets stuck."""
    stderr = os.open(f"{folder}/stderr0", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    heartbeat = Heartbeat(find_rank_info({}), Path(folder), 1.0)
    heartbeat.start()
    heartbeat.beat(2, "train")
    time.sleep(600)
