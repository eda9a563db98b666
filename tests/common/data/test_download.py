"""Downloads against a server of this process: complete, continued, cut off, damaged."""

import hashlib
import http.server
import threading

import pytest

from common.data.download import RemoteFile, check_or_download
from common.errors import DataError

BODY = bytes(range(256)) * 40
MD5 = f"md5:{hashlib.md5(BODY).hexdigest()}"


class Handler(http.server.BaseHTTPRequestHandler):
    ranges: list = []  # noqa: RUF012

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.ranges.append(wanted)
        if self.path == "/gone":
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if start >= len(BODY):
            self.send_error(416)
            return
        body = BODY[start:] if self.path == "/whole" else BODY[start : start + 1000]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) + (100 if self.path == "/cut" else 0)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    Handler.ranges = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_file_arrives_under_its_name(url, tmp_path):
    [path] = check_or_download([RemoteFile("f", f"{url}/whole", "free", len(BODY), MD5)], tmp_path / "new")
    assert path.read_bytes() == BODY
    assert [entry.name for entry in path.parent.iterdir()] == ["f"]


def test_partial_file_is_continued(url, tmp_path):
    (tmp_path / "f.partial").write_bytes(BODY[:300])
    check_or_download([RemoteFile("f", f"{url}/whole", "free", len(BODY), MD5)], tmp_path)
    assert (tmp_path / "f").read_bytes() == BODY
    assert Handler.ranges == ["bytes=300-"]


@pytest.mark.parametrize("size", [None, len(BODY)])
def test_partial_file_that_is_complete_needs_no_more(url, tmp_path, size):
    (tmp_path / "f.partial").write_bytes(BODY)
    check_or_download([RemoteFile("f", f"{url}/whole", "free", size, MD5)], tmp_path)
    assert (tmp_path / "f").read_bytes() == BODY


def test_early_end_keeps_what_arrived(url, tmp_path):
    with pytest.raises(DataError, match=r"ended after 1000 of 10240 bytes; run the command again"):
        check_or_download([RemoteFile("f", f"{url}/short", "free", len(BODY), MD5)], tmp_path)
    assert (tmp_path / "f.partial").stat().st_size == 1000
    assert not (tmp_path / "f").exists()


def test_early_end_is_noticed_where_no_size_is_known(url, tmp_path):
    with pytest.raises(DataError, match=r"ended after 1000 of 1100 bytes; run the command again"):
        check_or_download([RemoteFile("f", f"{url}/cut", "free")], tmp_path)
    assert (tmp_path / "f.partial").stat().st_size == 1000
    with pytest.raises(DataError, match=r"ended after 2000 of 2100 bytes"):
        check_or_download([RemoteFile("f", f"{url}/cut", "free")], tmp_path)
    check_or_download([RemoteFile("f", f"{url}/whole", "free")], tmp_path)
    assert (tmp_path / "f").read_bytes() == BODY


def test_wrong_checksum_is_thrown_away(url, tmp_path):
    with pytest.raises(DataError, match=r"md5 .* instead of 00"):
        check_or_download([RemoteFile("f", f"{url}/whole", "free", len(BODY), "md5:00")], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_http_error_is_told(url, tmp_path):
    with pytest.raises(DataError, match="/gone: HTTP 404"):
        check_or_download([RemoteFile("f", f"{url}/gone", "free")], tmp_path)


def test_files_that_need_an_account_are_all_named(tmp_path):
    files = [RemoteFile(name, None, "ask nicely", 5, "md5:1") for name in ("a.tar", "b.tar")]
    with pytest.raises(DataError, match=r"(?s)a\.tar \(5 bytes, md5:1\): ask nicely.*b\.tar"):
        check_or_download(files, tmp_path)


def test_file_in_place_is_checked(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"1234")
    with pytest.raises(DataError, match=r"a\.tar has 4 bytes instead of 5"):
        check_or_download([RemoteFile("a.tar", None, "ask nicely", 5)], tmp_path)
