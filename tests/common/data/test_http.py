"""Connections: addresses, hosts, proxies and certificates that fail, pauses, and how many there are at a time."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from common.data.download import Client
from common.data.http import CONNECTIONS, Limits
from common.data.sources import RemoteFile
from common.errors import DataError
from tests.http_server import Answer, Request, Server, reply, stored

BODY = bytes(range(1, 256)) * 20
SIZE = len(BODY)


def remote(*urls: str, checksum: str | None = None) -> RemoteFile:
    return RemoteFile("f.bin", urls, "ask nicely", SIZE, checksum)


def failure(client: Client, path: Path, *urls: str) -> str:
    """Return the message with which a transfer ends."""
    with pytest.raises(DataError) as raised:
        client.fetch(remote(*urls), path)
    assert not path.exists()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "f.bin"


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address whose port is taken by a socket that does not listen, so that connections to it are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1/f.bin",
        "http:///f.bin",
        "http://127.0.0.1:99999/f.bin",
        "http://127.0.0.1:port/f.bin",
        f"http://{'a' * 70}.org/f.bin",
        "gopher://127.0.0.1/f.bin",
    ],
    ids=["bracket", "no host", "large port", "no port", "long label", "scheme"],
)
def test_unusable_address_is_an_error_at_once(url, client, lines, path):
    assert failure(client, path, url).startswith(f"{url}: is no usable address")
    assert lines == []


def test_file_without_address_is_an_error(client, path):
    assert failure(client, path) == "f.bin has no address: ask nicely"


def test_refused_connection_is_tried_again(client, lines, path, closed_port):
    client.limits = replace(client.limits, tries=8, unreachable_tries=3)
    assert "Connection refused; run the command again to continue" in failure(client, path, f"http://{closed_port}/f")
    assert [line.partition("; ")[2] for line in lines] == ["attempt 2 of 3 in 0 s", "attempt 3 of 3 in 0 s"]


def test_host_that_does_not_answer_is_tried_less_often(client, path):
    client.limits = replace(client.limits, tries=8, unreachable_tries=1, timeout_s=0.2)
    with contextlib.ExitStack() as open_:
        listener = open_.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # the queue is full, and Linux ignores further connections
            waiting = open_.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        message = failure(client, path, f"http://127.0.0.1:{listener.getsockname()[1]}/f")
    assert "timed out" in message


def test_unknown_host_is_named(client, path):
    message = failure(client, path, "http://nonexistent.invalid/f")
    assert "the name of nonexistent.invalid cannot be resolved; run the command again" in message


SECOND = {
    "404": (reply("404 Not Found"),),
    "503": (reply("503 Slow Down"),),
    "page": (reply("200 OK", b"<html>log in</html>"),),
    "login": (reply("302 Found", b"", "Location: https://a.cloudflareaccess.com/"),),
    "other size": (stored(BODY + BODY),),
    "cut": (reply("200 OK", BODY[:1000], length=str(SIZE)),),
    "wrong": (stored(BODY[::-1]),),
}


@pytest.mark.parametrize("answers", SECOND.values(), ids=list(SECOND))
def test_second_address_is_tried(answers, client, lines, path):
    with Server(*answers) as first, Server(stored(BODY)) as second:
        checksum = f"md5:{hashlib.md5(BODY).hexdigest()}"
        client.fetch(remote(f"{first.url}/f", f"{second.url}/f", checksum=checksum), path)
    assert path.read_bytes() == BODY
    assert lines[-1].startswith(first.url)
    assert lines[-1].endswith("; trying the next address")


def test_second_address_follows_an_unreachable_one(client, path, closed_port):
    with Server(stored(BODY)) as second:
        client.fetch(remote(f"http://{closed_port}/f", f"{second.url}/f"), path)
    assert path.read_bytes() == BODY


def test_last_address_names_the_error(client, path):
    with Server(reply("404 Not Found")) as first, Server(reply("410 Gone")) as second:
        assert failure(client, path, f"{first.url}/f", f"{second.url}/f").startswith(f"{second.url}/f: HTTP 410 Gone")


class Pauses(threading.Event):
    """An event that notes how long it was waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        return self.is_set()


def test_pauses_double_up_to_a_minute(client, path):
    client.limits, client.stopped = Limits(), Pauses()
    with Server(reply("503 Slow Down")) as server:
        failure(client, path, f"{server.url}/f")
    assert client.stopped.seconds == [1, 2, 4, 8, 16, 32, 60]


def test_pause_has_the_length_of_retry_after(client, path):
    client.stopped = Pauses()
    with Server(reply("503 Slow Down", b"", "Retry-After: 7"), stored(BODY)) as server:
        client.fetch(remote(f"{server.url}/f"), path)
    assert client.stopped.seconds == [7]


