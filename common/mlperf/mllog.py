"""Writer of the MLLOG lines of one run.

:class:`RunLog` wraps the logger of mlperf-logging. Only rank 0 writes, each event once, each line with one write call
and with the call site in our code. Lines go to standard output and to the log file of the run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mlperf_logging.mllog.mllog import MLLogger

from common.errors import ConfigError

REPO_ROOT = Path(__file__).resolve().parents[2]

SINGLE_KEYS = frozenset(
    {
        "config_filename",
        "context_parallelism",
        "data_set",
        "eval_samples",
        "expert_parallelism",
        "global_batch_size",
        "gradient_accumulation_steps",
        "init_stop",
        "micro_batch_size",
        "model_bn_span",
        "num_warmup_steps",
        "pipeline_parallelism",
        "resumed_from",
        "run_start",
        "run_stop",
        "seed",
        "start_warmup_step",
        "tensor_parallelism",
        "train_samples",
    }
)
"""Keys that occur once per run, from the EXACTLY_ONE rules of the closed division. See also SINGLE_PREFIXES."""

SINGLE_PREFIXES = (
    "submission_", "opt_", "lars_", "sgd_", "scheduler_", "data_spec_", "data_speed_", "lora_",
    "lowest_numerical_precision_in_",
)  # fmt: skip

NON_FINITE_KEYS = frozenset({"eval_accuracy", "eval_error", "opt_gradient_clip_norm"})
"""Keys whose NaN or infinity is written unchanged. The checker reads these values as numbers and crashes on null."""


RESERVED_TEXT = ("global_batch_size", "submission_benchmark", "eval_accuracy", "eval_error")
"""Text that the RCP checker searches for in whole lines. Other events must not contain it."""


class _LineWriter(logging.Logger):
    """The ``logging.Logger`` that mlperf-logging writes to. It has no handlers, so none can be attached twice."""

    def __init__(self, fd: int | None, before_line: Callable[[], None]) -> None:
        super().__init__("mlperf_suite.run_log", logging.INFO)
        self._fd = fd
        self._before_line = before_line
        self._failure: OSError | None = None
        self._unprinted: OSError | None = None  # of standard output; the file can still be closed as aborted

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Write one line. Raise an error where mlperf-logging would only print a warning."""
        if self._failure is not None:
            raise self._failure
        if level != logging.INFO:  # mlperf-logging has caught an error of the entry or of this method, and continues
            if self._unprinted is not None:
                raise self._unprinted
            raise TypeError(f"event cannot be logged: {str(msg).strip()}")
        line = f"{msg}\n"
        self._before_line()
        if self._fd is not None:
            try:
                _write_all(self._fd, line.encode())
            except OSError as error:
                self._failure = error
                raise
        if self._unprinted is not None:
            return
        try:
            sys.stdout.write(line)
            sys.stdout.flush()
        except OSError as error:
            self._unprinted = OSError(error.errno, error.strerror, "standard output")
            raise self._unprinted from error


