"""The DALI reader's CPU pipeline: what the other reader gives, in the same order."""

import pytest
import torch

pytest.importorskip("nvidia.dali")

from benchmarks.retinanet.prepare import prepare
from common.data.batches import Block
from common.distributed.layout import Layout
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


def train(root, reader="dali", **changes):
    source = settings(reader=reader, **changes).open_train(root, Layout(seed=1), 4)
    batches = [batch for block in BLOCKS for batch in source.batches(block)]
    source.close()
    return batches


def assert_alike(batches, others):
    """The same but for the decoders' and the resizes' roundings."""
    for batch, other in zip(batches, others, strict=True):
        assert (batch.position, batch.samples) == (other.position, other.samples)
        assert batch.tensors.keys() == other.tensors.keys()
        for name, tensor in batch.tensors.items():
            if name != "image":
                assert torch.equal(tensor, other.tensors[name]), name
        real = batch.tensors["picture"] >= 0 if "picture" in batch.tensors else slice(None)
        difference = (batch.tensors["image"][real] - other.tensors["image"][real]).abs()
        assert (difference < 0.5 / 57).all()  # levels over the standard deviation


@pytest.mark.parametrize("mirror", [0.0, 0.5, 1.0])
def test_training_batches_are_those_of_the_other_reader(root, mirror):
    assert_alike(train(root, mirror=mirror), train(root, "torchvision", mirror=mirror))


@pytest.mark.parametrize("replicas", [1, 3])
def test_evaluation_batches_are_those_of_the_other_reader(root, replicas):
    for rank in range(replicas):
        batches = []
        for reader in ("dali", "torchvision"):
            source = settings(reader=reader).open_eval(root, Layout({"dp": replicas}, rank), 2)
            batches.append([batch for _ in range(2) for batch in source])
            source.close()
        assert_alike(*batches)
