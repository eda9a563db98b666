"""Worker processes of a preparation that runs networks: one per GPU, or several on the CPU."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

from common.errors import ConfigError

_process = 0
"""Index of this process among the worker processes."""


def chosen_device(device: str) -> str:
    """Return ``cpu`` or ``cuda`` for the option ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: ``cuda`` is requested, but there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: PyTorch finds no GPU here")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def process_count(device: str, tasks: int, workers: int) -> int:
    """Return the number of processes: one per GPU, or ``workers`` on the CPU, but not more than ``tasks``."""
    return max(1, min(tasks, torch.cuda.device_count() if device == "cuda" else workers))


def numbered_processes(threads: int) -> Callable[[], None]:
    """Return an initialiser that numbers processes from 0 and sets PyTorch's CPU threads to ``threads``."""
    counter = multiprocessing.get_context("spawn").Value("i", 0)
    return functools.partial(_take_number, counter, threads)


def device_of_process(device: str) -> torch.device:
    """Return the CPU, or the GPU of this process, which becomes the current one."""
    if device == "cpu":
        return torch.device("cpu")
    own = torch.device("cuda", _process % torch.cuda.device_count())
    torch.cuda.set_device(own)  # Triton launches on the current device
    return own


def _take_number(counter: Any, threads: int) -> None:
    global _process
    with counter.get_lock():
        _process = counter.value
        counter.value += 1
    torch.set_num_threads(threads)
