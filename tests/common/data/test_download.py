"""Transfers from a server that breaks the protocol: each ends with the right file, or with one clear line."""

from __future__ import annotations

import email.utils
import gzip
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.data.download import Client
from common.data.sources import RemoteFile
from common.errors import DataError
from tests.http_server import Answer, Script, Server, reply, stored

BODY = bytes(range(1, 256)) * 20
SIZE = len(BODY)
OTHER = BODY[::-1]
MD5 = f"md5:{hashlib.md5(BODY).hexdigest()}"
SHA256 = f"sha256:{hashlib.sha256(BODY).hexdigest()}"
PAGE = b"<!DOCTYPE html><html><head><title>Please log in</title></head></html>" + b" " * 600
S3_ERROR = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
TAR = b"a.txt".ljust(257, b"\0") + b"ustar\x0000" + bytes(2000)
CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:4000], BODY[4000:]))
CHUNKED = ("200 OK", CHUNKS + b"0\r\n\r\n", "Transfer-Encoding: chunked")
LAST_MODIFIED = "Last-Modified: Mon, 12 Oct 2026 10:00:00 GMT"
FIRST_TAG = 'ETag: "1"'


@dataclass(frozen=True)
class Case:
    """What a server answers, and what has to come of it.

    Attributes:
        answers: one after another; the last one is given again and again.
        message: of the error; None where the file has to arrive.
        report: of a line that has to be reported.
        name: of the file.
        body: content that has to arrive.
        size, checksum: published ones.
        part: bytes that are on the disk before.
        validator: of the version that these are a part of.
        ranges: ``Range`` of each request, where it matters.
        kept: bytes that have to be on the disk after an error, where it matters.
    """

    id: str
    answers: tuple[Answer | Script, ...]
    message: str | None = None
    report: str | None = None
    name: str = "f.bin"
    body: bytes = BODY
    size: int | None = None
    checksum: str | None = None
    part: bytes | None = None
    validator: str | None = '"1"'
    ranges: tuple[str | None, ...] | None = None
    kept: int | None = None
    tries: int = 2


def from_(start: int) -> str:
    return f"bytes={start}-"


def partial(body: bytes, content_range: str | None, *fields: str, **options: str | None) -> Answer:
    """Make the answer 206."""
    stated = () if content_range is None else (f"Content-Range: {content_range}",)
    return reply("206 Partial Content", body, *stated, *fields, **options)  # type: ignore[arg-type]


def moved(target: str, status: int = 302, *fields: str) -> Answer:
    return reply(f"{status} Moved", b"moved", f"Location: {target}", *fields)


def in_seconds(seconds: float) -> str:
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


def retry_after(value: str | Callable[[], str]) -> Script:
    """Make the script of a busy server; a function is called when the request comes."""
    return lambda request: reply(
        "429 Too Many Requests", b"", f"Retry-After: {value if isinstance(value, str) else value()}"
    )


WHOLE = stored(BODY)
LINKED = moved("/b", 302, f'X-Linked-Etag: "{SHA256[7:]}"', f"X-Linked-Size: {SIZE}")
REST = f"bytes 300-{SIZE - 1}/{SIZE}"
PART = BODY[:300]
OLD_PART = OTHER[:300]

