"""Test that preparation refuses pictures and texts that training could not read, and names the file and the line."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.bert.preparation.articles import read_lines as read_articles
from benchmarks.bert.preparation.sentence_pairs import read_documents as read_sentences
from benchmarks.bert.preparation.wordpiece import read_vocabulary
from benchmarks.llama2_70b_lora.preparation.examples import read_texts
from benchmarks.retinanet.raw import read_boxes
from benchmarks.rnnt.raw import RawSpeech
from benchmarks.stable_diffusion.frozen.clip_tokenizer import read_merges
from benchmarks.stable_diffusion.prepared import PROMPTS, read_prompts
from common import cli
from common.data.megatron.preparation import read_documents
from common.detection.annotations import read_coco
from common.errors import DataError
from common.formats.jpeg import to_rgb_jpeg
from common.recommendation.criteo.preparation.tsv import read_lines as read_clicks
from common.untrusted.strict_json import read_json_object

PICTURES = {
    "resnet": "train/n0000003d/*.JPEG",
    "maskrcnn": "train2017/*.jpg",
    "retinanet": "validation/*.jpg",
    "ssd300": "val2017/*.jpg",
}


def cut(data: bytes) -> bytes:
    return data[: 2 * len(data) // 3]


def empty(data: bytes) -> bytes:
    return b""


def renamed(data: bytes) -> bytes:
    return b"GIF89a" + bytes(200)


@pytest.fixture(scope="module")
def raw_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns a workload's generated raw data."""
    made: dict[str, Path] = {}

    def find(workload: str) -> Path:
        if workload not in made:
            made[workload] = tmp_path_factory.mktemp(workload) / "raw"
            assert cli.run(["generate", f"benchmark={workload}", "scale=test", "--raw-dir", str(made[workload])]) == 0
        return made[workload]

    return find


def prepare(workload: str, raw: Path, data: Path, *more: str) -> int:
    return cli.run(
        ["prepare", f"benchmark={workload}", "--raw-dir", str(raw), "--data-dir", str(data), "--workers", "1", *more]
    )


