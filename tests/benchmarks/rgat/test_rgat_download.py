"""What is fetched of which size, and what is there already; the network is a dictionary of files."""

from __future__ import annotations

import io
import tarfile
from collections import namedtuple

import numpy as np
import pytest
from small_igbh import FACTS, RELATIONS, TYPES

from benchmarks.rgat import raw, sources
from benchmarks.rgat.prepare import COMMANDS
from common.data import download as downloads
from common.errors import DataError

NODES = {
    "full": dict(zip(TYPES, (30, 20, 5, 6, 4, 3), strict=True)),
    "large": dict(zip(TYPES, (25, 18, 5, 6, 4, 3), strict=True)),
    "tiny": {"paper": 8, "author": 7, "institute": 2, "fos": 3},
}
LARGE = [
    *(f"{name}/node_feat.npy" for name in TYPES),
    "paper/node_label_2K.npy",
    *(f"{relation}/edge_index.npy" for relation in RELATIONS),
]
SMALL = [name for name in LARGE if "journal" not in name and "conference" not in name]


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def content_of(name, nodes):
    if name.endswith("edge_index.npy"):
        return saved(np.zeros((5, 2), np.int64))
    count = nodes[name.split("/")[0]]
    values = np.zeros((count, 4) if "feat" in name else count, np.float32)
    return values.tobytes() if len(nodes) == 6 and name[:5] in ("paper", "autho") else saved(values)


def archive(nodes, names=tuple(SMALL)):
    """As it is published: files below some folder, others among them."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as made:
        for name in ("paper/paper_id_index_mapping.npy", *names, "paper/node_label_19.npy"):
            content = content_of(name, nodes) if name in SMALL else b"not wanted"
            member = tarfile.TarInfo(f"./tiny/processed/{name}")
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return file.getvalue()


@pytest.fixture(autouse=True)
def igbh(monkeypatch):
    """IGBH with a handful of nodes."""
    monkeypatch.setattr(raw, "benchmark_settings", lambda name: {"facts": FACTS})
    monkeypatch.setattr(raw, "NODES", NODES)
    monkeypatch.setattr(sources, "NODES", NODES)
    monkeypatch.setattr(sources, "EDGES_OF", dict.fromkeys(NODES, 30))


@pytest.fixture
def network(monkeypatch):
    """URL to content; what was fetched is in ``fetched``."""
    made = namedtuple("Network", "files fetched")({}, [])

    def fetch(file, path):
        made.fetched.append(file.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.files[file.url])

    monkeypatch.setattr(downloads, "fetch", fetch)
    return made


STORE = "https://igb-public.s3.us-east-2.amazonaws.com"


@pytest.mark.parametrize(("size", "folder"), [("full", "IGBH"), ("large", "igb_large")])
def test_single_files_of_the_large_sizes_are_fetched(network, tmp_path, capsys, size, folder):
    for name in LARGE:
        network.files[f"{STORE}/{folder}/processed/{name}"] = content_of(name, NODES[size])
    chosen = ["--size", size] if size != "full" else []
    assert COMMANDS.run("download", ["--raw-dir", str(tmp_path / "raw"), *chosen]) == 0
    assert sorted(network.fetched) == sorted(LARGE)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"IGBH-{size}: about 0 GB, ODC-By 1.0")
    assert out[1:-1] == [f"{tmp_path / 'raw' / name}: there" for name in LARGE]
    assert out[-1] == f"{tmp_path / 'raw'}: IGBH-{size}, as many nodes of each type as published"
    list(sources.download(tmp_path / "raw", size))
    assert len(network.fetched) == len(LARGE)  # not again


def test_an_archive_is_fetched_and_unpacked(network, tmp_path):
    network.files[f"{STORE}/igb-heterogeneous/igb_heterogeneous_tiny.tar.gz"] = archive(NODES["tiny"])
    lines = list(sources.download(tmp_path, "tiny"))
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(SMALL)
    assert lines[-1].endswith("IGBH-tiny, as many nodes of each type as published")
    assert len(list(sources.download(tmp_path, "tiny"))) == 1
    assert network.fetched == ["igb_heterogeneous_tiny.tar.gz"]


def test_an_archive_continues_with_what_is_missing(network, tmp_path):
    network.files[f"{STORE}/igb-heterogeneous/igb_heterogeneous_tiny.tar.gz"] = archive(NODES["tiny"])
    list(sources.download(tmp_path, "tiny"))
    kept = (tmp_path / SMALL[0]).stat().st_mtime_ns
    (tmp_path / SMALL[1]).unlink()
    list(sources.download(tmp_path, "tiny"))
    assert (tmp_path / SMALL[0]).stat().st_mtime_ns == kept
    assert (tmp_path / SMALL[1]).is_file()


def test_an_archive_without_a_file_is_refused(network, tmp_path):
    network.files[f"{STORE}/igb-heterogeneous/igb_heterogeneous_tiny.tar.gz"] = archive(NODES["tiny"], SMALL[1:])
    with pytest.raises(DataError, match=r"tar.gz lacks paper/node_feat.npy"):
        list(sources.download(tmp_path, "tiny"))


def test_an_archive_that_is_cut_off_is_refused(network, tmp_path):
    content = archive(NODES["tiny"])
    network.files[f"{STORE}/igb-heterogeneous/igb_heterogeneous_tiny.tar.gz"] = content[: len(content) // 2]
    with pytest.raises(DataError, match=r"tar.gz .*; delete it and run the command again"):
        list(sources.download(tmp_path, "tiny"))


def test_a_file_of_another_size_is_named(network, tmp_path):
    for name in LARGE:
        network.files[f"{STORE}/IGBH/processed/{name}"] = content_of(name, {**NODES["full"], "author": 19})
    with pytest.raises(DataError, match=r"author/node_feat.npy has 19 rows and not 20"):
        list(sources.download(tmp_path, "full"))


def test_a_disk_that_is_too_small_is_noticed_first(network, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**6, 10**6 - 500, 500))
    with pytest.raises(DataError, match="its disk has"):
        list(sources.download(tmp_path, "full"))
    assert network.fetched == []


def test_archives_have_their_published_checksums():
    (file,) = sources.remote_files("tiny")
    assert file.checksum == "md5:83fbc1091497ff92cf20afe82fae0ade"
    assert set(sources.ARCHIVES) | set(sources.FOLDERS) == {"full", "large", "medium", "small", "tiny"}


def test_the_full_size_takes_two_terabytes(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(raw, "benchmark_settings", lambda name: {"facts": {**FACTS, "feature_size": 1024}})
    monkeypatch.setattr(sources, "published", raw.published)
    # 2.24 TB of features (547,360,534 nodes of 4 KiB), and 16 bytes for each of the edges that are known.
    assert sources.expected_bytes("full") == 547_360_534 * 4096 + 5_812_005_639 * 16