STATUSES = (
    Case("200", (WHOLE,)),
    Case("204", (reply("204 No Content"),), r"HTTP 204 No Content"),
    Case("206 that nobody asked for", (partial(BODY, f"bytes 0-{SIZE - 1}/{SIZE}"),), r"HTTP 206"),
    Case("300 without address", (reply("300 Multiple Choices"),), r"HTTP 300"),
    *(Case(f"{status} to the file", (moved("/b", status), WHOLE)) for status in (301, 302, 303, 307, 308)),
    Case("chain of redirects", (moved("/b"), moved("/c", 301), moved("../d?x=1", 307), WHOLE)),
    Case("relative redirect", (moved("b"), WHOLE)),
    Case("redirect without body", (reply("302 Found", b"", "Location: /b", length=None), WHOLE)),
    Case("redirect without address", (reply("302 Found", b""),), r"HTTP 302 Found$"),
    Case("endless redirects", (moved("/f.bin"),), r"more than 10 redirects"),
    Case("redirect to ftp", (moved("ftp://127.0.0.1/f.bin"),), r"redirects to ftp://\S+, which is no https"),
    Case("redirect to a file", (moved("file:///etc/passwd"),), r"redirects to file:///etc/passwd, which"),
    Case("redirect to no address", (moved("http://[::1/b"),), r"redirects to 'http://\[::1/b', which is no"),
    Case("redirect to no host", (moved("http://:80/b"),), r"is no usable address"),
    Case("redirect to a wrong port", (moved("http://127.0.0.1:99999/b"),), r"is no usable address"),
    Case("redirect to a login", (moved("https://a.cloudflareaccess.com/cdn-cgi/access/login/a"),), r"asks for a login"),
    Case("redirect to a login below", (moved("/cdn-cgi/access/login/a"),), r"asks for a login"),
    Case("304", (reply("304 Not Modified"),), r"HTTP 304 Not Modified"),
    Case("400", (reply("400 Bad Request", b"no"),), r"HTTP 400 Bad Request"),
    Case("401", (reply("401 Unauthorized"),), r"HTTP 401 .*an account or an accepted licence.*\(ask nicely\)"),
    Case("403", (reply("403 Forbidden", PAGE),), r"HTTP 403 .*or a proxy refuses it \(ask nicely\)"),
    Case("404", (reply("404 Not Found", PAGE),), r"HTTP 404 Not Found: the file is not at this address; --mirror"),
    Case("407", (reply("407 Proxy Authentication Required"),), r"HTTP 407 .*http_proxy=http://USER:PASSWORD@"),
    Case("408 once", (reply("408 Request Timeout"), WHOLE)),
    Case("410", (reply("410 Gone"),), r"HTTP 410 Gone: the file is not at this address"),
    Case("416 of the whole file", (reply("416 Range Not Satisfiable"),), r"HTTP 416"),
    Case("429 once", (retry_after("0"), WHOLE), report=r"HTTP 429 Too Many Requests; attempt 2 of 2 in 0 s"),
    Case("429 until a date that is past", (retry_after(lambda: in_seconds(-60)), WHOLE), report=r"429.* in 0 s"),
    Case("429 for an hour", (retry_after("3600"),), r"HTTP 429 .*asks for a pause of 3600 s.*run the command again"),
    Case("429 until tomorrow", (retry_after(lambda: in_seconds(86400)),), r"asks for a pause of 8\d{4} s"),
    Case("429 for ever", (retry_after("9" * 18),), r"asks for a pause of \d{18,19} s"),
    *(
        Case(f"429 and garbage: {name}", (retry_after(value), WHOLE), report=r"HTTP 429")
        for name, value in {
            "word": "soon",
            "negative": "-5",
            "empty": "",
            "long number": "9" * 400,
            "year 99999": "Wed, 21 Oct 99999 07:28:00 GMT",
            "zone": "Wed, 21 Oct 2015 07:28:00 +99999999999999",
            "year 1": "Mon, 01 Jan 0001 00:00:00 +2359",
            "bytes": "\xff\xfe",
        }.items()
    ),
    Case("500 once", (reply("500 Internal Server Error", PAGE), WHOLE)),
    Case("502 once", (reply("502 Bad Gateway", PAGE), WHOLE)),
    Case("503 once", (reply("503 Service Unavailable"), WHOLE), report=r"HTTP 503.*; attempt 2 of 2 in 0 s"),
    Case("503 for ever", (reply("503 Slow Down"),), r"HTTP 503 Slow Down; run the command again", report=r"HTTP 503"),
    Case("504 in the middle", (reply("504 Gateway Timeout"), WHOLE), part=PART, ranges=(from_(300),) * 2),
    Case("520 once", (reply("520 "), WHOLE), report=r"HTTP 520;"),
    Case("501", (reply("501 Not Implemented"),), r"HTTP 501"),
    Case("status 999", (reply("999 Request Denied"),), r"HTTP 999 Request Denied"),
    Case("status 1000", (reply("1000 No"),), r"does not speak HTTP"),
    Case("status banana", (reply("banana", BODY),), r"does not speak HTTP.*banana"),
    Case("more than ten failures' bodies", (*(reply("500 No", PAGE) for _ in range(12)), WHOLE), tries=13),
)
RANGES = (
    Case("range honoured", (WHOLE,), part=PART, ranges=(from_(300),)),
    Case("range ignored", (reply("200 OK", BODY, FIRST_TAG),), part=PART, ranges=(from_(300),)),
    Case("range behind a redirect", (moved("/b"), WHOLE), part=PART, ranges=(from_(300),) * 2),
    Case("range ignored, other part", (reply("200 OK", BODY, FIRST_TAG),), part=OLD_PART, checksum=MD5),
    Case("range from the beginning", (partial(BODY, f"bytes 0-{SIZE - 1}/{SIZE}"), WHOLE), part=PART, report="start"),
    Case("range from the wrong byte", (partial(BODY[299:], f"bytes 299-{SIZE - 1}/{SIZE}"), WHOLE), part=PART),
    Case("no Content-Range", (partial(BODY[300:], None), WHOLE), part=PART, ranges=(from_(300), None)),
    Case("Content-Range is garbage", (partial(BODY[300:], "bytes 3oo-"), WHOLE), part=PART, report=r"3oo-"),
    Case("Content-Range backwards", (partial(b"", f"bytes 300-200/{SIZE}"), WHOLE), part=PART),
    Case(
        "multipart/byteranges",
        (partial(b"--x\r\n" + BODY, None, "Content-Type: multipart/byteranges; boundary=x"), WHOLE),
        part=PART,
    ),
    Case(
        "shorter range than asked",
        (partial(BODY[300:900], f"bytes 300-899/{SIZE}", FIRST_TAG), WHOLE),
        part=PART,
        ranges=(from_(300), from_(900)),
    ),
    Case("shorter range of unknown total", (partial(BODY[300:900], "bytes 300-899/*"), WHOLE), part=PART),
    Case("unknown total, size published", (partial(BODY[300:], f"bytes 300-{SIZE - 1}/*"),), part=PART, size=SIZE),
    Case("total is not the published size", (WHOLE,), r"5,100 bytes instead of 6,000", size=6000, part=PART),
    Case("total is not the end", (partial(BODY[300:], f"bytes 300-{SIZE - 1}/1000"), WHOLE), part=PART),
    Case("range longer than the body", (partial(BODY[300:900], REST, length=None), WHOLE), part=PART),
    Case("body longer than the range", (partial(OTHER, REST, FIRST_TAG),), r"more than the 5,100", part=PART, kept=0),
    Case("416, complete", (WHOLE,), part=BODY, ranges=(from_(SIZE),)),
    Case("416, longer than the file", (WHOLE,), part=BODY + b"x", ranges=(from_(SIZE + 1), None)),
    Case("416 without total, size known", (reply("416 No"),), part=BODY, size=SIZE),
    Case("416 without total, nothing known", (reply("416 No"), WHOLE), part=BODY, ranges=(from_(SIZE), None)),
    Case("416 without total, checksum", (reply("416 No"),), part=BODY, checksum=SHA256),
    Case("416 without total, wrong checksum", (reply("416 No"), WHOLE), part=OTHER, checksum=SHA256),
    Case("416 for ever", (reply("416 No"),), r"HTTP 416 No", part=BODY[:-1]),
)
VERSIONS = (
    Case("same ETag", (WHOLE,), part=PART, ranges=(from_(300),)),
    Case("other ETag", (WHOLE,), part=OLD_PART, validator='"0"', ranges=(from_(300),)),
    Case("other ETag, If-Range ignored", (partial(BODY[300:], REST, FIRST_TAG), WHOLE), part=OLD_PART, validator='"0"'),
    Case(
        "weak ETag",
        (stored(BODY, etag='W/"1"', cut=1000), stored(BODY, etag='W/"1"')),
        ranges=(None, None),
    ),
    Case(
        "Last-Modified only",
        (
            reply("200 OK", BODY[:1000], LAST_MODIFIED, length=str(SIZE)),
            partial(BODY[1000:], f"bytes 1000-{SIZE - 1}/{SIZE}", LAST_MODIFIED),
        ),
        ranges=(None, from_(1000)),
    ),
    Case("no validator", (WHOLE,), part=OLD_PART, validator=None, ranges=(None,)),
    Case("no validator, checksum", (WHOLE,), part=PART, validator=None, checksum=MD5, ranges=(from_(300),)),
    Case("no validator, wrong part", (WHOLE,), part=OLD_PART, validator=None, checksum=MD5, ranges=(from_(300), None)),
    Case("part is complete", (reply("500 No"),), part=BODY, size=SIZE, checksum=MD5, ranges=()),
    Case("part is complete and wrong", (WHOLE,), part=OTHER, size=SIZE, checksum=MD5, ranges=(None,)),
    Case("part is longer, checksum", (WHOLE,), part=BODY + OTHER, size=SIZE, checksum=MD5),
    Case("part is empty", (WHOLE,), part=b"", ranges=(None,)),
    Case(
        "cut and wrong for ever",
        (stored(OTHER, cut=1000),),
        rf"md5 \w+ instead of {MD5[4:]}; what arrived is deleted",
        checksum=MD5,
        kept=0,
    ),
)
LENGTHS = (
    Case("cut once", (stored(BODY, cut=1000), WHOLE), report=r"4,100 bytes too early", ranges=(None, from_(1000))),
    Case("cut at each answer", (reply("200 OK", BODY[:1000], length=str(SIZE)),), r"run the command again", kept=1000),
    Case("reset in the body", (reply("200 OK", BODY[:1000], FIRST_TAG, length=str(SIZE), then="reset"), WHOLE)),
    Case("no length", (reply("200 OK", BODY, length=None),), report=r"neither server nor publisher says how many"),
    Case("no length, size published", (reply("200 OK", BODY, length=None),), size=SIZE),
    Case(
        "no length, cut, size published",
        (reply("200 OK", BODY[:-1], FIRST_TAG, length=None), WHOLE),
        size=SIZE,
        ranges=(None, from_(SIZE - 1)),
    ),
    Case("no length, cut, checksum", (reply("200 OK", BODY[:-1], length=None),), r"md5 \w+ instead", checksum=MD5),
    Case("no length, too long", (reply("200 OK", BODY * 2, length=None),), r"more than .*5,100", size=SIZE, kept=0),
    Case("chunked", (reply(*CHUNKED, length=None),)),
    Case("chunked, keep-alive", (reply(*CHUNKED, length=None, then="keep"),)),
    Case(
        "chunked and cut",
        (reply("200 OK", CHUNKS[:3000], FIRST_TAG, CHUNKED[2], length=None), WHOLE),
        report=r"; attempt 2",
    ),
    Case("chunked without end", (reply("200 OK", CHUNKS, CHUNKED[2], length=None), WHOLE), report=r"; attempt 2"),
    Case("chunk size is garbage", (reply("200 OK", b"xyz\r\nabc", CHUNKED[2], length=None), WHOLE), report=r"; attem"),
    Case("chunk size is negative", (reply("200 OK", b"-5\r\nabcde\r\n0\r\n\r\n", CHUNKED[2], length=None), WHOLE)),
    Case("length is too long", (reply("200 OK", BODY, length="6000"),), r"run the command again", kept=SIZE),
    Case("length is too short", (reply("200 OK", BODY, length="5000"),), r"5,000 bytes instead of 5,100", size=SIZE),
    Case("body is longer than its length", (reply("200 OK", BODY + OTHER, length=str(SIZE)),)),
    Case("length banana", (reply("200 OK", BODY, length="banana"),), report=r"neither server nor publisher"),
    Case("length is negative", (reply("200 OK", BODY, length="-1"),), report=r"neither server nor publisher"),
    Case("two lengths", (reply("200 OK", BODY, "Content-Length: 7"), WHOLE), report=r"multiple unmatching values"),
    Case("length twice", (reply("200 OK", BODY, f"Content-Length: {SIZE}"),)),
    Case("length is of petabytes", (reply("200 OK", BODY, length="9" * 17),), r"needs .* GB.*its disk has"),
    Case("other size", (reply("200 OK", BODY),), r"has 5,100 bytes instead of 6,000", size=6000),
    Case("empty", (reply("200 OK"),), r"is empty"),
    Case("empty without length", (reply("200 OK", length=None),), r"is empty"),
)
CONTENTS = (
    Case("gzip that nobody asked for", (reply("200 OK", gzip.compress(BODY), "Content-Encoding: gzip"),), r"as gzip"),
    Case(
        "gzip of a gzip file",
        (reply("200 OK", gzip.compress(BODY, mtime=0), "Content-Encoding: gzip"),),
        name="f.gz",
        body=gzip.compress(BODY, mtime=0),
    ),
    *(
        Case(f"page for {name}", (reply("200 OK", PAGE, "Content-Type: text/html"),), r"is a page.*Please", name=name)
        for name in ("f.gz", "f.npy", "f.bin", "f.tar")
    ),
    Case("page without a type", (reply("200 OK", b"\n " + PAGE),), r"is a page or a pointer"),
    Case("page that looks like no page", (reply("200 OK", BODY, "Content-Type: text/html; charset=x"),), r"is a page"),
    Case("page instead of the rest", (reply("200 OK", PAGE),), r"is a page", part=PART, kept=300),
    Case("page of the right size", (reply("200 OK", PAGE),), r"is a page", size=len(PAGE)),
    Case("page in pieces", (reply("200 OK", b"1\r\n<\r\n4\r\nhtml\r\n0\r\n\r\n", CHUNKED[2], length=None),), r"a page"),
    Case("XML error for .bin", (reply("200 OK", S3_ERROR),), r"is a page or a pointer"),
    Case("LFS pointer", (reply("200 OK", POINTER),), r"is a page or a pointer that begins with 'version https"),
    Case("JSON for .tar", (reply("200 OK", b'{"error": "no"}'),), r"is JSON.*not f\.tar", name="f.tar"),
    Case("JSON for .npz", (reply("200 OK", b'{"error": "no"}'),), r"is JSON.*not f\.npz", name="f.npz"),
    Case("tar", (stored(TAR),), name="f.tar", body=TAR),
    Case("tar cut in its header", (stored(TAR, cut=100), stored(TAR)), name="f.tar", body=TAR),
    Case("no tar, cut in its header", (stored(BODY, cut=100), stored(BODY)), r"as no \.tar file", name="f.tar"),
    Case(
        "no tar, cut in its header, no length",
        (reply("200 OK", BODY[:100], FIRST_TAG, length=None), WHOLE),
        r"as no \.tar file",
        name="f.tar",
        size=SIZE,
    ),
    Case("wrong MD5", (stored(OTHER),), rf"md5 \w+ instead of {MD5[4:]}", checksum=MD5, kept=0),
    Case("wrong SHA-256", (stored(OTHER),), r"sha256 \w+ instead of", checksum=SHA256, kept=0),
    Case("wrong prefix", (stored(OTHER),), r"sha256 \w+ instead of", checksum=SHA256[:15], kept=0),
    Case("right prefix", (stored(BODY),), checksum=SHA256[:15]),
    Case(
        "Hugging Face",
        (LINKED, WHOLE),
    ),
    Case(
        "Hugging Face, wrong content",
        (LINKED, stored(OTHER)),
        rf"sha256 \w+ instead of {SHA256[7:]}",
    ),
    Case(
        "Hugging Face, wrong size",
        (moved("/b", 302, f'X-Linked-Etag: "{SHA256[7:]}"', "X-Linked-Size: 7"), WHOLE),
        r"5,100 bytes instead of 7",
    ),
    Case(
        "Hugging Face, cut",
        (LINKED, stored(BODY, cut=1000), LINKED, WHOLE),
        ranges=(None, None, from_(1000), from_(1000)),
    ),
    Case("Hugging Face, garbage", (moved("/b", 302, "X-Linked-Etag: x", "X-Linked-Size: -1"), WHOLE)),
)
BROKEN = (
    Case("closed before any answer", (Answer(b""),), r"closed connection without response"),
    Case("closed before any answer once", (Answer(b""), WHOLE), report=r"closed connection"),
    Case("reset before any answer", (Answer(b"", "reset"),), r"reset by peer"),
    Case("closed in the headers", (Answer(b"HTTP/1.1 200 OK\r\nContent-Le"),), r"is empty|no HTTP|run the command"),
    Case("SSH", (Answer(b"SSH-2.0-OpenSSH_9.6\r\n"),), r"does not speak HTTP.*SSH-2\.0-OpenSSH"),
    Case("alert of TLS", (Answer(b"\x15\x03\x01\x00\x02\x02\x46"),), r"does not speak HTTP"),
    Case("HTTP/2", (Answer(b"HTTP/2.0 200 OK\r\n\r\n"),), r"does not speak HTTP.*HTTP/2\.0"),
    Case("endless status line", (Answer(b"HTTP/1.1 200 " + b"x" * 70_000),), r"more than 65536 bytes"),
    Case("endless header line", (reply("200 OK", BODY, "X: " + "x" * 70_000),), r"more than 65536 bytes"),
    Case("endless headers", (reply("200 OK", BODY, *("X: x",) * 200),), r"more than 100 headers"),
    Case("header without colon", (reply("200 OK", BODY, "banana"),)),
)
STALLS = (
    Case("stall before any answer", (Answer(b"", "stall"),), r"[Tt]imed out.*run the command again"),
    Case("stall in the headers", (Answer(b"HTTP/1.1 200 OK\r\nX:", "stall"), WHOLE), report=r"timed out"),
    Case(
        "stall in the body",
        (reply("200 OK", BODY[:1000], FIRST_TAG, length=str(SIZE), then="stall"), WHOLE),
        report=r"timed out",
        ranges=(None, from_(1000)),
    ),
    Case("stall in a chunk", (reply("200 OK", CHUNKS[:900], CHUNKED[2], length=None, then="stall"),), r"timed out"),
)