def _write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, usually with one system call. After an error, remove what was written."""
    written = 0
    try:
        while written < len(data):
            written += os.write(fd, data[written:])
    except OSError:
        if written:
            os.ftruncate(fd, os.fstat(fd).st_size - written)
        raise


class RunLog:
    """The log of one run: real on rank 0, silent on every other rank.

    Args:
        path: log file, which must not exist unless ``append`` is set; None writes to standard output only.
        append: continue an existing log file.

    Attributes:
        before_line: called before every line; a progress bar on the same terminal clears itself here.

    Raises:
        ConfigError: on rank 0, if ``path`` exists or cannot be created; with ``append``, if it cannot be opened.
    """

    def __init__(self, path: Path | None, rank: int, append: bool = False) -> None:
        self.path = path
        self.before_line: Callable[[], None] = _nothing
        self._lock = threading.RLock()
        self._seen: dict[str, str] = {}
        self._fd: int | None = None
        self._logger: MLLogger | None = None
        if rank != 0:
            return
        if path is not None:
            new = 0 if append else os.O_CREAT | os.O_EXCL
            try:
                self._fd = os.open(path, os.O_WRONLY | new | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except FileExistsError as error:
                raise ConfigError(f"log file {path} exists; a run never overwrites a log: name another") from error
            except OSError as error:
                raise ConfigError(f"log file {path} cannot be created: {error.strerror}") from error
        writer = _LineWriter(self._fd, lambda: self.before_line())
        self._logger = MLLogger(logger=writer, root_dir=re.escape(str(REPO_ROOT)))

    def start(
        self,
        key: str,
        value: object = None,
        metadata: Mapping[str, object] | None = None,
        time_ms: int | None = None,
    ) -> None:
        """Log the start of an interval. Arguments and errors as :meth:`event`."""
        self._write("start", key, value, metadata, time_ms)

    def end(
        self,
        key: str,
        value: object = None,
        metadata: Mapping[str, object] | None = None,
        time_ms: int | None = None,
    ) -> None:
        """Log the end of an interval. Arguments and errors as :meth:`event`."""
        self._write("end", key, value, metadata, time_ms)

    def event(
        self,
        key: str,
        value: object = None,
        metadata: Mapping[str, object] | None = None,
        time_ms: int | None = None,
    ) -> None:
        """Log a point in time.

        Non-finite numbers become null, except under NON_FINITE_KEYS. If a single key (SINGLE_KEYS, SINGLE_PREFIXES)
        is logged again with equal content, the repetition is ignored.

        Args:
            value: JSON value, or numpy scalar or array.
            metadata: further JSON entries, except ``file`` and ``lineno``, which state the call site.
            time_ms: milliseconds since 1970, to back-date an event; None for now.

        Raises:
            ValueError: if a single key comes again with other content, ``init_stop``, ``run_start`` or ``run_stop``
                comes again, or a line contains text of RESERVED_TEXT.
            TypeError: if value or metadata are not JSON, or metadata has ``file`` or ``lineno``.
            OSError: if the line cannot be written, such as on a full disk.
        """
        self._write("event", key, value, metadata, time_ms)

    def _write(
        self,
        kind: str,
        key: str,
        value: object,
        metadata: Mapping[str, object] | None,
        time_ms: int | None,
    ) -> None:
        if self._logger is None:
            return
        if key not in NON_FINITE_KEYS:
            value = _finite(value)
        entries = {name: _finite(entry) for name, entry in (metadata or {}).items()}
        with self._lock:
            _reject_reserved(key, value, entries)
            if self._is_repeated(key, value, entries, time_ms):
                return
            log = {"start": self._logger.start, "end": self._logger.end, "event": self._logger.event}[kind]
            log(key, value, metadata=entries, time_ms=time_ms, stack_offset=3)  # the caller of start, end or event

    def _is_repeated(self, key: str, value: object, metadata: dict[str, object], time_ms: int | None) -> bool:
        """Return whether the same event was written before. Raise ValueError for a contradicting event."""
        if key not in SINGLE_KEYS and not key.startswith(SINGLE_PREFIXES):
            return False
        content = json.dumps([value, metadata, time_ms], default=str)
        before = self._seen.setdefault(key, content)
        if before is content:
            return False
        if before == content and key not in ("init_stop", "run_start", "run_stop"):
            return True
        raise ValueError(f"{key} occurs once in a log: it is {before}, now came {content} (value, metadata, time)")

    def close(self) -> None:
        """Close the log file; later events are errors."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None
            if self._logger is not None:
                self._logger = _closed_logger()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _closed_logger() -> MLLogger:
    writer = _LineWriter(None, _nothing)
    writer._failure = OSError("the run's log is closed")
    return MLLogger(logger=writer)


def _reject_reserved(key: str, value: object, metadata: dict[str, object]) -> None:
    content = json.dumps([key, value, metadata], default=str)
    for text in RESERVED_TEXT:
        if text in content and key != text:
            raise ValueError(
                f"event {key!r} contains the text {text!r}, which the RCP checker would take for the event of that "
                f"name: rename the entry; the event was {content[:200]}"
            )


def _nothing() -> None:
    return


def _finite(value: object) -> object:
    """Return ``value`` with every NaN and infinity replaced by None, because not every JSON reader accepts them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
