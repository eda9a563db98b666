"""Feeding pipelines: order, jumps and errors, on a pipeline that works ahead as DALI's do and decodes nothing."""

import io
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from common.data.batches import Block
from common.data.order import EpochStream
from common.data.threads import SampleThreads
from common.errors import DataError
from common.vision.dali_reader import FedRunner, FedTrainSource, Feed

SAMPLES = 7
BLOCKS = [Block(i, i + 1, 1, i * SAMPLES, SAMPLES) for i in range(3)]
FOLDER = Path("pictures")


class Output:
    def __init__(self, tensor):
        self._tensor = tensor

    def as_tensor(self):
        return self._tensor


class AheadPipeline:
    """Puts out the first byte of each file times its flag, after it has asked for two more runs, as DALI does."""

    device_id = None

    def __init__(self, source):
        self._source, self._queue = source, deque()

    def run(self):
        while len(self._queue) < 3:
            encoded, numbers = self._source()
            values = np.array([data[0] for data in encoded], np.int64) * numbers.astype(np.int64)
            self._queue.append(None if (values < 0).any() else torch.from_numpy(values))
        values = self._queue.popleft()
        if values is None:
            raise RuntimeError("a decoder failed")
        return [Output(values)]


class Fed:
    """A source over samples 0 to 6, whose files have one byte: 10 plus their number."""

    def __init__(self, micro_batch=2, multiplier=1, accumulation=1, flag=1, fail=None, content=None):
        self.stream = EpochStream(SAMPLES, micro_batch, accumulation, seed=3)
        self.built, self.begun = 0, []
        self._multiplier, self._flag, self._fail, self._content = multiplier, flag, fail, content
        self._threads = SampleThreads(2, 2)
        pictures = SimpleNamespace(path=FOLDER, close=lambda: None)
        runner = FedRunner(self._build, self._begin, multiplier, self._threads, 2, torch.int64, pictures)
        self.source = FedTrainSource(runner, self.stream, multiplier, 5, True, lambda tensors: tensors)

    def _build(self, source):
        self.built += 1
        return AheadPipeline(source)

    def _begin(self, number):
        self.begun.append(number)
        samples = [sample for part in range(self._multiplier) for _, sample in self.stream.samples_of(number + part)]
        encoded = [np.empty(0, np.uint8)] * len(samples)
        beside = torch.zeros(len(samples), dtype=torch.int64)

        def fill(slot):
            if samples[slot] == self._fail:
                raise DataError(f"{samples[slot]} cannot be read")
            encoded[slot] = np.frombuffer(self._content or bytes([10 + samples[slot]]), np.uint8)
            beside[slot] = samples[slot]

        pending = self._threads.begin({"beside": beside}, len(samples), fill)
        names = [f"{FOLDER}/{sample}.jpg" for sample in samples]
        return Feed(names, encoded, np.full(len(samples), self._flag, np.float32), pending)

    def read(self, block, start=0):
        return list(self.source.batches(BLOCKS[block], start))


def values(batches):
    return [batch.tensors["image"].tolist() for batch in batches]


@pytest.fixture
def close():
    opened = []
    yield lambda fed: opened.append(fed) or fed
    for fed in opened:
        fed.source.close()


@pytest.mark.parametrize("multiplier", [1, 2, 3])
def test_samples_come_in_the_order_of_the_stream_with_what_went_past(close, multiplier):
    fed = close(Fed(multiplier=multiplier))
    for number, block in enumerate(BLOCKS):
        batches = fed.read(number)
        expected = [
            [sample for _, sample in fed.stream.samples(block, position)]
            for position in range(fed.stream.micro_batches(block))
        ]
        assert values(batches) == [[10 + sample for sample in batch] for batch in expected]
        assert [batch.tensors["beside"].tolist() for batch in batches] == expected
        assert [batch.position for batch in batches] == list(range(len(expected)))
    assert fed.built == 1


@pytest.mark.parametrize("multiplier", [1, 2, 3])
def test_a_first_position_needs_no_other_pipeline(close, multiplier):
    whole = [batch for block in range(3) for batch in close(Fed(multiplier=multiplier)).read(block)]
    fed = close(Fed(multiplier=multiplier))
    resumed = [*fed.read(1, 2), *fed.read(2)]
    assert values(resumed) == values(close(Fed()).read(1))[2:] + values(close(Fed()).read(2))
    assert len(whole) > len(resumed)
    assert fed.built == 1
    assert min(fed.begun) == fed.stream.first_micro_batch(BLOCKS[1]) + 2


def test_a_jump_drops_what_was_made_ahead(close):
    fed = close(Fed())
    first = next(iter(fed.source.batches(BLOCKS[0])))
    assert values(fed.read(2)) == values(close(Fed()).read(2))
    assert values(fed.read(0))[0] == first.tensors["image"].tolist()
    assert fed.built == 3


def test_a_file_that_cannot_be_read_is_an_error(close):
    with pytest.raises(DataError, match=r"^4 cannot be read$"):
        close(Fed(fail=4)).read(0)


def test_a_file_that_cannot_be_decoded_is_named(close):
    with pytest.raises(DataError, match=r"^pictures/\d\.jpg: the picture cannot be decoded: cannot identify"):
        close(Fed(flag=-1)).read(0)


def test_an_error_of_another_cause_is_the_pipelines(close):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    with pytest.raises(DataError, match=r"^pictures: DALI cannot read on: a decoder failed$"):
        close(Fed(flag=-1, content=buffer.getvalue())).read(0)