def put_part(path: Path, part: bytes, url: str, validator: str | None) -> None:
    path.with_name(f"{path.name}.partial").write_bytes(part)
    path.with_name(f"{path.name}.partial.json").write_text(json.dumps({"url": url, "validator": validator}))


def remote(*urls: str, name: str = "f.bin", size: int | None = None, checksum: str | None = None) -> RemoteFile:
    return RemoteFile(name, urls, "ask nicely", size, checksum)


def check_failure(client: Client, file: RemoteFile, path: Path, message: str) -> None:
    """Fetch, and compare the error with what it has to be: one line, and no file."""
    with pytest.raises(DataError, match=message) as raised:
        client.fetch(file, path)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 700
    assert not path.exists()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{kind}: {case.id}")
        for kind, cases in {
            "status": STATUSES,
            "range": RANGES,
            "version": VERSIONS,
            "length": LENGTHS,
            "content": CONTENTS,
            "broken": BROKEN,
            "stall": STALLS,
        }.items()
        for case in cases
    ],
)
def test_each_answer_gives_the_file_or_one_line(case, client, lines, tmp_path):
    timeout_s = 0.3 if case in STALLS else 20
    client.limits = replace(client.limits, tries=case.tries, timeout_s=timeout_s)
    path = tmp_path / case.name
    with Server(*case.answers) as server:
        url = f"{server.url}/{case.name}"
        if case.part is not None:
            put_part(path, case.part, url, case.validator)
        file = remote(url, name=case.name, size=case.size, checksum=case.checksum)
        if case.message is None:
            client.fetch(file, path)
            assert path.read_bytes() == case.body
            assert [entry.name for entry in tmp_path.iterdir()] == [case.name]
        else:
            check_failure(client, file, path, case.message)
    if case.report is not None:
        assert re.search(case.report, "\n".join(lines))
    if case.ranges is not None:
        assert tuple(request.headers.get("range") for request in server.requests) == case.ranges
    if case.kept is not None:
        kept = path.with_name(f"{path.name}.partial")
        assert (kept.stat().st_size if kept.exists() else 0) == case.kept


