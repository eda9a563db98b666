"""Test the addresses of raw data: each workload's list, downloads from a local server, and docs/data.md."""

from __future__ import annotations

import dataclasses
import gzip
import http.server
import io
import json
import re
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from benchmarks import WORKLOADS
from common import cli
from common.data import commands
from common.data.sources import SIGNATURES, Sources, SourceSet, read_sources
from common.errors import ConfigError, DataError
from tests.conftest import ROOT

ADDRESSES = {
    ("bert", "vocab.txt"): "https://training.mlcommons-storage.org/wikipedia_for_bert/input_files/vocab.txt",
    ("bert", "model.ckpt-28252-003.data-00000-of-00001"): "https://training.mlcommons-storage.org/wikipedia_for_bert/"
    "input_files/tf1_ckpt/model.ckpt-28252-003.data-00000-of-00001",
    ("bert", "results_text.tar.gz"): "https://training.mlcommons-storage.org/wikipedia_for_bert/processed_dataset/"
    "results_text.tar.gz",
    ("dlrm_dcnv2", "train_data.bin"): "https://training.mlcommons-storage.org/torchrec_dlrm/datasets/"
    "preprocessed_criteo_click_logs/train_data.bin",
    ("dlrm_dcnv2", "day_23_sparse_multi_hot.npz"): "https://training.mlcommons-storage.org/torchrec_dlrm/datasets/"
    "criteo_multihot_v3.0_reference/day_23_sparse_multi_hot.npz",
    ("flux1", "cc12m_preprocessed/data-04761-of-04762.arrow"): "https://training.mlcommons-storage.org/flux_1/datasets/"
    "cc12m_preprocessed/data-04761-of-04762.arrow",
    ("flux1", "coco_preprocessed/state.json"): "https://training.mlcommons-storage.org/flux_1/datasets/"
    "coco_preprocessed/state.json",
    ("flux1", "t5_empty.npy"): "https://training.mlcommons-storage.org/flux_1/datasets/empty_encodings/t5_empty.npy",
    ("flux1", "val2014.zip"): "http://images.cocodataset.org/zips/val2014.zip",
    ("gpt3", "dataset_c4_spm.tar"): "https://training.mlcommons-storage.org/gpt3/megatron-lm/dataset_c4_spm.tar",
    ("gpt3", "checkpoint_nemo_bf16.tar"): "https://training.mlcommons-storage.org/gpt3/megatron-lm/"
    "checkpoint_nemo_bf16.tar",
    ("llama31_8b", "c4-train.en_6_text_document.bin"): "https://training.mlcommons-storage.org/llama3_1/datasets/c4/"
    "llama3_1_8b/c4-train.en_6_text_document.bin",
    ("llama31_8b", "c4-validation.00007-of-00008.json.gz"): "https://huggingface.co/datasets/allenai/c4/resolve/main/"
    "en/c4-validation.00007-of-00008.json.gz",
    ("llama31_8b", "tokenizer.json"): "https://training.mlcommons-storage.org/llama3_1/tokenizers/llama3_1_8b/"
    "tokenizer.json",
    ("maskrcnn", "train2017.zip"): "http://images.cocodataset.org/zips/train2017.zip",
    ("maskrcnn", "R-50.pkl"): "https://dl.fbaipublicfiles.com/detectron/ImageNetPretrained/MSRA/R-50.pkl",
    ("oc20", "s2ef_train_2M.tar"): "https://dl.fbaipublicfiles.com/opencatalystproject/data/s2ef_train_2M.tar",
    ("oc20", "s2ef_val_id.tar"): "https://dl.fbaipublicfiles.com/opencatalystproject/data/s2ef_val_id.tar",
    ("ssd300", "annotations_trainval2017.zip"): "http://images.cocodataset.org/annotations/"
    "annotations_trainval2017.zip",
    ("ssd300", "resnet34-333f7ec4.pth"): "https://download.pytorch.org/models/resnet34-333f7ec4.pth",
    ("retinanet", "oidv6-train-annotations-bbox.csv"): "https://storage.googleapis.com/openimages/v6/"
    "oidv6-train-annotations-bbox.csv",
    ("retinanet", "class-descriptions-boxable.csv"): "https://storage.googleapis.com/openimages/v5/"
    "class-descriptions-boxable.csv",
    ("retinanet", "resnext50_32x4d-7cdf4587.pth"): "https://download.pytorch.org/models/resnext50_32x4d-7cdf4587.pth",
    ("rgat", "node_label_2K.npy"): "https://training.mlcommons-storage.org/graph_neural_network/datasets/igbh/full/"
    "processed/paper/node_label_2K.npy",
    ("rgat", "igb_heterogeneous_tiny.tar.gz"): "https://igb-public-awsopen.s3.amazonaws.com/igb-heterogeneous/"
    "igb_heterogeneous_tiny.tar.gz",
    ("rnnt", "dev-clean.tar.gz"): "https://www.openslr.org/resources/12/dev-clean.tar.gz",
    ("stable_diffusion", "00831.tar"): "https://training.mlcommons-storage.org/stable_diffusion/datasets/laion-400m/"
    "moments-webdataset-filtered/00831.tar",
    ("stable_diffusion", "val2014_30k_stats.npz"): "https://training.mlcommons-storage.org/stable_diffusion/datasets/"
    "coco2014/val2014_30k_stats.npz",
    ("unet3d", "imaging.nii.gz"): "https://huggingface.co/datasets/neheller/KiTS-Challenge-Imaging/resolve/"
    "65f1f295a873326230153c7e1de0c7dba10f0b29/images/case_00000.nii.gz",
}
"""Sizes and counts from the publishers' documents."""
GB_PER_S = 1.1
MOST_FILES = 900
"""Largest number of files of a set that the tests of downloads fetch."""
download = cli.COMMANDS["download"]


