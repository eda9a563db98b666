"""Transfer of objects to another process through shared memory."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from common.evaluation.hand_over import ALIGNMENT, pack, unpack


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_objects_arrive_unchanged_with_writable_arrays():
    numbers = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    values = {
        "rows": numbers,
        "transposed": np.asfortranarray(numbers),
        "every other": numbers[:, ::2],
        "none": np.zeros((0, 7), dtype=np.int64),
        "nested": [{"mask": np.array([True, False])}, "text", 1.5],
        "odd": np.arange(ALIGNMENT + 1, dtype=np.uint8),
    }
    descriptor, sizes = pack(values)
    found = unpack(descriptor, sizes)
    os.close(descriptor)
    assert found.keys() == values.keys()
    for name in ("rows", "transposed", "every other", "none", "odd"):
        assert found[name].dtype == values[name].dtype
        np.testing.assert_array_equal(found[name], values[name])
        assert found[name].flags.writeable
    np.testing.assert_array_equal(found["nested"][0]["mask"], [True, False])
    assert found["nested"][1:] == ["text", 1.5]


def test_arrays_of_sender_and_receiver_are_independent():
    numbers = np.arange(1000.0)
    descriptor, sizes = pack({"numbers": numbers})
    numbers[:] = 0
    found = unpack(descriptor, sizes)["numbers"]
    found[0] = 7
    os.close(descriptor)
    assert found[1:].tolist() == list(range(1, 1000))
    assert numbers[0] == 0


def test_memory_that_cannot_be_written_is_freed(monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    before = descriptors()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no space"):
        pack(np.zeros(100))
    assert descriptors() == before
