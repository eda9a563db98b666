"""Writing a checkpoint: on the disk before it has its name, and never without an earlier one in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from common import checkpoint
from common.checkpoint import Progress
from common.distributed.layout import Layout
from common.errors import CheckpointError

STEP = "step_00000003"


def save(folder: Path, seed: int) -> Path:
    return checkpoint.save(folder, Progress(step=3), seed, {}, torch.nn.Linear(1, 1), (), Layout())


def seed_at(place: Path) -> int:
    return torch.load(place / "rank_0.pt", weights_only=True)["seed"]


def test_what_a_crash_left_half_written_is_no_part_of_the_next_one(tmp_path):
    stale = tmp_path / f".{STEP}.partial"
    stale.mkdir()
    (stale / "rank_1.pt").touch()
    place = save(tmp_path, 1)
    assert [path.name for path in place.iterdir()] == ["rank_0.pt"]
    assert [path.name for path in tmp_path.iterdir()] == [STEP]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 1)
    assert seed_at(save(tmp_path, 2)) == 2
    assert [path.name for path in tmp_path.iterdir()] == [STEP]


def test_a_checkpoint_that_cannot_take_its_place_leaves_the_earlier_one(tmp_path, monkeypatch):
    save(tmp_path, 1)
    rename = Path.rename

    def fails_for_the_new_one(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_new_one)
    with pytest.raises(CheckpointError, match="rank 0: no"):
        save(tmp_path, 2)
    assert seed_at(tmp_path / STEP) == 1
    assert [path.name for path in tmp_path.iterdir()] == [STEP]


def test_a_checkpoint_put_aside_by_a_crash_comes_back(tmp_path, monkeypatch):
    save(tmp_path, 1).rename(tmp_path / f".{STEP}.old")

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="disk full"):
        save(tmp_path, 2)
    assert seed_at(tmp_path / STEP) == 1
    assert [path.name for path in tmp_path.iterdir()] == [STEP]


def test_file_and_folder_are_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, (tmp_path / STEP).exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save(tmp_path, 1)
    assert synced == [("rank_0.pt", False), (f".{STEP}.partial", False), (tmp_path.name, True)]