def needed(sources: Sources) -> list[SourceSet]:
    """Return the sets that ``download`` fetches into an empty folder."""
    found: dict[str, SourceSet] = {}
    for source in sources.values():
        if not source.optional:
            found.setdefault(source.choice or source.name, source)
    return list(found.values())


def gigabytes(size: float) -> str:
    """Return a size as docs/data.md writes it."""
    unit, name = next(
        (unit, name) for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= unit
    )
    return f"{size / unit:.3g} {name}"


def duration(size: float) -> str:
    """Return the time that ``size`` bytes take at 1.1 GB/s, as docs/data.md writes it."""
    seconds = size / (GB_PER_S * 1e9)
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 3600
        else f"{seconds / 60:.1f} min"
        if seconds >= 60
        else f"{seconds:.0f} s"
    )


def row(name: str) -> str:
    """Return the workload's row in the table of docs/data.md."""
    sources = read_sources(name)
    sizes = [source.size for source in needed(sources)]
    raw = sum(size or 0 for size in sizes)
    about = "about " if None in sizes or any(source.bytes for source in needed(sources)) else ""
    accounts = ", ".join(f"`{source.name}`" for source in needed(sources) if source.account) or "none"
    prepared = gigabytes(sources.prepared_bytes)
    cells = [f"[{name}](../benchmarks/{name}/README.md)", about + gigabytes(raw), duration(raw), prepared, accounts]
    cells += [", ".join(f"`{source}`" for source in sources)]
    cells += ["; ".join(dict.fromkeys(source.licence for source in sources.values()))]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_the_documentation_has_the_same_sizes_and_licences(name):
    text = (ROOT / "docs/data.md").read_text()
    assert row(name) in text
    readme = " ".join((ROOT / "benchmarks" / name / "README.md").read_text().split())
    raw = sum(source.size or 0 for source in needed(read_sources(name)))
    prepared = gigabytes(read_sources(name).prepared_bytes)
    assert f"Raw data: {gigabytes(raw)} ({duration(raw)} at 1.1 GB/s, computed); prepared: {prepared}." in readme


