"""Weights on their way to the disk: the values are those of the moment, and training waits for nothing it need not."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from common.distributed.weights import Template
from common.errors import CheckpointError
from common.evaluation import checkpoint_writer
from common.evaluation.checkpoint_writer import CheckpointWriter

CPU = torch.device("cpu")


def weights(value: float) -> dict[str, Tensor]:
    """Tensors of several dtypes, sizes that are no multiple of anything, and one in channels-last order."""
    image = torch.arange(30, dtype=torch.float32).reshape(1, 5, 2, 3).contiguous(memory_format=torch.channels_last)
    return {
        "half": torch.full((3, 5), value, dtype=torch.bfloat16),
        "image": image + value,
        "step": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0),
        "scale": torch.tensor(value, dtype=torch.float16),
    }


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes no file until the event is set."""
    event, write = threading.Event(), checkpoint_writer.write_tensors

    def slow(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        assert event.wait(60)
        write(path, tensors, metadata)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", slow)
    yield event
    event.set()


def writer_in(folder: Path, buffers: int) -> CheckpointWriter:
    return CheckpointWriter(folder, Template.of(weights(0), 1), CPU, buffers)


def test_a_file_has_the_weights_of_its_moment_in_the_libraries_format(tmp_path, disk):
    writer, given = writer_in(tmp_path, 2), weights(1)
    writer.write(given)
    for tensor in given.values():
        tensor.zero_()
    writer.write(given)
    assert writer.collect() == []
    disk.set()
    first, second = (safetensors.torch.load_file(path) for path in writer.collect(wait=True))
    for name, expected in weights(1).items():
        assert first[name].dtype == expected.dtype
        assert torch.equal(first[name], expected)
        assert not second[name].any()
    writer.close()


def test_training_waits_only_when_every_copy_waits_for_the_disk(tmp_path, disk):
    writer = writer_in(tmp_path, 2)
    for value in (1, 2):  # neither is on the disk
        writer.write(weights(value))
    assert writer.waited_seconds < 60
    third = threading.Thread(target=lambda: writer.write(weights(3)))
    third.start()
    assert writer.collect() == []
    before = writer.waited_seconds
    disk.set()
    third.join()
    assert writer.waited_seconds > before
    found = [safetensors.torch.load_file(path)["scale"].item() for path in writer.collect(wait=True)]
    assert found == [1, 2, 3]
    writer.close()


def test_closing_writes_submitted_checkpoints(tmp_path):
    writer = writer_in(tmp_path, 2)
    writer.write(weights(1))
    writer.close()
    assert len(writer.collect()) == 1


def test_a_full_disk_is_one_clear_error_for_whoever_writes_or_waits_next(tmp_path, monkeypatch):
    def full(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "write_tensors", full)
    writer = writer_in(tmp_path, 1)
    writer.write(weights(1))
    for use in (lambda: writer.collect(wait=True), lambda: writer.write(weights(2)), writer.check):
        with pytest.raises(CheckpointError, match=r"was not written to .*: No space left on device"):
            use()
    assert list(tmp_path.iterdir()) == []
    writer.close()
