"""Stages of a long preparation: independent tasks, each done once, in parallel, with a small record per task."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.data import atomic
from common.errors import DataError
from common.untrusted.strict_json import read_json_object

Record = dict[str, Any]


def memory_of_start(path: Path, memory: int) -> int:
    """Return the bytes per process with which an interrupted preparation began, because its pieces depend on them.

    Args:
        path: file that stores the number.
        memory: bytes per process of this preparation, stored if it is the first.
    """
    if not path.exists():
        atomic.write_text(path, f"{max(1, memory)}\n")
    return int(path.read_text(encoding="utf-8"))


class Stages:
    """Runs stages and stores their records in one folder; a context manager that stops its processes at the end.

    Args:
        folder: folder for the records, ``STAGE/TASK.json`` for every completed task.
        initializer: function that each worker process calls first; not called if this process does the work itself.
    """

    def __init__(self, folder: Path, workers: int, initializer: Callable[[], object] | None = None) -> None:
        self.folder = folder
        self.workers = max(1, workers)
        self._initializer = initializer
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def run(self, stage: str, tasks: Mapping[str, tuple[Any, ...]], work: Callable[..., Record]) -> dict[str, Record]:
        """Run the tasks of a stage that are not complete.

        Args:
            tasks: name of each task to the arguments of ``work``.
            work: does one task and returns its record (JSON). Its files must be complete on the disk when it returns.
                It must be a module-level function, because other processes import it.

        Returns:
            The records of all tasks, in the order of ``tasks``.

        Raises:
            DataError: ``work`` raised it, a file could not be written, or a process was killed. Completed tasks stay
                complete.
        """
        found = {name: self.record(stage, name) for name in tasks}
        left = {name: arguments for name, arguments in tasks.items() if found[name] is None}
        again = "run the command again, and it continues"
        try:
            for name, record in tqdm(self._work(left, work), desc=stage, total=len(left), unit="task", disable=None):
                self.keep(stage, name, record)
                found[name] = record
        except OSError as error:
            raise DataError(f"preparing stopped at stage {stage}: {error}; when that is settled, {again}") from error
        except BrokenProcessPool as error:
            raise DataError(
                f"a process of stage {stage} was killed, perhaps for want of memory; with fewer --workers {again}"
            ) from error
        return {name: record for name, record in found.items() if record is not None}

    def record(self, stage: str, task: str) -> Record | None:
        """Return the record of a task; None if the task is not complete.

        Raises:
            DataError: the record is damaged.
        """
        path = self.path(stage, task)
        if not path.exists():
            return None
        try:
            return read_json_object(path)
        except DataError as error:
            raise DataError(f"{path} is damaged ({error}); delete it, and its stage is done again") from error

    def keep(self, stage: str, task: str, record: Record) -> None:
        """Store the record of a completed task.

        Args:
            stage, task: names of the stage and of the task within it.
            record: JSON object that the task returned.
        """
        atomic.write_text(self.path(stage, task), json.dumps(record) + "\n")

    def path(self, stage: str, task: str) -> Path:
        """Return the path of a task's record."""
        return self.folder / stage / f"{task}.json"

    def _work(self, tasks: Mapping[str, tuple[Any, ...]], work: Callable[..., Record]) -> Iterator[tuple[str, Record]]:
        if self.workers == 1 or len(tasks) < 2:
            for name, arguments in tasks.items():
                yield name, work(*arguments)
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, start_worker, (self._initializer,))
        futures = {self._pool.submit(work, *arguments): name for name, arguments in tasks.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()


def start_worker(initializer: Callable[[], object] | None = None) -> None:
    """Initialize a worker process; make it exit when its parent is killed, and at Ctrl-C without a traceback."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # a command in the background may ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    # Otherwise, this process could still write while the next attempt writes the same files.
    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if initializer is not None:
        initializer()
