"""The download against a server of this process: what is fetched, what is not, and what is refused."""

import hashlib
import http.server
import threading

import pytest

from benchmarks.retinanet import raw, sources
from benchmarks.retinanet.classes import class_names
from common.errors import DataError
from tests.benchmarks.retinanet.small_pictures import COLUMNS, label, row, smooth

WEIGHTS = b"weights"
BACKBONE = f"small-{hashlib.sha256(WEIGHTS).hexdigest()[:8]}.pth"
DESCRIBED = "".join(f"{label(index)},{name}\n" for index, name in enumerate([*class_names(), "Tree"]))


def table(*pictures):
    return "\n".join(
        [COLUMNS, *(row(name, label(0), "0,1,0,1") for name in pictures), row("tree", label(264), "0,1,0,1")]
    )


class Handler(http.server.BaseHTTPRequestHandler):
    files: dict = {}  # noqa: RUF012
    asked: list = []  # noqa: RUF012

    def do_GET(self):
        self.asked.append((self.path, self.headers.get("Range")))
        body = self.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:])

    def log_message(self, *_):
        pass


@pytest.fixture
def files(monkeypatch):
    """What the server has, by path; a test may change it."""
    Handler.asked = []
    Handler.files = {
        f"/tables/v6/{raw.SPLITS['train']}": table("a1", "b2").encode(),
        f"/tables/v5/{raw.SPLITS['validation']}": table("c3").encode(),
        f"/tables/v5/{raw.CLASSES}": DESCRIBED.encode(),
        f"/weights/{BACKBONE}": WEIGHTS,
        **{f"/bucket/train/{name}.jpg": smooth(20, 30, number) for number, name in enumerate(("a1", "b2"))},
        "/bucket/validation/c3.jpg": smooth(20, 30, 5),
    }
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        for name, folder in (("TABLES", "tables"), ("BUCKET", "bucket"), ("WEIGHTS", "weights")):
            monkeypatch.setattr(sources, name, f"{address}/{folder}")
        monkeypatch.setattr(raw, "BACKBONES", (BACKBONE, "backbone.pth"))
        yield Handler.files
        server.shutdown()


def test_the_sources_are_the_published_ones():
    assert sources.TABLES == "https://storage.googleapis.com/openimages"
    assert sources.BUCKET == "https://open-images-dataset.s3.amazonaws.com"
    assert f"{sources.WEIGHTS}/{raw.BACKBONES[0]}" == (
        "https://download.pytorch.org/models/resnext50_32x4d-7cdf4587.pth"
    )
    assert sources.FOLDERS == {
        "oidv6-train-annotations-bbox.csv": "v6",
        "validation-annotations-bbox.csv": "v5",
        "class-descriptions-boxable.csv": "v5",
    }


def test_tables_backbone_and_the_selected_pictures_are_fetched(files, tmp_path):
    folder = tmp_path / "raw"
    lines = list(sources.download(folder, workers=2))
    assert lines[-3:] == [
        f"{folder / BACKBONE}: as expected",
        f"{folder / 'train'}: 2 pictures, 2 of them fetched",
        f"{folder / 'validation'}: 1 pictures, 1 of them fetched",
    ]
    there = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}
    assert there == {
        name.removeprefix("/tables/v6/")
        .removeprefix("/tables/v5/")
        .removeprefix("/bucket/")
        .removeprefix("/weights/"): data
        for name, data in files.items()
    }


def test_what_is_there_is_not_fetched_again_and_what_was_cut_off_is_continued(files, tmp_path):
    (tmp_path / "train").mkdir()
    whole = files["/bucket/train/b2.jpg"]
    (tmp_path / "train/b2.jpg.partial").write_bytes(whole[:100])
    list(sources.download(tmp_path))
    assert ("/bucket/train/b2.jpg", "bytes=100-") in Handler.asked
    assert (tmp_path / "train/b2.jpg").read_bytes() == whole
    Handler.asked.clear()
    assert list(sources.download(tmp_path))[-2].endswith("train: 2 pictures, 0 of them fetched")
    assert Handler.asked == []


def test_a_picture_that_is_gone_is_named_and_the_others_stay(files, tmp_path):
    del files["/bucket/train/b2.jpg"]
    with pytest.raises(DataError, match=r"bucket/train/b2\.jpg: HTTP 404"):
        list(sources.download(tmp_path, workers=1))
    assert (tmp_path / "train/a1.jpg").exists()


def test_a_picture_that_arrives_damaged_is_not_kept(files, tmp_path):
    files["/bucket/train/b2.jpg"] = files["/bucket/train/b2.jpg"][:-50]
    with pytest.raises(DataError, match=r"train/b2\.jpg is no whole JPEG"):
        list(sources.download(tmp_path, workers=1))
    assert not (tmp_path / "train/b2.jpg").exists()


def test_other_weights_than_the_name_says_are_not_kept(files, tmp_path):
    files[f"/weights/{BACKBONE}"] = b"other weights"
    with pytest.raises(DataError, match=r"SHA-256 .* where .*\.\.\. is due; it is deleted"):
        list(sources.download(tmp_path))
    assert not (tmp_path / BACKBONE).exists()
