"""Test readers of files into pinned memory, from which a GPU copies."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from common.data.aligned_buffers import ALIGNMENT, AlignedBuffers
from common.data.batches import Block
from common.data.direct_reader import DirectFile
from common.data.direct_rows import DirectRows
from common.data.megatron.indexed import indexed_writer
from common.data.megatron.source import RowShape, RowStream, eval_source, open_in_order, train_source
from common.data.order import EvalShard, MicroBatches

pytestmark = pytest.mark.gpu

# Files read past the page cache


SIZE = (64 << 20) + 1234
PIECE = 1 << 20


def recorded() -> torch.cuda.Event:
    """Return an event after all work in the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("direct") / "data"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


def test_buffers_are_pinned_as_long_as_they_are_open() -> None:
    buffers = AlignedBuffers(3, ALIGNMENT)
    held = [buffers[index].values for index in range(3)]
    assert buffers.pinned
    assert all(values.is_pinned() for values in held)
    assert all(values.data_ptr() % ALIGNMENT == 0 for values in held)
    buffers.close()
    assert not any(values.is_pinned() for values in held)
    held[2].fill_(7)
    assert held[2].cuda().cpu().eq(7).all()


@pytest.mark.parametrize("mode", ["auto", "buffered"])
def test_copies_on_a_late_stream_have_the_bytes_of_the_file(path: Path, mode: str) -> None:
    found = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with DirectFile(path, mode=mode) as file, torch.cuda.stream(stream):
        for number, piece in enumerate(file.pieces([(0, SIZE)], PIECE, ahead=1, threads=4)):
            if number % 8 == 0:
                torch.cuda._sleep(20_000_000)  # some 10 ms, in which the next pieces would be read
            assert piece.values.is_pinned()
            found[piece.offset : piece.offset + len(piece.values)].copy_(piece.values, non_blocking=True)
            piece.keep_until(recorded())
    torch.cuda.synchronize()
    assert torch.equal(found.cpu(), torch.from_numpy(np.fromfile(path, np.uint8)))


def test_rows_come_to_the_gpu_in_their_order(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((5000, 1024)).astype(np.float32)
    np.save(tmp_path / "a.npy", array)
    found = torch.empty(4000, 1024, device="cuda")
    with DirectRows.from_npy(tmp_path / "a.npy", torch.float32, (1024,)) as rows:
        for piece in rows.read(500, 4500, PIECE):
            found[piece.first - 500 : piece.first - 500 + len(piece.values)].copy_(piece.values, non_blocking=True)
            piece.keep_until(recorded())
    torch.cuda.synchronize()
    np.testing.assert_array_equal(found.cpu().numpy(), array[500:4500])


# Rows of tokens


def test_batches_are_pinned_and_whole(tmp_path):
    stream = np.random.default_rng(0).integers(0, 1000, 401)
    with indexed_writer(tmp_path / "x", 1000) as writer:
        for document in np.split(stream, [7, 30, 200]):
            writer.add(document)
    shape = RowShape(8, 1000, extra_token=True)
    rows = open_in_order(tmp_path / "x", shape, keep_partial=False)
    train = train_source(rows, shape, RowStream(MicroBatches(2), 50), 3, synthetic=True, pin_memory=True)
    evaluation = eval_source(rows, shape, EvalShard(3, 2), pin_memory=True)
    trained, evaluated = list(train.batches(Block(0, 1, 0, 0, 50))), list(evaluation)
    train.close()
    evaluation.close()

    for batch in (*trained, *evaluated):
        assert all(tensor.is_pinned() for tensor in batch.tensors.values())
    found = torch.cat([batch.tensors["tokens"].to("cuda", non_blocking=True) for batch in trained]).cpu()
    assert found.tolist() == [stream[8 * row : 8 * row + 9].tolist() for row in range(50)]
    assert evaluated[1].tensors["present"].cuda().tolist() == [True, False]
