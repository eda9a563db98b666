"""Program of the scorer process: ``python -m common.evaluation.scorer_main DESCRIPTOR PARENT``.

It handles the requests of the connection in order, and ends when the other end is closed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Serve requests until the connection closes; return the exit code.

    Args:
        argv: file descriptor of the connection, and id of the parent process, which has the other end.
    """
    descriptor, parent = map(int, argv)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends this process with its parent, even while it scores
    if os.getppid() != parent:
        return 1
    # Schedulers signal all processes of a job. Rank 0 still waits for pending scores, and then ends this process.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    connection = Connection(descriptor)
    try:
        cpus, threads = connection.recv()
    except (EOFError, ConnectionError):
        return 0  # rank 0 closed the connection, or is gone
    os.sched_setaffinity(0, cpus)
    # Import only after the CPUs are set: libraries start threads when they are imported.
    from common.evaluation.scorer_service import serve

    serve(connection, threads)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
