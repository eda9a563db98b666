"""Files read past the page cache into pinned memory, and from there to a GPU while the reading goes on."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from common.data.aligned_buffers import ALIGNMENT, AlignedBuffers
from common.data.direct_reader import DirectFile
from common.data.direct_rows import DirectRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZE = (64 << 20) + 1234
PIECE = 1 << 20


def recorded() -> torch.cuda.Event:
    """An event behind all that the current stream has to do."""
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
