"""From records to batches: order, transforms, shards, errors, with the reader that runs anywhere."""

import functools
import io
import json
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.resnet.data import eval_pixels, random_crop_box
from common import cli
from common.config.composition import compose
from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError
from common.formats.recordio import RecordReader
from common.vision.pictures import Normalizer
from tests.benchmarks.resnet.small_records import encoded, settings, write_data

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def blocks(samples, epochs=1, count=3):
    return [Block(i, i * epochs + 1, epochs, i * epochs * samples, epochs * samples) for i in range(count)]


@pytest.fixture(scope="session")
def numbered(tmp_path_factory):
    """61 small pictures whose label is their number, so that batches show which samples they hold."""
    random = np.random.default_rng(0)
    pictures = [encoded(random.integers(0, 256, (20, 24, 3), dtype=np.uint8)) for _ in range(61)]
    return write_data(tmp_path_factory.mktemp("numbered") / "data", pictures, range(61))


def test_batches_have_the_form_that_the_model_expects(numbered):
    source = settings().open_train(numbered, Layout({"dp": 2}, 1), micro_batch=5, accumulation=2)
    batches = list(source.batches(blocks(61)[0]))
    source.close()
    assert [batch.position for batch in batches] == list(range(8))  # 61 samples in steps of 20: 4 x 2 micro-batches
    for batch in batches:
        image, label = batch.tensors["image"], batch.tensors["label"]
        assert (image.shape, image.dtype) == ((5, 4, 16, 16), torch.float16)
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert not image[:, 3].any()
        assert (label.shape, label.dtype, batch.samples) == ((5,), torch.int64, 10)


def test_source_tells_what_the_manifest_says(digits):
    source = settings().open_train(digits, Layout(), 4)
    assert (source.train_samples, source.eval_samples, source.synthetic) == (61, 23, True)
    source.close()


def test_augmentation_differs_between_epochs_and_seeds(numbered):
    crops = set()
    for seed in (0, 1):
        source = settings().open_train(numbered, Layout(seed=seed), 61)
        for block in blocks(61, count=2):
            batch = next(iter(source.batches(block)))
            first = batch.tensors["image"][batch.tensors["label"] == 0]
            crops.add(first.numpy().tobytes())
        source.close()
    assert len(crops) == 4


@pytest.mark.parametrize("replicas", [1, 7])
def test_eval_shards_are_exactly_the_set(numbered, replicas):
    seen, shapes, counts = [], set(), set()
    for rank in range(replicas):
        source = settings().open_eval(numbered, Layout({"dp": replicas}, rank), batch=4)
        for _ in range(2):
            batches = list(source)
            counts.add(len(batches))
            shapes |= {batch.tensors["image"].shape for batch in batches}
        labels = torch.cat([batch.tensors["label"] for batch in batches])
        seen += labels[labels >= 0].tolist()
        assert len(source) == len(batches)
        source.close()
    assert seen == list(range(61))
    assert (len(counts), shapes) == (1, {torch.Size([4, 4, 16, 16])})


def triangle_resize(pixels, size):
    """Bilinear resize of axis 0 with a triangle filter as wide as the scale, in float64."""
    old = pixels.shape[0]
    scale = old / size
    support = max(scale, 1.0)
    centres = (np.arange(size) + 0.5) * scale
    weights = np.maximum(0, 1 - np.abs((np.arange(old) + 0.5)[None] - centres[:, None]) / support)
    weights /= weights.sum(axis=1, keepdims=True)
    return np.tensordot(weights, pixels, axes=1)


@pytest.mark.parametrize("shape", [(375, 500), (640, 427), (180, 200), (256, 256), (2000, 300)])
def test_eval_transform_equals_plain_arithmetic(shape):
    height, width = shape
    y, x = np.mgrid[:height, :width]
    smooth = 127 + 100 * np.stack([np.sin(x / 19), np.sin(y / 23), np.sin((x + y) / 31)], axis=2)
    data = encoded(smooth.astype(np.uint8))
    with Image.open(io.BytesIO(data)) as picture:
        pixels = np.asarray(picture, np.float64)
    new = tuple(math.floor(side * 256 / min(shape) + 0.5) for side in shape)  # 640 x 427 becomes 384 x 256
    resized = triangle_resize(triangle_resize(pixels, new[0]).transpose(1, 0, 2), new[1]).transpose(1, 0, 2)
    top, left = (new[0] - 224) // 2, (new[1] - 224) // 2
    expected = resized[top : top + 224, left : left + 224]
    found = eval_pixels(Image.fromarray(pixels.astype(np.uint8)), settings(image_size=224, eval_resize=256).facts)
    assert np.abs(found - expected).max() < 1.6  # two roundings to whole levels


@pytest.mark.parametrize(
    ("dtype", "spacing"),
    [(torch.float16, 2**-11), (torch.bfloat16, 2**-8), (torch.float32, 2**-22), (torch.float64, 2**-22)],
)
def test_normalisation_is_the_rounded_formula(dtype, spacing):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    out = torch.zeros(16, 16, 4, dtype=dtype)
    Normalizer(MEAN, STD, dtype).write(pixels, out)
    exact = (pixels.astype(np.float64) - MEAN) / STD
    assert np.abs(out[..., :3].double().numpy() - exact).max() <= spacing * 2
    assert not out[..., 3].any()


