"""Stages of a long preparation: independent tasks, done once each, in parallel, with a small record of each."""

from __future__ import annotations

import json
import multiprocessing
import os
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


class Stages:
    """Runs stages below one folder; a context manager, whose end is the end of its processes.

    Args:
        folder: receives ``STAGE/TASK.json`` for every task that was done.
        workers: processes.
        initializer: what each process calls first; not called where this process does the work alone.
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
        """Do what is left of a stage.

        Args:
            stage: its name.
            tasks: name of each task to the arguments of ``work``.
            work: does one task and returns its record (JSON); its files have to be complete on the disk when it
                returns. A function of a module, so that processes can find it.

        Returns:
            The records of all tasks, in the order of ``tasks``.

        Raises:
            DataError: what ``work`` raised, a file could not be written, or a process was killed; the tasks that were
                done stay done.
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
        """What a task left behind; None when it has not been done.

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
        """Note that a task has been done."""
        atomic.write_text(self.path(stage, task), json.dumps(record) + "\n")

    def path(self, stage: str, task: str) -> Path:
        """Where the record of a task lies; a task without one is done again."""
        return self.folder / stage / f"{task}.json"

    def _work(self, tasks: Mapping[str, tuple[Any, ...]], work: Callable[..., Record]) -> Iterator[tuple[str, Record]]:
        if self.workers == 1 or len(tasks) < 2:
            for name, arguments in tasks.items():
                yield name, work(*arguments)
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, _start_worker, (self._initializer,))
        futures = {self._pool.submit(work, *arguments): name for name, arguments in tasks.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()


def _start_worker(initializer: Callable[[], object] | None) -> None:
    """End this process when its parent is killed: what it still wrote would meet the files of the next attempt."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if initializer is not None:
        initializer()