def test_attempts_that_bring_bytes_do_not_count(client, path):
    def script(request: Request) -> Answer:
        answer = stored(BODY)(request)
        head, _, body = answer.content.partition(b"\r\n\r\n")
        return Answer(head + b"\r\n\r\n" + body[:700])

    with Server(script) as server:
        client.fetch(remote(f"{server.url}/f"), path)
    assert path.read_bytes() == BODY
    assert len(server.requests) == 8


def test_attempts_that_only_bring_the_same_bytes_count(client, path):
    client.limits = replace(client.limits, tries=4)
    cut = [reply("200 OK", BODY[:size], length=str(SIZE)) for size in (1000, 900, 1000, 900, 1000, 900)]
    with Server(*cut) as server:
        assert "bytes too early; run the command again" in failure(client, path, f"{server.url}/f")
    assert len(server.requests) == 4


def test_stopping_ends_a_pause(client, path):
    client.limits = replace(client.limits, delay_s=10_000)
    client.report = lambda line: client.stopped.set()
    with Server(reply("503 Slow Down")) as server:
        assert failure(client, path, f"{server.url}/f").endswith("stopped; run the command again to continue")
    assert len(server.requests) == 1


def test_stopping_ends_a_transfer_and_keeps_the_part(client, path):
    client.advance = lambda count: client.stopped.set() if count > 0 else None
    with Server(reply("200 OK", BODY[:1000], 'ETag: "1"', length=str(SIZE), then="stall")) as server:
        assert failure(client, path, f"{server.url}/f", "http://a.invalid/f").endswith(
            "stopped; run the command again to continue"
        )
    assert path.with_name("f.bin.partial").read_bytes() == BODY[:1000]


def test_nothing_begins_after_stopping(client, path):
    client.stopped.set()
    with Server(stored(BODY)) as server:
        failure(client, path, f"{server.url}/f", f"{server.url}/g")
    assert server.requests == []


def test_two_files_come_over_one_connection(client, tmp_path):
    with Server(stored(BODY, then="keep")) as server:
        for name in ("a", "b"):
            client.fetch(remote(f"{server.url}/{name}"), tmp_path / name)
    assert server.connections == 1
    assert [request.target for request in server.requests] == ["/a", "/b"]


@pytest.mark.parametrize(
    "answer",
    [reply("302 Found", b"", "Location: /g", then="keep"), reply("503 Slow Down", then="keep")],
    ids=["redirect", "failure"],
)
def test_answer_without_body_leaves_the_connection_open(answer, client, lines, path):
    with Server(answer, stored(BODY, then="keep")) as server:
        client.fetch(remote(f"{server.url}/f"), path)
    assert server.connections == 1
    assert all("HTTP 503" in line for line in lines)


def test_a_host_gets_eight_connections(client, tmp_path):
    together = threading.Barrier(CONNECTIONS)  # none is answered before eight have come

    def script(request: Request) -> Answer:
        together.wait(60)
        return stored(BODY, then="keep")(request)

    with Server(script) as server, ThreadPoolExecutor(20) as pool:
        for number in range(3 * CONNECTIONS):
            pool.submit(client.fetch, remote(f"{server.url}/{number}"), tmp_path / str(number))
        pool.shutdown()
    assert server.connections == CONNECTIONS == 8
    assert {file.read_bytes() for file in tmp_path.iterdir()} == {BODY}
    assert len(list(tmp_path.iterdir())) == 24


@pytest.mark.parametrize("status", ["404 Not Found", "302 Found"])
def test_connections_of_unread_bodies_are_given_back(status, client, path):
    with Server(reply(status, BODY, then="keep")) as server:
        for _ in range(CONNECTIONS + 1):
            failure(client, path, f"{server.url}/f")
        assert len(server.requests) > CONNECTIONS


def test_text_is_read(client):
    with Server(reply("503 No"), reply("200 OK", "ä".encode(), 'Link: <b>; rel="next"')) as server:
        text, headers = client.text(f"{server.url}/list")
    assert (text, headers["Link"]) == ("ä", '<b>; rel="next"')


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply("200 OK", b"\xff\xfe"), "is not the text that belongs there"),
        (reply("404 Not Found"), "HTTP 404"),
        (reply("200 OK", b"a" * 2000, length=None), "has more than 1,000 bytes"),
        (reply("200 OK", b"a", length="9"), "run the command again"),
        (reply("200 OK", b"no gzip", "Content-Encoding: gzip"), "run the command again"),
    ],
    ids=["no text", "404", "long", "cut", "no gzip"],
)
def test_text_that_cannot_be_read_is_an_error(answer, message, client, monkeypatch):
    monkeypatch.setattr("common.data.http.TEXT_BYTES", 1000)
    with Server(answer) as server, pytest.raises(DataError, match=message):
        client.text(f"{server.url}/list")


@pytest.mark.parametrize("prefix", ["http://", ""], ids=["address", "host and port"])
def test_requests_go_through_the_proxy(prefix, client, path, monkeypatch):
    with Server(stored(BODY)) as proxy:
        monkeypatch.setenv("http_proxy", f"{prefix}{proxy.host}")
        client.fetch(remote("http://nonexistent.invalid/f"), path)
    assert path.read_bytes() == BODY
    assert [request.target for request in proxy.requests] == ["http://nonexistent.invalid/f"]