def test_crops_have_the_areas_and_aspects_that_are_asked_for():
    random = np.random.default_rng(0)
    boxes = np.array([random_crop_box(500, 375, (0.05, 1.0), (3 / 4, 4 / 3), random) for _ in range(4000)])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    areas, aspects = widths * heights / (500 * 375), widths / heights
    assert boxes.min() >= 0
    assert (boxes[:, 2].max(), boxes[:, 3].max()) <= (500, 375)
    assert 0.045 < areas.min() < 0.06
    assert areas.max() > 0.95
    assert 0.74 < aspects.min() < 0.76
    assert 1.32 < aspects.max() < 1.35
    low = areas < 0.5  # every aspect fits below 0.56 of this picture: there areas are uniform and aspects symmetric
    assert abs(areas[low].mean() - 0.275) < 0.01
    assert abs(np.log(aspects[low]).mean()) < 0.01


def test_crop_of_a_sliver_is_the_largest_that_is_allowed():
    box = random_crop_box(1000, 10, (0.9, 1.0), (3 / 4, 4 / 3), np.random.default_rng(0))
    assert box == (493, 0, 506, 10)


def test_half_of_the_pictures_are_mirrored(tmp_path):
    ramp = np.repeat(np.arange(0, 240, 4, dtype=np.uint8)[None, :, None], 60, axis=0).repeat(3, axis=2)
    root = write_data(tmp_path / "data", [encoded(ramp)] * 400, [0] * 400)
    source = settings().open_train(root, Layout(), 400)
    [batch] = source.batches(blocks(400, count=1)[0])
    source.close()
    image = batch.tensors["image"].float()
    mirrored = (image[:, 0, :, 0] > image[:, 0, :, -1]).float().mean()
    assert 0.42 < mirrored < 0.58


def test_grey_picture_becomes_three_equal_channels(tmp_path):
    grey = encoded(np.full((30, 30), 90, np.uint8))
    source = settings(dtype=torch.float32).open_eval(write_data(tmp_path / "data", [grey], [0]), Layout(), 1)
    [batch] = source
    source.close()
    expected = [(90 - mean) / std for mean, std in zip(MEAN, STD, strict=True)]
    torch.testing.assert_close(batch.tensors["image"][0, :3, 5, 5], torch.tensor(expected))


@pytest.mark.parametrize("damage", ["half", "noise", "empty"])
def test_corrupt_picture_names_record_file_and_offset(tmp_path, damage):
    whole = encoded(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    bad = {"half": whole[: len(whole) // 2], "noise": bytes(range(200)), "empty": b""}[damage]
    root = write_data(tmp_path / "data", [whole, bad, whole], [0, 1, 2])
    with RecordReader(root / "val.rec") as reader:
        offset = reader.offsets[1]
    source = settings().open_eval(root, Layout(), 3)
    with pytest.raises(DataError, match=rf"val\.rec: record 1 at byte {offset}: the picture cannot be decoded"):
        list(source)
    source.close()


def test_truncated_record_stops_training(tmp_path, numbered):
    root = tmp_path / "data"
    root.mkdir()
    for file in numbered.iterdir():
        (root / file.name).write_bytes(file.read_bytes())
    source = settings().open_train(root, Layout(), 61)
    rec = root / "train.rec"
    rec.open("r+b").truncate(rec.stat().st_size - 50)  # after opening: a disk that fails underneath
    with pytest.raises(DataError, match=r"train\.rec: record 60 at byte \d+ is truncated"):
        list(source.batches(blocks(61)[0]))
    source.close()


def test_label_beyond_the_classes_is_an_error(tmp_path):
    root = write_data(tmp_path / "data", [encoded(np.zeros((20, 20, 3), np.uint8))], [12], classes=10)
    source = settings(classes=10).open_train(root, Layout(), 1)
    with pytest.raises(DataError, match=r"record 0 at byte 0: label \(12\.0,\) is not one of the 10 classes"):
        list(source.batches(blocks(1)[0]))
    source.close()


def test_more_classes_than_the_model_has_are_refused(numbered):
    with pytest.raises(DataError, match="holds 61 classes where the model has 10"):
        settings(classes=10).open_train(numbered, Layout(), 4)


def test_manifest_that_counts_other_records_is_refused(tmp_path):
    root = write_data(tmp_path / "data", [encoded(np.zeros((20, 20, 3), np.uint8))] * 3, [0] * 3)
    path = root / "manifest.json"
    text = json.loads(path.read_text())
    text["counts"]["train_samples"] = 4
    path.write_text(json.dumps(text))
    with pytest.raises(DataError, match=r"train\.rec has 3 records where manifest\.json says 4"):
        settings().open_train(root, Layout(), 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reader.reader", "tf"),
        ("reader.threads", 0),
        ("reader.prefetch", 0),
        ("reader.hw_decoder_load", 1.5),
        ("reader.cache_mb", -1),
        ("reader.eval_cache_mb", -1),
        ("reader.input_batch_multiplier", 0),
        ("reader.eval_batch", 0),
        ("benchmark.facts.classes", 0),
        ("benchmark.facts.image_size", 0),
        ("benchmark.facts.eval_resize", 8),
        ("benchmark.facts.crop_area", [0.5, 0.1]),
        ("benchmark.facts.crop_area", [0.5, 1.1]),
        ("benchmark.facts.crop_aspect", [0.0, 1.0]),
        ("benchmark.facts.mirror", 2.0),
        ("benchmark.facts.std", [1.0, 0.0, 1.0]),
        ("benchmark.facts.bn_epsilon", 0.0),
        ("benchmark.facts.bn_momentum", 0.0),
        ("model.width", 0),
        ("precision", "fp8"),
    ],
)
def test_impossible_values_are_refused_with_their_key_when_the_configuration_is_built(key, value):
    tree = compose(["benchmark=resnet", "scale=test"])
    *sections, name = key.split(".")
    functools.reduce(dict.__getitem__, sections, tree)[name] = value
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}="):
        cli.load(tree)
