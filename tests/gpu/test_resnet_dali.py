"""Test ResNet-50's DALI reader on a GPU: against the torchvision reader, with a decoder cache, without waiting."""

import numpy as np
import pytest
import torch

from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import DataError
from tests.benchmarks.resnet.small_records import encoded, settings, write_data
from tests.gpu.support import waiting_is_an_error

pytestmark = pytest.mark.gpu
pytest.importorskip("nvidia.dali")

SAMPLES = 301
BLOCKS = [Block(i, i + 1, 1, i * SAMPLES, SAMPLES) for i in range(4)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Write 301 smooth pictures of several sizes. The label is the number of the picture; sides resize to whole
    numbers."""
    random = np.random.default_rng(0)
    shapes = [(288, 384, 3), (432, 288, 3), (288, 288, 3), (1152, 1536, 3)]
    pictures = []
    for number in range(SAMPLES):
        height, width, _ = shapes[number % 3 if number % 50 else 3]
        y, x = np.mgrid[:height, :width]
        wave = 127 + 100 * np.sin(x / 29 + y / 23 + number)[..., None] * random.uniform(0.3, 1, 3)
        pictures.append(encoded(wave.astype(np.uint8)))
    return write_data(tmp_path_factory.mktemp("dali") / "data", pictures, range(SAMPLES), classes=SAMPLES)


def gpu_settings(**changes):
    fixed = {"reader": "dali", "image_size": 224, "eval_resize": 256, "classes": SAMPLES, "threads": 4}
    return settings(**{**fixed, **changes})


def train_batches(root, **changes):
    source = gpu_settings(**changes).open_train(root, Layout(device="cuda", seed=1), 32)
    batches = [batch for block in BLOCKS for batch in source.batches(block)]
    source.close()
    return batches


@pytest.mark.parametrize("cache_mb", [0, 2000])
@pytest.mark.parametrize("multiplier", [1, 4])
def test_every_sample_comes_once_per_epoch(root, cache_mb, multiplier):
    batches = train_batches(root, cache_mb=cache_mb, input_batch_multiplier=multiplier)
    labels = torch.cat([batch.tensors["label"] for batch in batches]).tolist()
    for epoch in range(4):
        assert sorted(labels[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))


@pytest.mark.parametrize("cache_mb", [0, 2000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_batches_have_the_form_that_the_model_expects(root, cache_mb, dtype):
    for batch in train_batches(root, cache_mb=cache_mb, dtype=dtype):
        image, label = batch.tensors["image"], batch.tensors["label"]
        assert (image.shape, image.dtype, image.device.type) == ((32, 4, 224, 224), dtype, "cuda")
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert not image[:, 3].any()
        assert (label.shape, label.dtype, label.device.type) == ((32,), torch.int64, "cuda")
        assert image.isfinite().all()


def test_cached_pictures_look_like_decoded_ones(root):
    means = [
        torch.stack([batch.tensors["image"].float().mean() for batch in train_batches(root, cache_mb=mb)]).mean()
        for mb in (0, 2000)
    ]
    assert abs(means[0] - means[1]) < 0.1


@pytest.mark.parametrize("hw_decoder_load", [0.0, 0.99])
def test_evaluation_pictures_are_those_of_the_other_reader(root, hw_decoder_load):
    options = {"dtype": torch.float32, "hw_decoder_load": hw_decoder_load}
    ours = gpu_settings(reader="torchvision", dtype=torch.float32).open_eval(root, Layout(), 64)
    dali = gpu_settings(**options).open_eval(root, Layout(device="cuda"), 64)
    for _ in range(3):
        for batch, other in zip(dali, ours, strict=True):
            assert torch.equal(batch.tensors["label"].cpu(), other.tensors["label"])
            real = other.tensors["label"] >= 0
            difference = (batch.tensors["image"].cpu()[real] - other.tensors["image"][real]).abs()
            assert difference.mean() < 2 / 57  # levels over the standard deviation
            assert difference.quantile(0.99) < 8 / 57 if difference.numel() < 2**24 else difference.max() < 30 / 57
    ours.close()
    dali.close()


@pytest.mark.parametrize("replicas", [1, 3, 7, 8])
def test_eval_shards_are_exactly_the_set_every_time(root, replicas):
    seen: list[list[int]] = [[], [], []]
    for rank in range(replicas):
        layout = Layout({"dp": replicas}, rank, device="cuda")
        source = gpu_settings().open_eval(root, layout, 16)
        for evaluation in seen:
            labels = torch.cat([batch.tensors["label"] for batch in source])
            evaluation += labels[labels >= 0].tolist()
        source.close()
    assert seen == [list(range(SAMPLES))] * 3


def test_same_seed_gives_the_same_batches(root):
    for batch, other in zip(train_batches(root), train_batches(root), strict=True):
        assert torch.equal(batch.tensors["label"], other.tensors["label"])
        assert (batch.tensors["image"] - other.tensors["image"]).abs().max() < 0.1


def test_reading_never_waits_for_the_device(root):
    train = gpu_settings(cache_mb=2000).open_train(root, Layout(device="cuda"), 32)
    evaluation = gpu_settings().open_eval(root, Layout(device="cuda"), 16)
    side = torch.cuda.Stream()
    with waiting_is_an_error(), torch.cuda.stream(side):
        batches = [*train.batches(BLOCKS[0]), *evaluation]
    torch.cuda.synchronize()
    assert all(batch.tensors["image"].isfinite().all() for batch in batches)
    train.close()
    evaluation.close()


def test_warm_up_runs_before_there_are_data():
    gpu_settings().warm_up(Layout(device="cuda"), 32)


def test_corrupt_picture_is_an_error(tmp_path):
    good = encoded(np.full((40, 40, 3), 90, np.uint8))
    root = write_data(tmp_path / "data", [good, b"no picture at all", good], [0, 1, 2])
    source = gpu_settings().open_eval(root, Layout(device="cuda"), 3)
    with pytest.raises(DataError, match=r"val\.rec: DALI cannot read on"):
        list(source)
    source.close()
