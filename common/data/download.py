"""Fetch large files: resume transfers, check the result, and rename a file only when it is complete.

urllib3 does the HTTP. Resuming, checking and retrying are implemented here, because we know of no Python library that
does all three: pooch starts every transfer again, and huggingface_hub reads only from its own hub.

A file is first written to ``NAME.partial``. ``NAME.partial.json`` stores the validator (ETag or Last-Modified) of the
version that is being downloaded. A transfer is resumed only if the server confirms the same version (If-Range), or if
a published checksum will verify the result.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import urllib3

from common.data.http import Answer, Connections, Transient, refusal
from common.data.preparation import require_space
from common.data.sources import BEGINNING, RemoteFile, foreign_content
from common.errors import DataError
from common.untrusted.strict_json import read_json_object

_CHUNK = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)")


@dataclass
class Client(Connections):
    """Downloads files; can be used by several threads.

    Attributes:
        advance: receives the number of bytes that have arrived; negative if bytes must be fetched again.
    """

    advance: Callable[[int], object] = lambda count: None

    def fetch(self, file: RemoteFile, path: Path) -> RemoteFile:
        """Download ``file`` to ``path``, from the first of its addresses that works.

        Returns:
            The file, with size and checksum from the server if they were not published.

        Raises:
            DataError: no address gave the file; the message is that of the last one. A partial download is kept
                unless it is wrong.
            OSError: the file cannot be written.
        """
        if not file.urls:
            raise DataError(f"{file.name} has no address: {file.licence}")
        path.parent.mkdir(parents=True, exist_ok=True)
        for number, url in enumerate(file.urls, 1):
            try:
                return self._fetch_from(url, file, path)
            except DataError as error:
                if number == len(file.urls) or self.stopped.is_set():
                    raise
                self.report(f"{error}; trying the next address")
        raise AssertionError("the last address raises")

    def _fetch_from(self, url: str, file: RemoteFile, path: Path, again: bool = False) -> RemoteFile:
        transfer = _Transfer(self, url, file, path)
        self.persist(url, transfer.attempt, transfer.arrived)
        try:
            transfer.finish()
        except DataError as error:
            if not transfer.continued or again:
                raise
            self.report(f"{error}; starting over, since a part of it had been there before")
            return self._fetch_from(url, file, path, again=True)
        return transfer.file


class _Transfer:
    """The state of one download across attempts.

    Attributes:
        continued: whether the transfer continues an earlier partial file.
    """

    def __init__(self, client: Client, url: str, file: RemoteFile, path: Path) -> None:
        self.client, self.url, self.file, self.path = client, url, file, path
        self.partial = path.with_name(f"{path.name}.partial")
        self.origin = path.with_name(f"{path.name}.partial.json")
        self.continued = False
        self._hash: Any = None
        self._hashed = self._counted = 0

    def arrived(self) -> int:
        """Return the number of bytes on the disk."""
        return self.partial.stat().st_size if self.partial.exists() else 0

    def attempt(self) -> None:
        """Download the rest of the file.

        Raises:
            Transient: another attempt may succeed.
            DataError: no attempt can succeed.
        """
        self._require_going_on()
        have, validator = self.arrived(), self._validator()
        if have and self.file.checksum is None and validator is None:
            self._drop()
            have = 0
        if have and have == self.file.bytes and self.file.checksum is not None:
            self.continued = True
            self._count(have)
            return
        headers = {"Range": f"bytes={have}-"} if have else {}
        headers |= {"If-Range": validator} if have and validator else {}
        with self.client.opened(self.url, headers) as answer:
            self._learn(answer)
            status = answer.response.status
            if have and status in (206, 416):
                self.continued = True
            if have and status == 416:
                self._require_whole(answer, have)
            elif have and status == 206:
                self._receive(answer, have, self._size_of_same(answer, have, validator))
            elif status == 200:
                self._receive(answer, 0, answer.response.length_remaining)
            else:
                raise refusal(answer, self.file.licence)

    def finish(self) -> None:
        """Check size and checksum of the partial file, and rename it.

        Raises:
            DataError: size or checksum differ; the file is deleted.
        """
        size = self.arrived()
        if self.file.bytes is not None and size != self.file.bytes:
            self._delete()
            raise DataError(f"{self.url} has {size:,} bytes instead of {self.file.bytes:,}; they are deleted")
        if self.file.checksum is not None:
            algorithm, _, expected = self.file.checksum.partition(":")
            self._hash_up_to(size)
            if not (found := self._hash.hexdigest()).startswith(expected):
                self._delete()
                raise DataError(f"{self.url} has {algorithm} {found} instead of {expected}; what arrived is deleted")
        self.partial.replace(self.path)
        self.origin.unlink(missing_ok=True)

    def _learn(self, answer: Answer) -> None:
        """Use size and checksum from Hugging Face's redirect if they were not published."""
        if answer.sha256 and self.file.checksum is None:
            self.file = replace(self.file, checksum=f"sha256:{answer.sha256}")
        if answer.bytes and self.file.bytes is None:
            self.file = replace(self.file, bytes=answer.bytes)

    def _require_whole(self, answer: Answer, have: int) -> None:
        """Accept the status "range not satisfiable" if all bytes have arrived."""
        found = _CONTENT_RANGE.fullmatch(answer.response.headers.get("Content-Range", ""))
        total = int(found[3]) if found and found[3] != "*" else self.file.bytes
        if total != have and (total is not None or self.file.checksum is None):
            self._drop()
            raise Transient(f"has {total or 'fewer'} bytes and not the {have} that were there; starting over")

    def _size_of_same(self, answer: Answer, have: int, validator: str | None) -> int:
        """Return the size of the whole file. Check that the body starts at the end of the partial file.

        The body may be shorter than the rest of the file.
        """
        stated = answer.response.headers.get("Content-Range", "")
        found = _CONTENT_RANGE.fullmatch(stated)
        if found and found[1] is not None and int(found[1]) == have:
            end = int(found[2]) + 1
            total = int(found[3]) if found[3] != "*" else self.file.bytes
            same = None in (validator, now := _validator_of(answer.response)) or now == validator
            if same and total is not None and have < end <= total:
                return total
        self._drop()
        raise Transient(f"answers a request for all bytes from {have:,} on with {stated[:80]!r}; starting over")

    def _receive(self, answer: Answer, have: int, total: int | None) -> None:
        """Append the body to the ``have`` bytes that exist; ``total`` is the size that the server states.

        If the body is the whole file, its first bytes are checked for an error page before the existing bytes are
        deleted.
        """
        response = answer.response
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity" and not self.path.name.endswith("gz"):
            raise DataError(f"{self.url}: is sent as {encoding[:40]}, which was not asked for")
        whole = self.file.bytes if total is None else total
        chunk = self._read(response) if have else self._first_bytes(response, whole)
        if total is not None:
            if self.file.bytes not in (None, total):
                if have:
                    self._drop()
                raise DataError(f"{self.url}: has {total:,} bytes instead of {self.file.bytes:,}")
            require_space(self.path.parent, total - self.arrived())
        if not have:
            self._drop()
        self.origin.write_text(json.dumps({"url": self.url, "validator": _validator_of(response)}), encoding="utf-8")
        self._count(have)
        got = have
        with open(self.partial, "ab") as out:
            while chunk:
                if whole is not None and got + len(chunk) > whole:
                    self._drop()
                    raise DataError(f"{self.url}: has more than the {whole:,} bytes that it should have")
                out.write(chunk)
                self._add_to_hash(got, chunk)
                got += len(chunk)
                self._count(got)
                self._require_going_on()
                chunk = self._read(response)
        if whole is not None and got < whole:
            raise Transient(f"ended after {got:,} of {whole:,} bytes")
        chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
        if whole is None and not chunked and self.file.checksum is None:
            self.client.report(
                f"{self.url}: took {got:,} bytes, but neither server nor publisher says how many there are; compare "
                f"{self.path} with another copy"
            )

    def _first_bytes(self, response: urllib3.BaseHTTPResponse, whole: int | None) -> bytes:
        """Return the first bytes of the file; checks that they are not an error page or another file format."""
        found = b""
        while len(found) < BEGINNING and (chunk := self._read(response)):
            found += chunk
        if not found and not whole:
            raise DataError(f"{self.url}: is empty")
        cut = whole is not None and len(found) < min(whole, BEGINNING)
        beginning = found if cut else found.ljust(BEGINNING, b"\0")
        if (fault := foreign_content(self.file.name, beginning, response.headers.get("Content-Type"))) is not None:
            raise DataError(f"{self.url}: {fault}")
        if cut:
            raise Transient(f"ended after {len(found):,} of {whole:,} bytes")
        return found

    @staticmethod
    def _read(response: urllib3.BaseHTTPResponse) -> bytes:
        return response.read1(_CHUNK, decode_content=False)

    def _require_going_on(self) -> None:
        if self.client.stopped.is_set():
            raise DataError(f"{self.url}: stopped; run the command again to continue")

    def _count(self, arrived: int) -> None:
        self.client.advance(arrived - self._counted)
        self._counted = arrived

    def _drop(self) -> None:
        """Delete the partial file, so that the transfer starts again."""
        self._delete()
        self.continued = False

    def _delete(self) -> None:
        self._count(0)
        self.partial.unlink(missing_ok=True)
        self.origin.unlink(missing_ok=True)
        self._hash = None

    def _validator(self) -> str | None:
        """Return the validator of the version of the partial file, None if it is not known."""
        try:
            found = read_json_object(self.origin)
        except (DataError, FileNotFoundError):
            return None
        validator = found.get("validator")
        return validator if found.get("url") == self.url and isinstance(validator, str) else None

    def _add_to_hash(self, start: int, chunk: bytes) -> None:
        if self.file.checksum is not None:
            self._hash_up_to(start)
            self._hash.update(chunk)
            self._hashed = start + len(chunk)

    def _hash_up_to(self, end: int) -> None:
        """Make the checksum cover the first ``end`` bytes; reads them unless it covers them already."""
        assert self.file.checksum is not None
        if self._hash is not None and self._hashed == end:
            return
        self._hash, self._hashed = hashlib.new(self.file.checksum.partition(":")[0]), end
        if end:
            with open(self.partial, "rb") as file:
                left = end
                while left and (chunk := file.read(min(left, _CHUNK))):
                    self._hash.update(chunk)
                    left -= len(chunk)


def _validator_of(response: urllib3.BaseHTTPResponse) -> str | None:
    """Return the value for If-Range: a strong ETag, or a date."""
    etag = response.headers.get("ETag", "")
    return etag if etag.startswith('"') else response.headers.get("Last-Modified")
