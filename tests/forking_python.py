"""A program that scripts call instead of Python, so that their commands are forked; see :mod:`tests.forked`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path

from tests.forked import Forked

CLIENT = Path(__file__).with_name("forking_client.py")


@contextlib.contextmanager
def forking_python() -> Iterator[Path]:
    """Yield the path of the program. It accepts ``-m MODULE ARGUMENT…`` inside the context."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address, program = Path(folder) / "socket", Path(folder) / "python"
        server.bind(str(address))
        server.listen()
        words = [sys.executable, "-I", "-S", str(CLIENT), str(address)]
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o755)
        threading.Thread(target=_accept, args=[server], daemon=True).start()
        try:
            yield program
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts


def _accept(server: socket.socket) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=[client], daemon=True).start()


def _serve(client: socket.socket) -> None:
    """Run what one client asks for, and tell it the exit code; without a client, kill it."""
    with client:
        length, streams, _, _ = socket.recv_fds(client, 8, 3)
        try:
            wanted = json.loads(_read(client, int.from_bytes(length, "big")))
            command = [sys.executable, *wanted["arguments"]]
            process = Forked(command, wanted["folder"], wanted["environment"], streams=streams)
        finally:
            for stream in streams:
                os.close(stream)
        there = True
        while process.sentinel not in connection.wait([process.sentinel, *([client] if there else [])]):
            signals = client.recv(100)
            there = bool(signals)
            for signum in signals or [signal.SIGKILL]:
                process.send_signal(signum)
        code = process.wait()
        with contextlib.suppress(BrokenPipeError):
            client.sendall(str(code).encode())


def _read(client: socket.socket, length: int) -> bytes:
    body = b""
    while len(body) < length:
        part = client.recv(length - len(body))
        if not part:
            raise EOFError(f"a request of {length} bytes ends after {len(body)}")
        body += part
    return body
