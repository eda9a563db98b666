"""Pictures that the tables name, fetched from a server of this process."""

from __future__ import annotations

import dataclasses
import http.server
import threading

import pytest

from benchmarks.retinanet import raw
from benchmarks.retinanet.prepare import download_pictures
from benchmarks.retinanet.raw import class_names
from common.data.download import Client
from common.data.http import Limits
from common.data.sources import read_sources
from common.errors import DataError
from tests.benchmarks.retinanet.small_pictures import COLUMNS, label, row, smooth

DESCRIBED = "".join(f"{label(index)},{name}\n" for index, name in enumerate([*class_names(), "Tree"]))


class Handler(http.server.BaseHTTPRequestHandler):
    files: dict = {}  # noqa: RUF012
    requested: list = []  # noqa: RUF012

    def do_GET(self):
        self.requested.append(self.path)
        body = self.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def download(tmp_path):
    """Download the pictures of two small tables below ``tmp_path``."""
    for split, names in (("train", ("a1", "b2")), ("validation", ("c3",))):
        rows = [row(name, label(0), "0,1,0,1") for name in names]
        rows.append(row("tree", label(264), "0,1,0,1"))  # of no class of the benchmark
        (tmp_path / raw.SPLITS[split]).write_text("\n".join([COLUMNS, *rows]))
    (tmp_path / raw.CLASSES).write_text(DESCRIBED)
    Handler.requested = []
    Handler.files = {
        **{f"/train/{name}.jpg": smooth(20, 30, number) for number, name in enumerate(("a1", "b2"))},
        "/validation/c3.jpg": smooth(20, 30, 5),
    }
    sources = read_sources("retinanet")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        sets = {**sources.sets, "pictures": dataclasses.replace(sources["pictures"], addresses=(address,))}
        client = Client(limits=Limits(tries=1, delay_s=0))
        yield lambda check=False: list(
            download_pictures(tmp_path, dataclasses.replace(sources, sets=sets), client, check)
        )
        server.shutdown()


def test_the_selected_pictures_are_fetched_once(download, tmp_path):
    assert download()[0].endswith("train: 2 pictures, 2 of them fetched now; no checksum published")
    for path, content in Handler.files.items():
        assert (tmp_path / path.removeprefix("/")).read_bytes() == content
    Handler.requested.clear()
    assert download()[1].endswith("validation: 1 pictures, 0 of them fetched now; no checksum published")
    assert Handler.requested == []


def test_check_names_a_missing_picture_and_fetches_none(download):
    with pytest.raises(DataError, match=r"train lacks 2 of 2 pictures, such as a1\.jpg"):
        download(check=True)
    assert Handler.requested == []


def test_a_picture_that_is_gone_is_named(download):
    del Handler.files["/train/b2.jpg"]
    with pytest.raises(DataError, match=r"train/b2\.jpg: HTTP 404"):
        download()


def test_a_picture_that_arrives_damaged_is_not_kept(download, tmp_path):
    Handler.files["/train/b2.jpg"] = Handler.files["/train/b2.jpg"][:-50]
    with pytest.raises(DataError, match=r"train/b2\.jpg is no whole JPEG"):
        download()
    assert not (tmp_path / "train/b2.jpg").exists()
