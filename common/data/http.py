"""HTTP requests with redirects, retries, proxies and clear error messages, on top of urllib3.

urllib3 keeps connections open, limits their number and raises one family of errors.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import BadStatusLine, IncompleteRead, RemoteDisconnected, UnknownProtocol
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationParseError,
    LocationValueError,
    NameResolutionError,
    ProtocolError,
    ProxyError,
    SSLError,
)

from common.errors import DataError
from common.untrusted.regular_file import TEXT_BYTES

CONNECTIONS = 8
"""Maximum number of connections to one host."""
_REDIRECTS = 10
_MOST_WAIT_S = 600
"""Longest pause, in seconds, that a server may request; a longer one ends the command."""
_MOST_DELAY_S = 60.0
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524}
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "mlperf-suite"}
_LINKED_SHA256 = re.compile(r'"?([0-9a-f]{64})"?')
_LOGIN = "the proxy asks for a login; http_proxy=http://USER:PASSWORD@HOST:PORT gives one, or https_proxy"
T = TypeVar("T")


class Transient(Exception):
    """A failure after which a retry may succeed.

    Args:
        wait_s: pause that the server requests, in seconds.
        unreachable: whether the host could not be reached at all.
    """

    def __init__(self, message: str, *, wait_s: float | None = None, unreachable: bool = False) -> None:
        super().__init__(message)
        self.wait_s, self.unreachable = wait_s, unreachable


@dataclass(frozen=True)
class Limits:
    """Retry and timeout limits of a transfer.

    Attributes:
        tries: maximum number of consecutive failed attempts without a received byte in between.
        unreachable_tries: attempts in a row if the host cannot be reached at all.
        delay_s: pause after the first failure in seconds; it doubles with each failure, up to a minute.
        timeout_s: seconds without a byte after which a connection is closed.
    """

    tries: int = 8
    unreachable_tries: int = 3
    delay_s: float = 1.0
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Answer:
    """The response to a request, after all redirects.

    Attributes:
        response: the response; status and headers have been read, the body has not.
        url: address that returned it.
        sha256, bytes: checksum and size of the file if a Hugging Face redirect stated them.
    """

    response: urllib3.BaseHTTPResponse
    url: str
    sha256: str | None
    bytes: int | None


@dataclass
class Connections:
    """Connections to any number of hosts; can be used by several threads.

    Attributes:
        limits: retry and timeout limits.
        report: receives a line about each retry.
        stopped: set it to end all waiting.
    """

    limits: Limits = field(default_factory=Limits)
    report: Callable[[str], None] = print
    stopped: threading.Event = field(default_factory=threading.Event)
    _pools: dict[str | None, urllib3.PoolManager] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def stopped_by_failure(self) -> Iterator[None]:
        """Set ``stopped`` if the block fails or is interrupted, so that no thread waits for another attempt.

        It stays set: later requests with this object fail at their first error.
        """
        try:
            yield
        except BaseException:
            self.stopped.set()
            raise

    @contextlib.contextmanager
    def opened(self, url: str, headers: dict[str, str]) -> Iterator[Answer]:
        """Send a GET request, yield the answer, and close the connection afterwards, even if the block fails.

        Connection errors inside the block are converted, too.

        Raises:
            Transient: the connection failed.
            DataError: the address cannot be used.
        """
        sha256, size = None, None
        try:
            for _ in range(_REDIRECTS + 1):
                response = self._pool(url).request(
                    "GET", url, headers=_HEADERS | headers, redirect=False, retries=False, preload_content=False
                )
                try:
                    target = response.headers.get("Location")
                    if response.status not in (301, 302, 303, 307, 308) or target is None:
                        yield Answer(response, url, sha256, size)
                        return
                    if found := _LINKED_SHA256.fullmatch(response.headers.get("X-Linked-Etag", "")):
                        sha256 = found[1]
                    size = whole_number(response.headers.get("X-Linked-Size")) or size
                finally:
                    # A connection cannot be used again before its whole body was read. It must always be returned to
                    # the pool, because the pool blocks when all its connections are in use.
                    if response.length_remaining == 0:
                        response.drain_conn()  # lets http.client detect the end of the body
                    else:
                        response.close()
                    response.release_conn()
                url = _redirected(url, target)
            raise DataError(f"{url}: more than {_REDIRECTS} redirects")
        except LocationValueError as error:
            raise DataError(f"{url}: is no usable address ({error})") from error
        except HTTPError as error:
            raise _named(error, url) from error

    def persist(self, url: str, attempt: Callable[[], T], arrived: Callable[[], int] = lambda: 0) -> T:
        """Return the result of the first successful attempt.

        Args:
            url: address that messages name.
            attempt: raises :class:`Transient` if a retry may succeed.
            arrived: number of bytes received so far; a failure after progress resets the count of failures to 1.

        Raises:
            DataError: too many attempts have failed.
        """
        failures, before = 0, arrived()
        while True:
            try:
                return attempt()
            except Transient as failure:
                now = arrived()
                failures, before = (1 if now > before else failures + 1), max(now, before)
                most = self.limits.unreachable_tries if failure.unreachable else self.limits.tries
                wait_s = min(self.limits.delay_s * 2 ** (failures - 1), _MOST_DELAY_S)
                wait_s = wait_s if failure.wait_s is None else failure.wait_s
                later = f" (the server asks for a pause of {wait_s:.0f} s)" if wait_s > _MOST_WAIT_S else ""
                if failures >= most or later or self.stopped.is_set():
                    raise DataError(f"{url}: {failure}{later}; run the command again to continue") from failure
                self.report(f"{url}: {failure}; attempt {failures + 1} of {most} in {wait_s:.0f} s")
                self.stopped.wait(wait_s)

    def text(self, url: str) -> tuple[str, urllib3.HTTPHeaderDict]:
        """Return a small text, such as a list of files, and the headers of the answer.

        Raises:
            DataError: the text cannot be fetched, is too long or is not UTF-8.
        """

        def read() -> tuple[str, urllib3.HTTPHeaderDict]:
            with self.opened(url, {}) as answer:
                if answer.response.status != 200:
                    raise refusal(answer, "")
                content = answer.response.read(TEXT_BYTES + 1)
                if len(content) > TEXT_BYTES:
                    raise DataError(f"{url}: has more than {TEXT_BYTES:,} bytes, which no list of files has")
                return content.decode(), answer.response.headers

        try:
            return self.persist(url, read)
        except UnicodeDecodeError as error:
            raise DataError(f"{url}: is not the text that belongs there ({error})") from error

    def _pool(self, url: str) -> urllib3.PoolManager:
        proxy = _proxy(url)
        options: dict[str, Any] = {"maxsize": CONNECTIONS, "block": True, "timeout": self.limits.timeout_s}
        with self._lock:
            if proxy not in self._pools:
                self._pools[proxy] = _through(proxy, options) if proxy else urllib3.PoolManager(**options)
            return self._pools[proxy]


def refusal(answer: Answer, licence: str) -> Exception:
    """Return the error for an HTTP status without a file.

    Args:
        licence: licence of the file, which also names the account that is needed.
    """
    response = answer.response
    what = f"HTTP {response.status} {response.reason or ''}".strip()
    if response.status in _TRANSIENT:
        return Transient(what, wait_s=_retry_after(response.headers.get("Retry-After")))
    if response.status in (401, 403):
        what += f": the address asks for an account or an accepted licence, or a proxy refuses it ({licence})"
    if response.status == 407:
        what += f": {_LOGIN}"
    if response.status in (404, 410):
        what += ": the file is not at this address; --mirror names another one"
    return DataError(f"{answer.url}: {what}")


def whole_number(text: str | None) -> int | None:
    """Return the number in a header, None if there is none."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