@pytest.mark.parametrize("part", [b"", PART, OLD_PART, BODY], ids=["none", "part", "wrong part", "complete"])
def test_progress_is_the_size(part, client, tmp_path):
    counts = []
    client.advance = counts.append
    with Server(stored(BODY, cut=1000), stored(BODY, cut=2000, etag='"2"'), stored(BODY, etag='"2"')) as server:
        put_part(tmp_path / "f.bin", part, f"{server.url}/f", None)
        client.fetch(remote(f"{server.url}/f", size=SIZE, checksum=MD5), tmp_path / "f.bin")
    assert sum(counts) == SIZE


def test_part_of_another_address_is_not_continued(client, tmp_path):
    with Server(WHOLE) as server:
        put_part(tmp_path / "f.bin", OLD_PART, f"{server.url}/other", '"1"')
        client.fetch(remote(f"{server.url}/f"), tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == BODY


@pytest.mark.parametrize("answer", [WHOLE, reply("200 OK", BODY)], ids=["range honoured", "range ignored"])
def test_a_partial_download_counts_as_free_space(answer, client, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=SIZE - 300))
    with Server(answer) as server:
        put_part(tmp_path / "f.bin", PART, f"{server.url}/f", '"1"')
        client.fetch(remote(f"{server.url}/f"), tmp_path / "f.bin")
        check_failure(client, remote(f"{server.url}/f"), tmp_path / "g.bin", r"needs .* GB more; its disk has")
