"""The DALI reader's CPU pipeline: what the other reader gives, in the same order."""

import shutil
import sys

import pytest
import torch

pytest.importorskip("nvidia.dali")

from benchmarks.retinanet.prepare import prepare
from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import DataError
from tests.benchmarks.retinanet.small_pictures import label, row, settings, smooth, write_raw

SAMPLES, EVAL = 13, 7
BLOCKS = [Block(i, i + 1, 1, i * SAMPLES, SAMPLES) for i in range(3)]
SHAPES = [(48, 80), (32, 32), (66, 40), (20, 100)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Smooth pictures of several sizes, with one box or two."""
    folder = tmp_path_factory.mktemp("dali")
    rows, pictures = {}, {}
    for split, count, first in (("train", SAMPLES, 0), ("validation", EVAL, 50)):
        names = [f"{number:02x}" for number in range(count)]
        boxes = [row(name, label(i % 3), f"{i / 20},1,0.25,0.75") for i, name in enumerate(names)]
        rows[split] = boxes + [row(name, label(1), "0.125,0.5,0,1") for name in names[::2]]
        pictures[split] = {name: smooth(*SHAPES[i % 4], first + i) for i, name in enumerate(names)}
    prepare(write_raw(folder / "raw", rows, pictures), folder / "data")
    return folder / "data"


def train(root, reader="dali", block=0, start=0, replicas=1, rank=0, accumulation=1, micro_batch=4, **changes):
    layout = Layout({"dp": replicas}, rank, seed=1)
    source = settings(reader=reader, **changes).open_train(root, layout, micro_batch, accumulation)
    batches = [batch for b in BLOCKS[block:] for batch in source.batches(b, start if b is BLOCKS[block] else 0)]
    source.close()
    return batches


def assert_alike(batches, others, levels=0.5):
    """The same but for the decoders' and the resizes' roundings."""
    for batch, other in zip(batches, others, strict=True):
        assert (batch.position, batch.samples) == (other.position, other.samples)
        assert batch.tensors.keys() == other.tensors.keys()
        for name, tensor in batch.tensors.items():
            if name != "image":
                assert torch.equal(tensor, other.tensors[name]), name
        real = batch.tensors["picture"] >= 0 if "picture" in batch.tensors else slice(None)
        difference = (batch.tensors["image"][real] - other.tensors["image"][real]).abs()
        assert (difference < levels / 57).all()  # levels over the standard deviation


@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize("mirror", [0.0, 0.5, 1.0])
def test_training_batches_are_those_of_the_other_reader(root, mirror, multiplier):
    dali = train(root, mirror=mirror, input_batch_multiplier=multiplier)
    assert_alike(dali, train(root, "torchvision", mirror=mirror))


@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize(("block", "start"), [(0, 3), (1, 0), (2, 2)])
def test_a_position_is_where_the_stream_continues(root, block, start, multiplier):
    whole = train(root, input_batch_multiplier=multiplier)
    resumed = train(root, block=block, start=start, input_batch_multiplier=multiplier)
    assert_alike(resumed, whole[-len(resumed) :], levels=1e-3)


def test_a_source_goes_back_and_forth(root):
    source = settings(reader="dali").open_train(root, Layout(seed=1), 4)
    whole = [batch for block in BLOCKS for batch in source.batches(block)]
    left = iter(source.batches(BLOCKS[0], 1))
    first = next(left)
    again = [first, *list(source.batches(BLOCKS[1]))]
    source.close()
    per_block = len(train(root, block=2))
    assert_alike(again, [whole[1], *whole[-2 * per_block : -per_block]], levels=1e-3)


def test_two_replicas_read_what_one_accumulates(root):
    alone = train(root, micro_batch=2, accumulation=2)
    parts = [train(root, micro_batch=2, replicas=2, rank=rank) for rank in range(2)]
    both = [batch for pair in zip(*parts, strict=True) for batch in pair]
    for batch, other in zip(alone, both, strict=True):
        assert torch.equal(batch.tensors["boxes"], other.tensors["boxes"])
        assert torch.equal(batch.tensors["image"], other.tensors["image"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_batches_have_the_form_that_the_model_expects(root, dtype):
    for batch in train(root, dtype=dtype, micro_batch=5)[:2]:
        assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.tensors.items()} == {
            "image": ((5, 3, 32, 32), dtype),
            "boxes": ((5, 6, 4), torch.float32),
            "label": ((5, 6), torch.int64),
            "count": ((5,), torch.int64),
        }
        assert batch.tensors["image"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_evaluation_batches_are_those_of_the_other_reader(root, replicas):
    for rank in range(replicas):
        batches = []
        for reader in ("dali", "torchvision"):
            source = settings(reader=reader).open_eval(root, Layout({"dp": replicas}, rank), 2)
            batches.append([batch for _ in range(2) for batch in source])
            source.close()
        assert_alike(*batches)


def test_an_evaluation_left_early_begins_anew(root):
    source = settings(reader="dali").open_eval(root, Layout(), 3)
    next(iter(source))
    seen = [int(number) for batch in source for number in batch.tensors["picture"] if number >= 0]
    source.close()
    assert seen == list(range(1, EVAL + 1))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "the picture cannot be read: No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "has .* bytes where .* were prepared"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "the picture cannot be decoded"),
    ],
)
def test_a_missing_or_damaged_picture_is_named(root, tmp_path, spoil, message):
    folder = tmp_path / "data"
    shutil.copytree(root, folder)
    spoil(folder / "train/data/05.jpg")
    with pytest.raises(DataError, match=rf"train/data/05\.jpg.*{message}"):
        train(folder)


def test_a_picture_that_dali_cannot_decode_is_named(root, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(root, folder)
    path = folder / "validation/data/03.jpg"
    data = bytearray(path.read_bytes())
    tables = data.index(b"\xff\xc4")  # Huffman tables, without which nothing can be decoded
    data[tables + 4 : tables + 24] = b"\xff" * 20
    path.write_bytes(data)
    source = settings(reader="dali").open_eval(folder, Layout(), 4)
    with pytest.raises(DataError, match=r"validation/data/03\.jpg: the picture cannot be decoded"):
        list(source)
    source.close()


def test_warm_up_opens_no_data():
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" and watching else None)
    watching = True
    settings(reader="dali").warm_up(Layout(), 4)
    watching = False
    assert not [path for path in opened if path.endswith((".jpg", ".npy", ".json"))]
