"""Test the shared memory that hands objects to another process."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from common.evaluation.hand_over import pack, unpack


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_arrays_arrive_writable_and_the_sender_s_stay_as_they_are() -> None:
    sent = {"a": np.arange(5), "b": np.ones((2, 3), np.float32)}
    descriptor, sizes = pack(sent)
    received = unpack(descriptor, sizes)
    os.close(descriptor)
    received["a"][0] = 9
    assert received["a"].tolist() == [9, 1, 2, 3, 4]
    assert sent["a"].tolist() == [0, 1, 2, 3, 4]
    assert received["b"].dtype == np.float32


def test_memory_that_cannot_be_written_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    before = descriptors()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no space"):
        pack(np.zeros(100))
    assert descriptors() == before
