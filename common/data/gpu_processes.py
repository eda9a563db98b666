"""Worker processes of a preparation that runs networks: one per GPU, or several on the CPU."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.data.stages import Stages
from common.errors import ConfigError

_process = 0
"""Index of this process among the worker processes."""


@dataclass(frozen=True)
class NetworkProcesses:
    """Processes that run networks.

    Attributes:
        device: ``cpu``, or ``cuda`` for one GPU per process.
        count: number of processes.
        threads: threads per process that read and decode.
    """

    device: str
    count: int
    threads: int

    @classmethod
    def chosen(cls, device: str, tasks: int, workers: int) -> NetworkProcesses:
        """Return one process per GPU, or ``workers`` processes on the CPU, but not more than ``tasks``.

        Args:
            device: ``cpu``, ``cuda``, or ``auto`` for the GPUs if there are any.
            workers: on GPUs, total number of threads.

        Raises:
            ConfigError: ``cuda`` is requested, but there is no GPU.
        """
        gpus = torch.cuda.device_count() if device != "cpu" else 0
        if device == "cuda" and not gpus:
            raise ConfigError("--device=cuda: PyTorch finds no GPU here")
        count = max(1, min(tasks, gpus or workers))
        return cls("cuda" if gpus else "cpu", count, max(1, workers // count))

    @contextmanager
    def stages(self, folder: Path, forget: Callable[[], object]) -> Iterator[Stages]:
        """Yield stages that these processes run.

        Args:
            folder: folder of the stages' records.
            forget: frees the networks of this process, which does the work itself if it is the only one.
        """
        before = torch.get_num_threads()
        threads = 1 if self.device == "cuda" else self.threads  # with a GPU, the decoding threads use the CPU
        counter = multiprocessing.get_context("spawn").Value("i", 0)
        torch.set_num_threads(threads)
        try:
            with Stages(folder, self.count, functools.partial(_take_number, counter, threads)) as stages:
                yield stages
        finally:
            torch.set_num_threads(before)
            forget()


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
