"""Test that gzip data are inflated in pieces, and that damage is found."""

from __future__ import annotations

import gzip
import random

import pytest

from common.errors import DataError
from common.untrusted import archives
from common.untrusted.archives import gunzip


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inflate few bytes at once."""
    monkeypatch.setattr(archives, "_GZIP_BYTES", 100)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("members", [1, 3])
def test_gzip_files_are_inflated(members):
    parts = [random.Random(number).randbytes(700 + number) for number in range(members)]
    packed = b"".join(gzip.compress(part, mtime=0) for part in parts)
    assert b"".join(gunzip(memoryview(packed))) == b"".join(parts)


@pytest.mark.usefixtures("small_pieces")
def test_zeros_behind_the_last_member_are_padding():
    assert b"".join(gunzip(memoryview(gzip.compress(b"all", mtime=0) + bytes(1000)))) == b"all"


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("left", [0, 5, 100, 400, -1])
def test_a_truncated_gzip_file_is_an_error(left):
    packed = gzip.compress(random.Random(0).randbytes(700), mtime=0)[:left]
    with pytest.raises(DataError, match="the gzip data end early"):
        list(gunzip(memoryview(packed)))


@pytest.mark.parametrize("position", [0, 350, -6], ids=["header", "data", "checksum"])
def test_a_damaged_gzip_file_is_an_error(position):
    packed = bytearray(gzip.compress(random.Random(0).randbytes(700), mtime=0))
    packed[position] ^= 1
    with pytest.raises(DataError, match="the gzip data are damaged"):
        list(gunzip(memoryview(packed)))
