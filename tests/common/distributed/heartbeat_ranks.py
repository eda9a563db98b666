"""What the ranks of the heartbeat tests do; started in processes of their own."""

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from common.distributed.faults import Heartbeat
from common.distributed.startup import find_place, initialise

TIMEOUT_SECONDS = 3.0
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
    place = find_place(os.environ)
    initialise(place, torch.device("cpu"), 60)
    with Heartbeat(place, Path(folder), TIMEOUT_SECONDS) as heartbeat:
        _train(heartbeat, rank, fault)
    dist.destroy_process_group()


def _train(heartbeat: Heartbeat, rank: int, fault: str) -> None:
    culprit = 0 if fault.endswith("rank 0") else CULPRIT
    value = torch.ones(4)
    for step in range(STEPS):
        heartbeat.beat(step, "train")
        meets = rank == culprit and step == FAULTY_STEP
        if meets:
            _meet(fault)
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


def _meet(fault: str) -> None:
    if fault.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.startswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "sleep":
        time.sleep(600)
    elif fault == "other collective":
        dist.barrier()


def run_alone(folder: str) -> None:
    """A job of one rank that gets stuck."""
    stderr = os.open(f"{folder}/stderr0", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    heartbeat = Heartbeat(find_place({}), Path(folder), 1.0)
    heartbeat.start()
    heartbeat.beat(2, "train")
    time.sleep(600)
