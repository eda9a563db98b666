"""Program of a mask-overlap process: ``python -m common.detection.overlap_main DESCRIPTOR PARENT SHARE SHARES``.

It receives ground truth once, then detections repeatedly, and sends one answer for each. It ends when the other end
of the connection is closed.
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
    """Serve until the connection is closed; return the exit code.

    Args:
        argv: descriptor of the connection, process id of the parent, index of this process's share of the pictures,
            and number of shares.
    """
    descriptor, parent, share, shares = map(int, argv)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # works also during a computation
    if os.getppid() != parent:
        return 1
    for signum in (signal.SIGINT, signal.SIGTERM):  # schedulers signal all processes of a job; the scorer goes on
        signal.signal(signum, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        truth = TruthMasks(_received(connection), share, shares)
        while True:
            found, threshold = _received(connection)
            try:
                answer: object = truth.overlaps(found, threshold)
            except Exception:  # noqa: BLE001 - any error is sent to the scorer, which raises it
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
