"""Test RetinaNet's DALI reader on a GPU against the torchvision reader; it never waits for the device."""

import shutil

import numpy as np
import pytest
import torch

from benchmarks.retinanet.prepare import prepare
from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import DataError
from tests.benchmarks.retinanet.small_pictures import encoded, label, row, settings, smooth, write_raw
from tests.gpu.support import waiting_is_an_error

pytestmark = pytest.mark.gpu
pytest.importorskip("nvidia.dali")

SAMPLES, EVAL = 101, 37
BLOCKS = [Block(i, i + 1, 1, i * SAMPLES, SAMPLES) for i in range(2)]
SHAPES = [(480, 640), (640, 427), (300, 300), (768, 1024), (201, 333)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Prepare smooth pictures of several sizes, with one or two boxes."""
    folder = tmp_path_factory.mktemp("dali")
    rows, pictures = {}, {}
    for split, count, first in (("train", SAMPLES, 0), ("validation", EVAL, 500)):
        names = [f"{number:04x}" for number in range(count)]
        boxes = [row(name, label(i % 3), f"{i / 200},1,0.25,0.75") for i, name in enumerate(names)]
        rows[split] = boxes + [row(name, label(1), "0.125,0.5,0,1") for name in names[::2]]
        pictures[split] = {name: smooth(*SHAPES[i % 5], first + i) for i, name in enumerate(names)}
    prepare(write_raw(folder / "raw", rows, pictures), folder / "data")
    return folder / "data"


def gpu_settings(dtype=torch.float32, **changes):
    return settings(dtype, **{"reader": "dali", "image_size": 256, "threads": 4, **changes})


def train(root, device="cuda", block=0, start=0, micro_batch=8, dtype=torch.float32, **changes):
    source = gpu_settings(dtype, **changes).open_train(root, Layout(device=device, seed=1), micro_batch)
    batches = [batch for b in BLOCKS[block:] for batch in source.batches(b, start if b is BLOCKS[block] else 0)]
    source.close()
    return batches


def assert_alike(batches, others, mean=0.75, most=16.0):
    """Check that batches are equal up to the pixels, which nvJPEG rounds differently.

    ``mean`` and ``most`` are the largest mean and single differences, in levels of 255.
    """
    for batch, other in zip(batches, others, strict=True):
        assert (batch.position, batch.samples) == (other.position, other.samples)
        assert batch.tensors.keys() == other.tensors.keys()
        for name, tensor in batch.tensors.items():
            if name != "image":
                assert torch.equal(tensor.cpu(), other.tensors[name].cpu()), name
        difference = (batch.tensors["image"].cpu() - other.tensors["image"].cpu()).abs()
        if "picture" in batch.tensors:
            difference = difference[batch.tensors["picture"] >= 0]
        if difference.numel():
            assert difference.mean() < mean / 57  # levels over the standard deviation
            assert difference.max() < most / 57


@pytest.mark.parametrize("hw_decoder_load", [0.0, 0.99])
@pytest.mark.parametrize("multiplier", [1, 4])
def test_training_batches_are_those_of_the_other_reader(root, hw_decoder_load, multiplier):
    dali = train(root, hw_decoder_load=hw_decoder_load, input_batch_multiplier=multiplier)
    assert_alike(dali, train(root, device="cpu", reader="torchvision"))


@pytest.mark.parametrize(("block", "start"), [(0, 3), (1, 0), (1, 5)])
def test_a_position_is_where_the_stream_continues(root, block, start):
    whole = train(root, input_batch_multiplier=3)
    resumed = train(root, block=block, start=start, input_batch_multiplier=3)
    assert_alike(resumed, whole[-len(resumed) :], mean=0.1, most=8.0)  # a picture's decoder may be another one


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_batches_have_the_form_that_the_model_expects(root, dtype):
    for batch in train(root, dtype=dtype)[:3]:
        image, boxes = batch.tensors["image"], batch.tensors["boxes"]
        assert (image.shape, image.dtype, image.device.type) == ((8, 3, 256, 256), dtype, "cuda")
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert image.isfinite().all()
        assert (boxes.shape, boxes.dtype, boxes.device.type) == ((8, 6, 4), torch.float32, "cpu")
        assert all(tensor.is_pinned() for name, tensor in batch.tensors.items() if name != "image")


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_evaluation_batches_are_those_of_the_other_reader(root, replicas):
    for rank in range(replicas):
        batches = []
        for reader, device in (("dali", "cuda"), ("torchvision", "cpu")):
            layout = Layout({"dp": replicas}, rank, device=device)
            source = gpu_settings(reader=reader).open_eval(root, layout, 4)
            batches.append([batch for _ in range(2) for batch in source])
            source.close()
        assert_alike(*batches, mean=1.5)  # of single pictures, when there are eight ranks


def test_reading_never_waits_for_the_device(root):
    training = gpu_settings().open_train(root, Layout(device="cuda"), 8)
    evaluation = gpu_settings().open_eval(root, Layout(device="cuda"), 8)
    side = torch.cuda.Stream()
    with waiting_is_an_error(), torch.cuda.stream(side):
        batches = [*training.batches(BLOCKS[0]), *evaluation]
        moved = [
            {name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.tensors.items()} for batch in batches
        ]
    torch.cuda.synchronize()
    assert all(tensors["image"].isfinite().all() for tensors in moved)
    training.close()
    evaluation.close()


def test_a_truncated_picture_is_named(tmp_path):
    pictures = {"train": {"aa": smooth(40, 40, 0)}, "validation": {"bb": smooth(40, 40, 1), "cc": smooth(40, 40, 2)}}
    rows = {split: [row(name, label(0), "0,1,0,1") for name in pictures[split]] for split in pictures}
    prepare(write_raw(tmp_path / "raw", rows, pictures), tmp_path / "data")
    for name in ("manifest.json", "prepare.lock"):  # as the reference's script leaves it: nobody knows the files' sizes
        (tmp_path / "data" / name).unlink()
    for split in pictures:
        shutil.rmtree(tmp_path / "data" / split / "boxes")
    path = tmp_path / "data/validation/data/cc.jpg"
    path.write_bytes(path.read_bytes()[:-100])
    source = gpu_settings().open_eval(tmp_path / "data", Layout(device="cuda"), 2)
    with pytest.raises(DataError, match=r"cc\.jpg: the picture cannot be decoded"):
        list(source)
    source.close()


def test_a_picture_that_cannot_be_decoded_is_named(tmp_path):
    pictures = {"train": {"aa": smooth(64, 64, 0)}, "validation": {"bb": smooth(64, 64, 1)}}
    data = bytearray(pictures["validation"]["bb"])
    tables = data.index(b"\xff\xc4")
    data[tables + 4 : tables + 24] = b"\xff" * 20  # Huffman tables, without which nothing can be decoded
    pictures["validation"]["bb"] = bytes(data)
    rows = {split: [row(name, label(0), "0,1,0,1") for name in pictures[split]] for split in pictures}
    prepare(write_raw(tmp_path / "raw", rows, pictures), tmp_path / "data")
    source = gpu_settings().open_eval(tmp_path / "data", Layout(device="cuda"), 1)
    with pytest.raises(DataError, match=r"bb\.jpg: the picture cannot be decoded"):
        list(source)
    source.close()


def test_warm_up_runs_before_there_are_data():
    gpu_settings().warm_up(Layout(device="cuda"), 8)


def test_pictures_of_the_benchmarks_size_are_resized_without_antialiasing(tmp_path):
    """Stripes of one pixel, which an antialiasing filter would make grey."""
    pixels = np.zeros((1600, 1600, 3), np.uint8)
    pixels[:, ::2] = 255
    pictures = {"train": {"aa": smooth(40, 40, 0)}, "validation": {"bb": encoded(pixels, 100)}}
    rows = {split: [row(name, label(0), "0,1,0,1") for name in pictures[split]] for split in pictures}
    prepare(write_raw(tmp_path / "raw", rows, pictures), tmp_path / "data")
    images = []
    for reader, device in (("dali", "cuda"), ("torchvision", "cpu")):
        source = gpu_settings(reader=reader, image_size=500).open_eval(tmp_path / "data", Layout(device=device), 1)
        images.append(next(iter(source)).tensors["image"].cpu())
        source.close()
    assert images[1].std() > 0.5
    assert (images[0] - images[1]).abs().mean() < 3 / 57
