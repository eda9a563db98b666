"""Preparation decodes every picture, and refuses what training could not read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common import cli
from common.errors import DataError
from common.formats.jpeg import to_rgb_jpeg

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
    """A function from a workload to its generated raw data, one folder a workload."""
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
def test_a_damaged_picture_is_named(
    workload: str,
    damage: Callable[[bytes], bytes],
    raw_of: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
def test_trust_leaves_pictures_undecoded_and_the_manifest_says_so(
    workload: str, raw_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_png_of_16_bits_is_no_picture_of_imagenet() -> None:
    """Pillow makes 255 of every value above 255, so that the picture would be white."""
    written = io.BytesIO()
    Image.fromarray(np.arange(0, 60_000, 1000, dtype=np.uint16).reshape(6, 10)).save(written, "PNG")
    with pytest.raises(ValueError, match="16 bits per pixel"):
        to_rgb_jpeg(written.getvalue())
