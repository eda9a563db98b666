"""Close the log of an interrupted run, which counts as not converged."""

from __future__ import annotations

import time
from pathlib import Path

from common.errors import DataError
from common.mlperf.events import RunEvents
from common.mlperf.mllog import RunLog
from common.mlperf.parsed_log import PROGRESS_KEYS, read_log


def close_if_open(path: Path) -> bool:
    """Append ``run_stop`` with the status ``aborted`` to a log that has a ``run_start`` but no ``run_stop``.

    A log that cannot be parsed (its last line may be cut off) is not changed; its verdict reports the problem.

    Returns:
        whether a line was appended.

    Raises:
        OSError: the log cannot be written.
    """
    try:
        log = read_log(path)
    except DataError:
        return False
    if not log.all("run_start") or log.all("run_stop"):
        return False
    last = log.evaluations[-1] if log.evaluations else None
    unit = last.progress_key if last and last.progress_key else PROGRESS_KEYS[0]
    done = int(last.progress) if last and last.progress_key else 0
    if not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    with RunLog(path, rank=0, append=True) as tail:
        RunEvents(tail, unit).run_stop("aborted", done, time.time_ns() // 1_000_000)
    return True
