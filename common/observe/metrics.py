"""Write measurements of every step as JSON lines, and optionally as TensorBoard events."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError, SuiteError
from common.optional_packages import OptionalPackage

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 1.0
EVALUATIONS_FILE = "evaluations.jsonl"
TENSORBOARD = OptionalPackage("tensorboard", ("torch.utils.tensorboard:SummaryWriter",))


class MetricsWriter:
    """Writes one JSON object per step to one file per rank, and TensorBoard events on rank 0.

    Rank 0 also writes the evaluations of the run to ``evaluations.jsonl`` in the same folder. A rank that only
    evaluates writes one object per evaluation, without ``step``, to its own file. A rank on which self-play runs also
    writes its measures to ``self_play_rank<r>.jsonl``.

    Lines are buffered for about ``FLUSH_SECONDS``, then each is appended with one system call, so that a reader does
    not see partial lines. A resumed run appends to the files.

    Args:
        path: file of this rank; its folder is created.
        tensorboard_dir: folder for TensorBoard events; None for no events.

    Raises:
        ConfigError: ``tensorboard_dir`` is given and the tensorboard package is missing.
        SuiteError: the file cannot be written.
    """

    def __init__(self, path: Path, rank: int, tensorboard_dir: Path | None = None) -> None:
        self.path = Path(path)
        self._flushed = time.time()
        self._tensorboard: SummaryWriter | None = None
        if tensorboard_dir is not None and rank == 0:
            self._tensorboard = _summary_writer(tensorboard_dir)
        self._steps = _Lines(self.path)
        self._evaluations = _Lines(self.path.with_name(EVALUATIONS_FILE)) if rank == 0 else None
        self._self_play_path = self.path.with_name(f"self_play_rank{rank}.jsonl")
        self._self_play: _Lines | None = None

    def write(
        self,
        step: int,
        samples: int,
        loss: float | None,
        *,
        step_ms: float | None = None,
        data_wait_ms: float | None = None,
        **values: float,
    ) -> None:
        """Record a step. Values that are None or not finite become null in the file.

        Args:
            samples: training samples so far, over all ranks.
            data_wait_ms: part of ``step_ms`` that was spent waiting for data.
        """
        now = time.time()
        record: dict[str, float | int | None] = {"step": step, "samples": samples, "loss": loss, **values}
        record |= {"step_ms": step_ms, "data_wait_ms": data_wait_ms, "time": round(now, 3)}
        self._steps.add(record)
        if self._tensorboard is not None:
            for name, value in record.items():
                if value is not None and name not in ("step", "time"):
                    self._tensorboard.add_scalar(f"train/{name}", value, step)
        if now - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def evaluation(self, samples: int, values: dict[str, float], *, seconds: float, waited_seconds: float) -> None:
        """Record a score of the run. Ranks other than 0 ignore the call.

        Args:
            samples: training samples before these weights.
            waited_seconds: part of ``seconds`` during which training waited.
        """
        if self._evaluations is not None:
            times = {"seconds": seconds, "waited_seconds": waited_seconds, "time": round(time.time(), 3)}
            self._evaluations.add({"samples": samples, **values, **times})
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(f"evaluation/{name}", value, samples)

    def evaluated(self, index: int, samples: int, **values: float) -> None:
        """Record an evaluation on a rank that only evaluates.

        Args:
            index: number of the evaluation in the run, from 0.
            samples: nominal training samples before these weights, as the schedule counts them.
        """
        self._steps.add({"evaluation": index, "samples": samples, **values, "time": round(time.time(), 3)})

    def self_play(self, **values: float | str) -> None:
        """Record what self-play on this rank has done since the last record."""
        if self._self_play is None:
            self._self_play = _Lines(self._self_play_path)
        self._self_play.add({**values, "time": round(time.time(), 3)})

    def flush(self) -> None:
        """Write the buffered lines."""
        self._flushed = time.time()
        for lines in (self._steps, self._evaluations, self._self_play):
            if lines is not None:
                lines.flush()

    def close(self) -> None:
        """Write the buffered lines and close the files."""
        with contextlib.ExitStack() as stack:
            if self._tensorboard is not None:
                stack.callback(self._tensorboard.close)
                self._tensorboard = None
            for lines in (self._self_play, self._evaluations, self._steps):
                if lines is not None:
                    stack.callback(lines.close)


class _Lines:
    """A file of JSON lines to which only whole lines are appended. After it is closed, further records are ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffered: list[bytes] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._remove_partial_line()
        except OSError as error:
            raise self._failure(error) from error

    def add(self, record: Mapping[str, float | int | str | None]) -> None:
        """Buffer a record until the next flush. Numbers that are not finite become null."""
        if self._file >= 0:
            finite = {name: _finite(value) for name, value in record.items()}
            self._buffered.append(json.dumps(finite, allow_nan=False).encode() + b"\n")

    def flush(self) -> None:
        """Write the buffered lines."""
        lines, self._buffered = self._buffered, []
        for line in lines:
            self._append(line)

    def close(self) -> None:
        """Write the buffered lines and close the file."""
        if self._file < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._file)
            self._file = -1

    def _append(self, line: bytes) -> None:
        for _ in range(2):
            try:
                written = os.write(self._file, line)
                if written == len(line):
                    return
                # A full disk accepts only part of a line: remove that part. The second attempt raises the reason.
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            except OSError as error:
                raise self._failure(error) from error
        raise self._failure(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _remove_partial_line(self) -> None:
        size = os.fstat(self._file).st_size
        if size == 0 or os.pread(self._file, 1, size - 1) == b"\n":
            return
        content = self._path.read_bytes()
        os.ftruncate(self._file, content.rfind(b"\n") + 1)

    def _failure(self, error: OSError) -> SuiteError:
        return SuiteError(f"metrics cannot be written to {self._path}: {error.strerror}. Free space or set output_dir")


def _finite(value: float | int | str | None) -> float | int | str | None:
    return value if isinstance(value, str) or (value is not None and math.isfinite(value)) else None


def _summary_writer(folder: Path) -> SummaryWriter:
    reason = TENSORBOARD.unavailable()
    if reason is not None:
        raise ConfigError(
            f"TensorBoard output is asked for, but {reason}: pip install 'mlperf-suite[tensorboard]', or turn it off"
        )
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
