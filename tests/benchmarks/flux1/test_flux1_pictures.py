"""Selection of pictures and captions, cropping and resizing, against the reference's definitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from small_pictures import decoded, jpeg, write_pictures

from benchmarks.flux1.pictures import Sample, eval_samples, open_pictures, selected, train_samples
from common.data.stages import Stages
from common.errors import DataError


def chosen(folder: Path, count: int) -> list[Sample]:
    with Stages(folder / "records", 1) as stages:
        return train_samples(open_pictures(folder), count, stages)


def test_training_takes_the_first_large_pictures_that_are_not_left_out(tmp_path):
    samples = chosen(write_pictures(tmp_path / "raw"), 4)
    assert [sample.key for sample in samples] == [f"{number:09d}" for number in (0, 2, 4, 6)]
    for number, sample in zip((0, 2, 4, 6), samples, strict=True):
        assert sample.read()[1] == f"caption {number}"


@pytest.mark.parametrize(("width", "height"), [(300, 256), (256, 333), (517, 401), (401, 517), (256, 256)])
def test_the_shorter_side_is_resized_and_the_centre_is_cropped(width, height, tmp_path):
    content = jpeg(width, height)
    (tmp_path / "a.jpg").write_bytes(content)
    picture_3SS, _ = Sample(tmp_path / "a.jpg", "a", (0, len(content)), "caption").read()
    # torchvision rounds down the longer side, and half a pixel of the border to the even number
    size = tuple(int(256 * side / min(width, height)) for side in (width, height))
    left, top = (round((side - 256) / 2) for side in size)
    resized = decoded(content).resize(size, Image.Resampling.BICUBIC)
    expected = np.asarray(resized.crop((left, top, left + 256, top + 256))).transpose(2, 0, 1)
    assert torch.equal(picture_3SS, torch.tensor(expected).float() / 255 * 2 - 1)


def test_validation_has_the_captions_that_pandas_selects(tmp_path):
    random = np.random.default_rng(1)
    numbers = random.permutation(10_000)[:900]
    rows = [(int(number), int(random.integers(200)), f" text\n {number} ") for number in numbers]
    frame = pandas.DataFrame(rows, columns=["id", "image_id", "caption"])
    frame["caption"] = frame["caption"].apply(lambda text: text.replace("\n", "").strip())
    frame = frame.sample(frac=1, random_state=2023).reset_index(drop=True)
    frame = frame.drop_duplicates(subset=["image_id"], keep="first")[:150].sort_values(by=["id"])
    assert selected(rows, 150) == list(zip(frame["image_id"], frame["caption"], strict=True))


def test_validation_samples_are_squeezed_and_have_their_rows_timestep(tmp_path):
    samples = eval_samples(open_pictures(write_pictures(tmp_path / "raw")), 10)
    assert [sample.timestep for sample in samples] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert len({sample.key for sample in samples}) == 10
    for sample in samples:
        picture_3SS, caption = sample.read()
        picture = int(sample.key)
        assert caption.startswith(f"picture {picture}, text ")
        resized = decoded(jpeg(100 + picture, 90, picture)).resize((256, 256), Image.Resampling.BICUBIC)
        expected = np.asarray(resized).transpose(2, 0, 1) / 255.0 * 2.0 - 1.0
        assert np.allclose(picture_3SS, expected, atol=1e-6)


def test_a_broken_picture_is_an_error_unless_it_is_left_out(tmp_path):
    broken = write_pictures(tmp_path / "broken", broken=4)
    with pytest.raises(DataError, match=r"cc12m-train-0001\.tar: the picture of sample 1 is no whole JPEG"):
        chosen(broken, 4)
    left_out = write_pictures(tmp_path / "left_out", broken=4, left_out="3\n4\n\n")
    assert [int(sample.key) for sample in chosen(left_out, 4)] == [0, 2, 6, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda raw: (raw / "problematic_indices.txt").unlink(),
            "indices.txt is missing: --encoders reads",
        ),
        (lambda raw: (raw / "problematic_indices.txt").write_text("3\nx\n"), "every line must be the position"),
        (lambda raw: (raw / "val2014" / "COCO_val2014_000000000107.jpg").unlink(), "000000000107.jpg is missing"),
        (
            lambda raw: (raw / "annotations" / "captions_val2014.json").write_text('{"annotations": [{"id": 1}]}'),
            "captions_val2014.json: annotations.0.: 'image_id' is missing",
        ),
        (
            lambda raw: (raw / "annotations" / "captions_val2014.json").write_text('{"annotations": []}'),
            "captions_val2014.json has captions of 0 pictures, and 11 are needed",
        ),
        (
            lambda raw: (raw / "annotations" / "captions_val2014.json").write_text('{"annotations": 5}'),
            "captions_val2014.json: has no list 'annotations' of objects",
        ),
    ],
    ids=["no positions", "positions", "picture", "annotation", "annotations", "number"],
)
def test_faults_are_named(change, message, tmp_path):
    raw = write_pictures(tmp_path / "raw")
    change(raw)
    with pytest.raises(DataError, match=message):
        assert chosen(raw, 2) != eval_samples(open_pictures(raw), 11)


def test_a_tar_must_not_be_missing_between_others(tmp_path):
    raw = write_pictures(tmp_path / "raw")
    (raw / "cc12m-wds" / "cc12m-train-0000.tar").unlink()
    with pytest.raises(DataError, match=r"has cc12m-train-0001\.tar where cc12m-train-0000\.tar belongs"):
        open_pictures(raw)


def test_a_caption_that_is_no_utf_8_is_named(tmp_path):
    (tmp_path / "a.tar").write_bytes(jpeg(256, 256) + b"gr\xfcn")
    size = (tmp_path / "a.tar").stat().st_size - 4
    with pytest.raises(DataError, match=r"a\.tar: 7\.txt is no UTF-8"):
        Sample(tmp_path / "a.tar", "7", (0, size), (size, 4)).read()


def test_too_few_samples_are_an_error(tmp_path):
    raw = write_pictures(tmp_path / "raw")
    with pytest.raises(DataError, match="has 5 samples to train on, and 6 are needed"):
        chosen(raw, 6)
    with pytest.raises(DataError, match="has captions of 11 pictures, and 12 are needed"):
        eval_samples(open_pictures(raw), 12)