@pytest.mark.parametrize("damage", [cut, empty, renamed])
@pytest.mark.parametrize("workload", sorted(PICTURES))
def test_a_damaged_picture_is_named(workload, damage, raw_of, tmp_path, capsys):
    picture = sorted(raw_of(workload).glob(PICTURES[workload]))[1]
    whole = picture.read_bytes()
    picture.write_bytes(damage(whole))
    try:
        assert prepare(workload, raw_of(workload), tmp_path / "data") == DataError.exit_code
    finally:
        picture.write_bytes(whole)
    assert picture.name in capsys.readouterr().err
    assert not (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize("workload", sorted(PICTURES))
def test_trust_leaves_pictures_undecoded_and_the_manifest_says_so(workload, raw_of, tmp_path, capsys):
    raw, data = raw_of(workload), tmp_path / "data"
    picture = sorted(raw.glob(PICTURES[workload]))[1]
    whole = picture.read_bytes()
    picture.write_bytes(cut(whole))
    try:
        assert prepare(workload, raw, data, "--trust") == 0
        assert "prepared with --trust" in capsys.readouterr().out
        assert json.loads((data / "manifest.json").read_text())["source"]["decoded"].startswith("no")
        assert prepare(workload, raw, data) == DataError.exit_code
    finally:
        picture.write_bytes(whole)
    assert "was prepared with --trust, which decodes no picture" in capsys.readouterr().err


def test_a_png_of_16_bits_is_no_picture_of_imagenet():
    """Pillow changes every value above 255 to 255, so the picture would be white."""
    written = io.BytesIO()
    Image.fromarray(np.arange(0, 60_000, 1000, dtype=np.uint16).reshape(6, 10)).save(written, "PNG")
    with pytest.raises(ValueError, match="16 bits per pixel"):
        to_rgb_jpeg(written.getvalue())


# Texts that are not UTF-8, or not JSON


NOT_UTF8 = {"stray byte": b"\xff", "encoded surrogate": b"\xed\xa0\x80", "cut off character": b"\xe2\x82"}
BOXES = b"ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside"
CLICK = b"\t".join([b"1", *[b"5"] * 13, *[b"ab12"] * 26])


def moved(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True)
    (folder / "text").rename(folder / name)


def speech(folder: Path) -> object:
    moved(folder, "train/1/2/1-2.trans.txt")
    return RawSpeech(folder, {"train": ("train",)}, None).utterances("train")


def prompts(folder: Path) -> object:
    moved(folder, PROMPTS)
    return read_prompts(folder)


def merges(folder: Path) -> object:
    (folder / "text").write_bytes(gzip.compress((folder / "text").read_bytes()))
    return read_merges(folder / "text", 2)


READERS: dict[str, tuple[Callable[[Path], object], bytes]] = {
    "C4": (lambda folder: list(read_documents(folder / "text")), b'{"text": "a"}\n{"text": "b%s"}\n'),
    "GovReport": (
        lambda folder: list(read_texts(folder / "text")),
        b'{"input": "a", "output": "b"}\n{"input": "a", "output": "%s"}\n',
    ),
    "Wikipedia": (lambda folder: list(read_articles(folder / "text")), b'<doc title="a">\na%s\n</doc>\n'),
    "sentences": (lambda folder: read_sentences(folder / "text", None), b"\n%s\n"),  # type: ignore[arg-type]
    "pieces of BERT": (lambda folder: read_vocabulary(folder / "text"), b"[PAD]\n%s\n"),
    "merges of CLIP": (merges, b"#version\na%s b\n"),
    "captions": (prompts, b"image_id\tid\tcaption\n1\t2\ta%s\n"),
    "OpenImages": (lambda folder: read_boxes(folder / "text", ("/m/a",)), BOXES + b"\na%s,,/m/a,1,0,1,0,1,0,0,0,0,0\n"),
    "Criteo": (lambda folder: list(read_clicks(folder / "text")), CLICK + b"\n" + CLICK[:-1] + b"%s\n"),
    "LibriSpeech": (speech, b"\n1-2-0000 a%s\n"),
    "COCO": (lambda folder: read_coco(folder / "text"), b'{"images":\n["%s"]}'),
    "JSON": (lambda folder: read_json_object(folder / "text"), b'{"a":\n"%s"}'),
}


@pytest.mark.parametrize("damage", sorted(NOT_UTF8))
@pytest.mark.parametrize("kind", sorted(READERS))
def test_the_line_that_is_not_utf8_is_named(kind, damage, tmp_path):
    read, content = READERS[kind]
    (tmp_path / "text").write_bytes(content.replace(b"%s", NOT_UTF8[damage]))
    with pytest.raises(DataError, match=rf"(?i){tmp_path}/.*(line|row #)\s?2"):
        read(tmp_path)


@pytest.mark.parametrize("text", [b"\\ud83d", b"\\uDC00x", b"\\udc00\\ud83d"], ids=["high", "low", "swapped"])
@pytest.mark.parametrize("kind", ["C4", "GovReport", "JSON"])
def test_half_of_a_surrogate_pair_is_refused(kind, text, tmp_path):
    read, content = READERS[kind]
    (tmp_path / "text").write_bytes(content.replace(b"%s", text))
    position = f"{tmp_path}/text" + ("" if kind == "JSON" else ", line 2")
    with pytest.raises(DataError, match=rf"{position}.*half of a surrogate pair"):
        read(tmp_path)


def test_a_name_of_half_a_surrogate_pair_is_refused(tmp_path):
    picture = {"id": 1, "width": 1, "height": 1, "file_name": "\ud83d.jpg"}
    (tmp_path / "text").write_text(json.dumps({"images": [picture], "categories": [], "annotations": []}))
    with pytest.raises(DataError, match=r"text: images\[0\]: 'file_name'"):
        read_coco(tmp_path / "text", names=True)


def test_whole_surrogate_pairs_are_characters(tmp_path):
    (tmp_path / "text").write_bytes(b'{"text": "\\ud83d\\ude00"}\n{"text": "\\\\ud83d"}\n')
    assert list(read_documents(tmp_path / "text")) == ["\U0001f600", "\\ud83d"]


@pytest.mark.parametrize("kind", ["C4", "GovReport", "COCO", "JSON"])
def test_deep_nesting_is_refused(kind, tmp_path):
    read, content = READERS[kind]
    nested = b'"%s"' if b'"%s"' in content else b'"b%s"'
    (tmp_path / "text").write_bytes(content.replace(nested, b"[" * 100_000 + b"]" * 100_000))
    with pytest.raises(DataError, match=rf"{tmp_path}/text{', line 2' if kind in ('C4', 'GovReport') else ''}"):
        read(tmp_path)