@pytest.mark.parametrize(("name", "file"), sorted(ADDRESSES))
def test_addresses_are_the_publishers(name, file):
    files = [known for source in read_sources(name).values() for known in source.files]
    assert next(known.urls[0] for known in files if known.name.endswith(file)) == ADDRESSES[name, file]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_list_names_all_files_without_a_network(name, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise AssertionError("--list must not connect to anything")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert download([f"benchmark={name}", "--list"]) == 0
    printed = capsys.readouterr().out
    for source in read_sources(name).values():
        assert source.licence in printed
        for file in source.files:
            assert f"    {file.name}" in printed
        assert source.account is None or source.account.splitlines()[0].format(raw_dir="RAW_DIR") in printed


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves a small version of every file of every store, and the lists of MLCommons and Hugging Face."""

    protocol_version = "HTTP/1.1"
    asked: list[str] = []  # noqa: RUF012
    sources: Sources

    def do_GET(self) -> None:
        path = unquote(self.path)
        self.asked.append(path)
        body = self.content(path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def content(self, path: str) -> bytes:
        name = path.rpartition("/")[2]
        for source in self.sources.values():
            if name == f"{source.list_name}.uri":
                return read_sources(self.sources.benchmark)[source.name].addresses[0].encode()
            if name == f"{source.list_name}.md5":
                folder = f"{source.folder}/" if source.folder else ""
                names = [file.name.removeprefix(folder) for file in source.files]
                return "\n".join(f"{'0' * 32}  ./{each}" for each in names).encode()
            if source.tree is not None and path.startswith("/huggingface/api/"):
                entries = [
                    {"type": "file", "path": f"data/day=2015-02-{day}/part-00000.snappy.parquet", "size": 4}
                    for day in (15, 16)
                ]
                return json.dumps([*entries, {"type": "file", "path": "README.md", "size": 1}]).encode()
            for archive, folders in source.unpack.items():
                if archive.endswith(name):
                    return packed(name, [*folders], [file.name for file in source.contents])
        return small(name)

    def log_message(self, *_: object) -> None:
        pass


def packed(name: str, folders: list[str], contents: list[str]) -> bytes:
    """Return an archive with these folders below another folder."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path in [f"{folder}/member" for folder in folders] + [f"{folders[0]}/{each}" for each in contents]:
            member = tarfile.TarInfo(f"./somewhere/{path}")
            member.size = 4
            archive.addfile(member, io.BytesIO(b"data"))
    return gzip.compress(file.getvalue(), mtime=0) if name.endswith("gz") else file.getvalue()


def small(name: str) -> bytes:
    """Return the content of a small file whose format follows from its name."""
    if name.endswith((".zip", ".npz")):
        file = io.BytesIO()
        zipfile.ZipFile(file, "w").close()
        return file.getvalue()
    offset, signature = SIGNATURES.get(Path(name).suffix, (0, b"data"))
    return bytes(offset) + signature


@pytest.fixture
def mirrors(monkeypatch) -> Iterator[list[str]]:
    """Yield options that name a local server for every store. Sizes and checksums are not checked."""

    def unchecked(benchmark: str, given: dict[str, str] | None = None) -> Sources:
        sources = read_sources(benchmark, given)
        sets = {}
        for name, source in sources.items():
            files = tuple(dataclasses.replace(file, bytes=None, checksum=None) for file in source.files[:MOST_FILES])
            contents = tuple(dataclasses.replace(file, checksum=None) for file in source.contents)
            named = 2 if source.tree is not None else source.named
            sets[name] = dataclasses.replace(source, files=files, contents=contents, named=named, md5s=None, bytes=None)
        Handler.sources = dataclasses.replace(sources, sets=sets)
        return Handler.sources

    monkeypatch.setattr(commands, "read_sources", unchecked)
    monkeypatch.setattr("common.data.fetching.with_checksums", lambda source, address, checksums: source)
    Handler.asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        yield [f"--mirror={store}={base}/{store}" for store in read_sources("bert").stores]
        server.shutdown()


@pytest.mark.slow_cases("flux1", "unet3d")
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_download_brings_all_files_and_brings_none_again(name, mirrors, tmp_path):
    sources = commands.read_sources(name)
    for source in needed(sources):
        if source.account:
            for file in source.files:
                path = tmp_path / "by-hand" / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(small(path.name))
    fetched = [source for source in needed(sources) if source.addresses and (source.files or source.tree)]
    sets = [f"--sets={','.join(source.name for source in needed(sources) if source.files or source.tree)}"]
    assert download([f"benchmark={name}", f"--raw-dir={tmp_path}", *mirrors, *sets]) == 0
    there = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    for source in fetched:
        for file in source.files:
            assert any(path.endswith(file.name) for path in there)
    assert not [path for path in there if ".partial" in path]
    if fetched:
        assert Handler.asked
    Handler.asked.clear()
    assert download([f"benchmark={name}", f"--raw-dir={tmp_path}", *mirrors, *sets]) == 0
    assert download([f"benchmark={name}", f"--raw-dir={tmp_path}", *mirrors, *sets, "--check"]) == 0
    assert Handler.asked == []


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("resnet", "Register at https://image-net.org"),
        (
            "llama2_70b_lora",
            "-d {raw_dir}/base https://llama2.mlcommons-storage.org/metadata/llama-2-70b-fused-qkv-mlperf.uri",
        ),
        ("unet3d", "git clone https://github.com/neheller/kits19 {raw_dir}/kits19"),
    ],
    ids=["resnet", "llama2", "unet3d"],
)
def test_files_behind_an_account_come_with_their_commands(name, steps, mirrors, tmp_path):
    with pytest.raises(DataError, match="fetched by hand") as raised:
        download([f"benchmark={name}", f"--raw-dir={tmp_path}", *mirrors])
    assert steps.format(raw_dir=tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "folders", "sets"),
    [
        ("resnet", ("train", "val"), "imagenet"),
        ("rnnt", ("LibriSpeech/dev-clean",), "dev-clean"),
        ("maskrcnn", ("train2017", "val2017"), "coco"),
    ],
    ids=["resnet", "rnnt", "maskrcnn"],
)
def test_empty_folders_do_not_replace_archives(name, folders, sets, tmp_path):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(DataError, match="lacks files"):
        download([f"benchmark={name}", f"--raw-dir={tmp_path}", f"--sets={sets}", "--check"])


def test_pictures_need_their_tables(tmp_path):
    with pytest.raises(DataError, match=r"\.csv is missing; .mlperf-suite download benchmark=retinanet. fetches it"):
        download(["benchmark=retinanet", f"--raw-dir={tmp_path}", "--sets=pictures", "--check"])


def test_check_wants_the_list_of_checksums(tmp_path):
    (tmp_path / "moments").mkdir()
    for number in range(832):
        (tmp_path / f"moments/{number:05d}.tar").write_bytes(small("a.tar"))
    with pytest.raises(DataError, match=r"the list stable-diffusion-laion-400m-filtered-moments-dataset\.md5"):
        download(["benchmark=stable_diffusion", f"--raw-dir={tmp_path}", "--sets=moments", "--check"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--sets=weights", "--sets weights: unknown; the sets are vocabulary, checkpoint, text"),
        ("--mirror=mlcommons=ftp://a", "has to be NAME=URL"),
        ("--mirror=cloud=http://a", "unknown store; the stores are mlcommons, "),
    ],
    ids=["set", "scheme", "store"],
)
def test_unknown_sets_and_mirrors_are_refused(option, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        download(["benchmark=bert", f"--raw-dir={tmp_path}", option])
