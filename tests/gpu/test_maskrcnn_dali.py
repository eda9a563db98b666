"""Test Mask R-CNN's DALI reader on a GPU against the torchvision reader; it never waits for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.maskrcnn.config import Facts, MaskReaderConfig
from benchmarks.maskrcnn.data import MaskData
from benchmarks.maskrcnn.pictures import Preparer
from benchmarks.maskrcnn.prepare import prepare
from benchmarks.maskrcnn.synthetic import SyntheticOutlines, generate
from common.config.loading import build
from common.data.batches import Block
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from tests.gpu.support import waiting_is_an_error

pytestmark = pytest.mark.gpu
pytest.importorskip("nvidia.dali")

SYNTHETIC = SyntheticOutlines(
    train=30, eval=11, classes=12, sides=(120, 640), boxes=4, width=8, layers=(1, 1, 1, 1), image_size=64, seed=3
)
BLOCKS = [Block(i, i + 1, 1, i * SYNTHETIC.train, SYNTHETIC.train) for i in range(2)]
MICRO_BATCH = 4
READER = {
    "reader": "dali", "threads": 4, "prefetch": 2, "max_boxes": 12, "hw_decoder_load": 0.65,
    "input_batch_multiplier": 1, "eval_batch": 4, "shapes": [[800, 1344], [1344, 800]],
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("dali")
    generate(folder / "raw", SYNTHETIC)
    prepare(folder / "raw", folder / "data", workers=2)
    return folder / "data"


def settings(**reader):
    facts = fixed_facts(Facts, "maskrcnn", classes=SYNTHETIC.classes)
    return MaskData(facts, build(MaskReaderConfig, READER | reader, "reader"), torch.float32)


def train(root, device="cuda", block=0, start=0, **reader):
    source = settings(**reader).open_train(root, Layout(device=device, seed=1), MICRO_BATCH)
    found = [batch for b in BLOCKS[block:] for batch in source.batches(b, start if b is BLOCKS[block] else 0)]
    source.close()
    return found


def assert_alike(batches, others):
    """Check that batches are equal up to the pixels, which nvJPEG rounds differently."""
    for batch, other in zip(batches, others, strict=True):
        assert (batch.position, batch.samples, batch.key) == (other.position, other.samples, other.key)
        assert batch.tensors.keys() == other.tensors.keys()
        for name, tensor in batch.tensors.items():
            if name != "pixels":
                assert torch.equal(tensor.cpu(), other.tensors[name].cpu()), name
        for slot, (height, width) in enumerate(batch.tensors["decoded_size"].tolist()):
            if (height, width) == (1, 1):
                continue
            one, two = (each.tensors["pixels"][slot, :height, :width].cpu().float() for each in (batch, other))
            assert (one - two).abs().mean() < 1.5


@pytest.mark.parametrize("hw_decoder_load", [0.0, 0.99])
@pytest.mark.parametrize("multiplier", [1, 3])
def test_training_batches_are_those_of_the_other_reader(root, hw_decoder_load, multiplier):
    found = train(root, hw_decoder_load=hw_decoder_load, input_batch_multiplier=multiplier)
    assert_alike(found, train(root, device="cpu", reader="torchvision"))
    for batch in found:
        assert batch.tensors["pixels"].device.type == "cuda"
        assert all(tensor.is_pinned() for name, tensor in batch.tensors.items() if name not in ("pixels", "seed"))


@pytest.mark.parametrize(("block", "start"), [(0, 3), (1, 0), (1, 2)])
def test_a_position_is_where_the_stream_continues(root, block, start):
    resumed = train(root, block=block, start=start)
    assert_alike(resumed, train(root)[-len(resumed) :])


@pytest.mark.parametrize("replicas", [1, 3])
def test_evaluation_batches_are_those_of_the_other_reader(root, replicas):
    for rank in range(replicas):
        batches = []
        for reader, device in (("dali", "cuda"), ("torchvision", "cpu")):
            layout = Layout({"dp": replicas}, rank, device=device)
            source = settings(reader=reader).open_eval(root, layout, 4)
            batches.append([batch for _ in range(2) for batch in source])
            source.close()
        assert_alike(*batches)


@pytest.mark.parametrize("reader", ["dali", "torchvision"])
def test_reading_and_preparing_never_wait_for_the_device(root, reader):
    given, device = settings(reader=reader), torch.device("cuda")
    preparer = Preparer(given.facts, {}, device, torch.bfloat16)
    preparer.warm_up(MICRO_BATCH, given.reader.shapes)
    training = given.open_train(root, Layout(device="cuda"), MICRO_BATCH)
    evaluation = given.open_eval(root, Layout(device="cuda"), 4)
    side, made = torch.cuda.Stream(), []
    torch.cuda.synchronize()
    with waiting_is_an_error(), torch.cuda.stream(side):
        for batch in training.batches(BLOCKS[0]):
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}
            made.append(preparer(moved, batch.key))
        for _ in range(2):
            for batch in evaluation:
                moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}
                made.append(preparer.evaluation(moved, batch.key))
    torch.cuda.synchronize()
    assert all(tensors["image"].isfinite().all() for tensors in made)
    assert all(tensors["image"].is_contiguous(memory_format=torch.channels_last) for tensors in made)
    training.close()
    evaluation.close()


def test_warm_up_runs_before_there_are_data():
    settings().warm_up(Layout(device="cuda"), MICRO_BATCH)