def test_no_proxy_is_honoured(client, path, monkeypatch, closed_port):
    monkeypatch.setenv("http_proxy", f"http://{closed_port}")
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    with Server(stored(BODY)) as server:
        client.fetch(remote(f"{server.url}/f"), path)
    assert path.read_bytes() == BODY


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_refused_proxy_is_named_without_its_password(scheme, client, path, monkeypatch, closed_port):
    monkeypatch.setenv(f"{scheme}_proxy", f"http://me:secret@{closed_port}")
    message = failure(client, path, f"{scheme}://nonexistent.invalid/f")
    assert f"the proxy http://{closed_port} ({scheme}_proxy) fails: " in message
    assert "Connection refused" in message
    assert "secret" not in message


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_unknown_proxy_is_named(scheme, client, path, monkeypatch):
    monkeypatch.setenv(f"{scheme}_proxy", "http://nonexistent.invalid:3128")
    message = failure(client, path, f"{scheme}://127.0.0.1/f")
    assert f"the proxy http://nonexistent.invalid:3128 ({scheme}_proxy) fails: " in message


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxy_that_asks_for_a_login(scheme, client, lines, path, monkeypatch):
    with Server(reply("407 Proxy Authentication Required", b"", "Proxy-Authenticate: Basic")) as proxy:
        monkeypatch.setenv(f"{scheme}_proxy", proxy.url)
        message = failure(client, path, f"{scheme}://nonexistent.invalid/f")
    assert "the proxy asks for a login; http_proxy=http://USER:PASSWORD@HOST:PORT" in message
    assert lines == []


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxy_gets_its_login(scheme, client, path, monkeypatch):
    with Server(reply("407 Proxy Authentication Required")) as proxy:
        monkeypatch.setenv(f"{scheme}_proxy", f"http://me:a%40b@{proxy.host}")
        failure(client, path, f"{scheme}://nonexistent.invalid/f")
    assert proxy.requests[0].headers["proxy-authorization"] == "Basic bWU6YUBi"  # base64 of me:a@b


@pytest.mark.parametrize(
    "proxy", ["socks9://127.0.0.1:1", "http://[::1", "http://:port"], ids=["kind", "bracket", "port"]
)
def test_unusable_proxy_is_an_error(proxy, client, path, monkeypatch):
    monkeypatch.setenv("http_proxy", proxy)
    assert "proxy" in failure(client, path, "http://nonexistent.invalid/f")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a certificate for 127.0.0.1 that no authority has signed, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl, which makes a certificate")
    folder = tmp_path_factory.mktemp("certificate")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", folder / "key.pem", "-out", folder / "certificate.pem"]
    subprocess.run([openssl, "req", "-x509", *curve, *name, *files], check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "certificate.pem").read_text())
    return both


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_certificate_of_nobody_is_refused(client, lines, path, tls):
    with Server(stored(BODY), tls=tls) as server:
        message = failure(client, path, f"{server.url}/f")
    assert "the certificate of 127.0.0.1 cannot be verified: " in message
    assert "SSL_CERT_FILE=FILE names the authorities" in message
    assert lines == []


def test_certificate_of_another_host_is_refused(client, path, tls, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with Server(stored(BODY), tls=tls) as server:
        message = failure(client, path, f"{server.url.replace('127.0.0.1', 'localhost')}/f")
    assert "the certificate of localhost cannot be verified: " in message


def test_certificate_of_a_named_authority_is_taken(client, path, tls, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with Server(stored(BODY), tls=tls) as https:
        with Server(reply("302 Found", b"", f"Location: {https.url}/g")) as server:
            client.fetch(remote(f"{server.url}/f"), path)
        assert path.read_bytes() == BODY
    with Server(reply("302 Found", b"", "Location: http://127.0.0.1/g"), tls=tls) as https:
        message = failure(client, path.with_name("g"), f"{https.url}/f")
    assert "redirects to http://127.0.0.1/g, which is no https address" in message


def test_redirect_to_a_certificate_of_nobody_is_refused(client, path, tls):
    with Server(stored(BODY), tls=tls) as https, Server(reply("302 No", b"", f"Location: {https.url}/g")) as server:
        assert failure(client, path, f"{server.url}/f").startswith(f"{https.url}/g: the certificate of 127.0.0.1")


def test_http_to_a_server_of_tls_is_an_error(client, path, tls):
    with Server(stored(BODY), tls=tls) as server:
        message = failure(client, path, f"{server.url.replace('https', 'http')}/f")
    assert message.endswith("; run the command again to continue")


def test_https_to_a_server_of_http_is_an_error(client, path):
    with Server(stored(BODY)) as server:
        message = failure(client, path, f"{server.url.replace('http', 'https')}/f")
    assert message.endswith("; run the command again to continue")
