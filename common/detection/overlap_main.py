"""What a process runs that overlaps masks: ``python -m common.detection.overlap_main DESCRIPTOR PARENT SHARE SHARES``.

Ground truth comes first, then detections again and again, each answered once; it ends when the other end of the
connection is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from common.detection.mask_overlaps import TruthMasks
from common.evaluation.hand_over import unpack

PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Serve until there is nobody to serve; returns the exit code.

    Args:
        argv: the descriptor of the connection, the id of the process that has its other end, which share of the
            pictures is this process's, and how many shares there are.
    """
    descriptor, parent, share, shares = map(int, argv)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it computes, and looks at nothing else
    if os.getppid() != parent:
        return 1
    for signum in (signal.SIGINT, signal.SIGTERM):  # schedulers signal all processes of a job; whoever scores goes on
        signal.signal(signum, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        truth = TruthMasks(_received(connection), share, shares)
        while True:
            found, threshold = _received(connection)
            try:
                answer: object = truth.overlaps(found, threshold)
            except Exception:  # noqa: BLE001 - whoever scores ends with it, whatever it is
                answer = traceback.format_exc()
            connection.send(answer)
    except (EOFError, ConnectionError):
        return 0


def _received(connection: Connection[Any, Any]) -> Any:
    sizes = connection.recv()
    descriptor = recv_handle(connection)
    try:
        return unpack(descriptor, sizes)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
