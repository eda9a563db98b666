"""Replacement of ``python`` that asks a socket for a forked process with its arguments, folder, environment and
streams.

It passes signals on, and ends as that process ends. It imports almost nothing, so that it starts in milliseconds.
"""

import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def main() -> None:
    """Run ``ARGUMENT…`` of ``forking_client.py SOCKET ARGUMENT…``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # a signal that arrives now waits until it can be forwarded
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    wanted = {"arguments": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    body = json.dumps(wanted).encode()
    socket.send_fds(server, [len(body).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(body)

    def pass_on(signum: int, _: object) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            server.sendall(bytes([signum]))

    for signum in PASSED_ON:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = server.makefile("rb").read()  # until the server closes the connection
    if not code:
        sys.exit("the process that forks is gone")
    if int(code) < 0:
        signal.signal(-int(code), signal.SIG_DFL)
        os.kill(os.getpid(), -int(code))
    os._exit(int(code))


if __name__ == "__main__":
    main()
