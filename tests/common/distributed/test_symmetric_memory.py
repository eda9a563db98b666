"""Parts of buffers that ranks map from each other, and one answer on all ranks where one of them cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.distributed import symmetric_memory
from common.distributed.symmetric_memory import PeerMemory, attempt

CPU = torch.device("cpu")
SIZE = 64


class Handle:
    """One rank's view of three buffers, which notes the signals."""

    def __init__(self) -> None:
        self.buffers = [torch.arange(SIZE, dtype=torch.uint8) + 64 * rank for rank in range(3)]
        self.buffer_ptrs = [buffer.data_ptr() for buffer in self.buffers]
        self.calls: list[tuple[object, ...]] = []

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype, storage_offset: int) -> Tensor:
        start = storage_offset * dtype.itemsize
        return self.buffers[rank][start : start + sizes.numel() * dtype.itemsize].view(dtype).view(sizes)

    def put_signal(self, dst_rank: int, channel: int) -> None:
        self.calls.append(("put", dst_rank, channel))

    def wait_signal(self, src_rank: int, channel: int) -> None:
        self.calls.append(("wait", src_rank, channel))

    def barrier(self, channel: int) -> None:
        self.calls.append(("barrier", channel))


class Group:
    """Three ranks, of which this is the second."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3


@pytest.fixture
def handle() -> Handle:
    return Handle()


@pytest.fixture
def memory(handle: Handle) -> PeerMemory:
    return PeerMemory(handle.buffers[1], handle, 1, 3)


def test_a_part_is_that_of_its_rank_from_its_byte_on(memory):
    assert memory.size == SIZE
    assert memory.tensor(2, (2, 3), torch.uint8, 5).tolist() == [[133, 134, 135], [136, 137, 138]]
    assert memory.tensor(0, (2,), torch.int16, 60).tolist() == [60 + 256 * 61, 62 + 256 * 63]
    assert memory.tensor(1, (), torch.uint8, 63).item() == 127
    assert memory.tensor(1, (0,), torch.int64, 64).shape == (0,)
    parts = memory.tensors((1,), torch.uint8, 1)
    assert [part.item() for part in parts] == [1, 65, 129]


@pytest.mark.parametrize(
    ("shape", "dtype", "offset"),
    [((65,), torch.uint8, 0), ((64,), torch.uint8, 1), ((1,), torch.int32, 2), ((1,), torch.uint8, -1)],
    ids=str,
)
def test_a_tensor_beyond_the_buffer_or_at_an_unaligned_offset_is_refused(memory, shape, dtype, offset):
    with pytest.raises(ValueError, match="of 64"):
        memory.tensor(0, shape, dtype, offset)


def test_addresses_are_those_of_the_buffers(memory, handle):
    assert memory.addresses.dtype == torch.int64
    assert memory.addresses.tolist() == [buffer.data_ptr() for buffer in handle.buffers]


def test_signals_and_barriers_are_the_handles(memory, handle):
    memory.put_signal(2, 1)
    memory.wait_signal(0, 1)
    memory.barrier(3)
    assert handle.calls == [("put", 2, 1), ("wait", 0, 1), ("barrier", 3)]


def test_closed_memory_is_not_used(memory):
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.tensor(0, (1,), torch.uint8)


# One answer on all ranks


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the two other ranks say whenever all are asked."""
    answers: list[int] = []
    monkeypatch.setattr(symmetric_memory, "refusal", lambda group, device: None)
    monkeypatch.setattr(
        symmetric_memory, "gathered", lambda value, group, device: [answers.pop(0), value, answers.pop(0)]
    )
    return answers


def test_buffers_are_mapped_once_all_ranks_have_one(handle, others, monkeypatch):
    others += [1, 1]
    monkeypatch.setattr(symmetric_memory.torch_symmetric_memory, "empty", lambda size, **_: handle.buffers[1][:size])
    monkeypatch.setattr(symmetric_memory.torch_symmetric_memory, "rendezvous", lambda own, group: handle)
    memory = PeerMemory.allocate(SIZE, Group(), CPU)
    assert (memory.size, memory.rank, memory.ranks) == (SIZE, 1, 3)


@pytest.mark.parametrize("lacks", ["this rank", "another"])
def test_no_rank_waits_for_one_that_lacks_memory(others, monkeypatch, lacks):
    def empty(size: int, **_: object) -> Tensor:
        if lacks == "this rank":
            raise torch.OutOfMemoryError("out of memory")
        return torch.empty(size, dtype=torch.uint8)

    others += [1, int(lacks == "this rank")]
    monkeypatch.setattr(symmetric_memory.torch_symmetric_memory, "empty", empty)
    with pytest.raises(RuntimeError, match="lacks the memory" if lacks == "another" else "out of memory"):
        PeerMemory.allocate(SIZE, Group(), CPU)


def test_an_object_that_all_ranks_can_build_is_built(others):
    others += [1, 1]
    assert attempt(lambda: "built", Group(), CPU) == ("built", "")


def test_where_one_cannot_no_rank_gets_it(others):
    def fails() -> str:
        raise RuntimeError("no access\nat line 5")

    others += [1, 1]
    assert attempt(fails, Group(), CPU) == (None, "the GPUs cannot map each other's memory: no access")
    others += [0, 1]
    assert attempt(lambda: "built", Group(), CPU) == (None, "another rank cannot map its neighbours' memory")


def test_an_unsupported_device_is_refused_without_an_attempt():
    assert attempt(lambda: pytest.fail("was tried"), Group(), CPU) == (None, "it needs CUDA devices, not cpu")
