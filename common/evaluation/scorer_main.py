"""What the scorer's process runs: ``python -m common.evaluation.scorer_main DESCRIPTOR PARENT``.

It does what the other end of the connection asks for, one after the other, and ends when that end is gone.
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
    """Serve until there is nobody to serve; returns the exit code.

    Args:
        argv: the descriptor of the connection, and the id of the process that has its other end.
    """
    descriptor, parent = map(int, argv)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it scores, and looks at nothing else
    if os.getppid() != parent:
        return 1
    # Schedulers signal all processes of a job. What was begun is scored: rank 0 waits for it, and then ends this.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    connection = Connection(descriptor)
    try:
        cpus, threads = connection.recv()
    except (EOFError, ConnectionError):
        return 0  # rank 0 wants nothing, or is gone
    os.sched_setaffinity(0, cpus)
    # Not before the process has its cores: libraries start threads when they are imported.
    from common.evaluation.scorer_service import serve

    serve(connection, threads)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