def _proxy(url: str) -> str | None:
    """Return the proxy for an address, None for a direct connection."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise LocationParseError(url) from error
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _through(proxy: str, options: dict[str, Any]) -> urllib3.ProxyManager:
    """Return connections through a proxy, whose address may contain a login."""
    try:
        parts = urlsplit(proxy)
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
        headers = urllib3.make_headers(proxy_basic_auth=login) if login else None
        return urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
    except ValueError as error:
        raise DataError(f"http_proxy or https_proxy is no usable address of a proxy: {error}") from error


def _named(error: HTTPError, url: str) -> Exception:
    """Return a :class:`Transient` or DataError that describes a connection error."""
    parts = urlsplit(url)
    cause = error.args[-1] if isinstance(error, ProtocolError | ProxyError) else error
    text = re.sub(r"^<[^>]*>: |^HTTPS?Connection(Pool)?\([^)]*\): ", "", str(cause) or str(error))[:300]
    if isinstance(error, ProxyError):
        if "407" in text:
            return DataError(f"{url}: {_LOGIN}")
        proxy = re.sub("//.*@", "//", _proxy(url) or "")  # without the password
        return Transient(f"the proxy {proxy} ({parts.scheme}_proxy) fails: {text}", unreachable=True)
    if isinstance(cause, IncompleteRead):
        return Transient(f"the answer ended {f'{cause.expected:,} bytes ' if cause.expected else ''}too early")
    if isinstance(cause, BadStatusLine | UnknownProtocol) and not isinstance(cause, RemoteDisconnected):
        return Transient(f"the server does not speak HTTP 1: {text!r}")
    if isinstance(error, SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return DataError(
            f"{url}: the certificate of {parts.hostname} cannot be verified: {text}; where a proxy has one of its own, "
            "SSL_CERT_FILE=FILE names the authorities to trust"
        )
    if isinstance(error, NameResolutionError):
        return Transient(f"the name of {parts.hostname} cannot be resolved", unreachable=True)
    return Transient(text or type(error).__name__, unreachable=isinstance(error, ConnectTimeoutError))


def _redirected(url: str, target: str) -> str:
    """Return the target address of a redirect."""
    try:
        found = urljoin(url, target)
        parts = urlsplit(found)
    except ValueError as error:
        raise DataError(f"{url}: redirects to {target[:200]!r}, which is no address") from error
    if "cloudflareaccess.com" in (parts.hostname or "") or "/cdn-cgi/access/login" in parts.path:
        raise DataError(f"{url}: asks for a login")
    if parts.scheme not in ("http", "https") or (urlsplit(url).scheme == "https" and parts.scheme == "http"):
        raise DataError(f"{url}: redirects to {found[:200]}, which is no https address")
    return found


def _retry_after(text: str | None) -> float | None:
    """Return the pause in seconds that a Retry-After header requests, as a number or as a date."""
    if (seconds := whole_number(text)) is not None:
        return float(seconds)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text or "").timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
