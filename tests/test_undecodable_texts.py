"""Texts that are not Unicode, or JSON that is none, are refused with the file and its line or entry."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.bert.preparation.articles import read_lines as read_articles
from benchmarks.bert.preparation.sentence_pairs import read_documents as read_sentences
from benchmarks.bert.preparation.wordpiece import read_vocabulary
from benchmarks.llama2_70b_lora.preparation.examples import read_texts
from benchmarks.retinanet.raw import read_boxes
from benchmarks.rnnt.raw import RawSpeech
from benchmarks.stable_diffusion.frozen.clip_tokenizer import read_merges
from benchmarks.stable_diffusion.prepared import PROMPTS
from benchmarks.stable_diffusion.prompts import read_prompts
from common.data.megatron.preparation import read_documents
from common.detection.annotations import read_coco
from common.errors import DataError
from common.recommendation.criteo.preparation.tsv import read_lines as read_clicks
from common.untrusted.strict_json import read_json

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
    "JSON": (lambda folder: read_json(folder / "text"), b'["a",\n"%s"]'),
}


@pytest.mark.parametrize("damage", sorted(NOT_UTF8))
@pytest.mark.parametrize("kind", sorted(READERS))
def test_the_line_that_is_not_utf8_is_named(kind: str, damage: str, tmp_path: Path) -> None:
    read, content = READERS[kind]
    (tmp_path / "text").write_bytes(content.replace(b"%s", NOT_UTF8[damage]))
    with pytest.raises(DataError, match=rf"(?i){tmp_path}/.*(line|row #)\s?2"):
        read(tmp_path)


@pytest.mark.parametrize("text", [b"\\ud83d", b"\\uDC00x", b"\\udc00\\ud83d"], ids=["high", "low", "swapped"])
@pytest.mark.parametrize("kind", ["C4", "GovReport", "JSON"])
def test_half_of_a_surrogate_pair_is_refused(kind: str, text: bytes, tmp_path: Path) -> None:
    read, content = READERS[kind]
    (tmp_path / "text").write_bytes(content.replace(b"%s", text))
    position = f"{tmp_path}/text" + ("" if kind == "JSON" else ", line 2")
    with pytest.raises(DataError, match=rf"{position}.*half of a surrogate pair"):
        read(tmp_path)


def test_a_name_of_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    picture = {"id": 1, "width": 1, "height": 1, "file_name": "\ud83d.jpg"}
    (tmp_path / "text").write_text(json.dumps({"images": [picture], "categories": [], "annotations": []}))
    with pytest.raises(DataError, match=r"text: images\[0\]: 'file_name'"):
        read_coco(tmp_path / "text", names=True)


def test_whole_surrogate_pairs_are_characters(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b'{"text": "\\ud83d\\ude00"}\n{"text": "\\\\ud83d"}\n')
    assert list(read_documents(tmp_path / "text")) == ["\U0001f600", "\\ud83d"]


@pytest.mark.parametrize("kind", ["C4", "GovReport", "COCO", "JSON"])
def test_deep_nesting_is_refused(kind: str, tmp_path: Path) -> None:
    read, content = READERS[kind]
    nested = b'"%s"' if b'"%s"' in content else b'"b%s"'
    (tmp_path / "text").write_bytes(content.replace(nested, b"[" * 100_000 + b"]" * 100_000))
    with pytest.raises(DataError, match=rf"{tmp_path}/text{', line 2' if kind in ('C4', 'GovReport') else ''}"):
        read(tmp_path)
