"""HTTP server in threads of the test process. Its answers are plain bytes, so that it can break the protocol."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Request(NamedTuple):
    """A request: its target (an address, if the server acts as a proxy), and its headers in lower case."""

    target: str
    headers: Mapping[str, str]


class Answer(NamedTuple):
    """The bytes that are sent, and the next action: ``close``, ``keep`` or ``reset`` the connection, or ``stall``."""

    content: bytes
    then: str = "close"


Script = Callable[[Request], Answer]


def reply(
    status: str = "200 OK", body: bytes = b"", *fields: str, length: str | None = "right", then: str = "close"
) -> Answer:
    """Make an answer; each field is a whole line, and the length is stated unless ``length`` is other or None."""
    lines = [f"HTTP/1.1 {status}", *fields]
    if then == "close":
        lines.append("Connection: close")
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length == 'right' else length}")
    return Answer("\r\n".join([*lines, "", ""]).encode("latin-1") + body, then)


def stored(body: bytes, *fields: str, etag: str = '"1"', cut: int | None = None, then: str = "close") -> Script:
    """Make the script of an honest server of one file; a connection that has sent ``cut`` bytes of it ends."""

    def script(request: Request) -> Answer:
        wanted = request.headers.get("range")
        if wanted is None or request.headers.get("if-range", etag) != etag:
            answer = reply("200 OK", body, f"ETag: {etag}", *fields, then=then)
            return answer if cut is None else Answer(answer.content[: len(answer.content) - len(body) + cut])
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if start >= len(body):
            return reply("416 Range Not Satisfiable", b"", f"Content-Range: bytes */{len(body)}", then=then)
        stated = f"Content-Range: bytes {start}-{len(body) - 1}/{len(body)}"
        return reply("206 Partial Content", body[start:], f"ETag: {etag}", stated, *fields, then=then)

    return script


class Server:
    """A server that gives the answers of a list, the last one again and again, or what a script says.

    Attributes:
        requests: those that came, in their order.
        connections: number of those that were opened.
        url: address of its root.
    """

    def __init__(self, *answers: Answer | Script, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self.connections = 0
        self._answers: Sequence[Answer | Script] = answers
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"{'https' if tls else 'http'}://{self.host}"

    def __enter__(self) -> Server:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self._tls is None and connection.recv(1, socket.MSG_PEEK) == b"\x16":  # TLS begins so, and waits
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
            stream = self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
            with stream, stream.makefile("rb") as lines:
                while (request := _read(lines)) is not None:
                    with self._lock:
                        self.requests.append(request)
                        answer = self._answers[min(len(self.requests), len(self._answers)) - 1]
                    found = answer if isinstance(answer, Answer) else answer(request)
                    stream.sendall(found.content)
                    if found.then == "stall":
                        self._ended.wait()
                    if found.then == "reset":  # closing without lingering sends RST
                        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    if found.then != "keep":
                        return


def _read(lines: object) -> Request | None:
    head = []
    while (line := lines.readline()) not in (b"", b"\r\n"):  # type: ignore[attr-defined]
        head.append(line.decode("latin-1").strip())
    if not head:
        return None
    pairs = (line.partition(": ") for line in head[1:])
    return Request(head[0].split(" ")[1], {name.lower(): value for name, _, value in pairs})
