"""Writing and reading checkpoints on one rank: durable, complete or absent, and validated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from common.distributed.layout import Layout
from common.errors import CheckpointError
from common.run import checkpoint
from common.run.checkpoint import Progress

STEP = "step_00000003"


def save(folder: Path, seed: int, step: int = 3) -> Path:
    return checkpoint.save(folder, Progress(step=step), seed, {}, torch.nn.Linear(1, 1), (), Layout())


def seed_at(saved: Path) -> int:
    return torch.load(saved / "rank_0.pt", weights_only=True)["seed"]


def test_files_of_a_crashed_attempt_are_removed(tmp_path):
    stale = tmp_path / f".{STEP}.partial"
    stale.mkdir()
    (stale / "rank_1.pt").touch()
    saved = save(tmp_path, 1)
    assert [path.name for path in saved.iterdir()] == ["rank_0.pt"]
    assert [path.name for path in tmp_path.iterdir()] == [STEP]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 1)
    assert seed_at(save(tmp_path, 2)) == 2
    assert [path.name for path in tmp_path.iterdir()] == [STEP]


def test_the_earlier_checkpoint_stays_if_the_new_one_cannot_be_renamed(tmp_path, monkeypatch):
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


def test_a_checkpoint_under_its_temporary_name_is_restored(tmp_path, monkeypatch):
    save(tmp_path, 1).rename(tmp_path / f".{STEP}.old")

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="disk full"):
        save(tmp_path, 2)
    assert seed_at(tmp_path / STEP) == 1
    assert [path.name for path in tmp_path.iterdir()] == [STEP]


def test_file_and_folder_are_synced_before_the_checkpoint_is_renamed(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, (tmp_path / STEP).exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save(tmp_path, 1)
    assert synced == [("rank_0.pt", False), (f".{STEP}.partial", False), (tmp_path.name, True)]


def build(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def pretend_to_be_written_by(saved: Path, **sizes: int) -> None:
    """Change the layout that the files name, and complete them with copies."""
    content = torch.load(saved / "rank_0.pt", weights_only=True)
    content["layout"] |= sizes
    for rank in range(Layout(sizes).world_size):
        torch.save(content, saved / f"rank_{rank}.pt")


def test_everything_is_restored_on_the_same_layout(tmp_path):
    model, progress = build(0), Progress(3, 1, 2, 48, ((32, {"accuracy": 0.5}),))
    model(torch.randn(4, 3))
    saved = checkpoint.save(tmp_path, progress, 1, {"a": 1}, model, (), Layout())
    expected = torch.rand(3)
    other = build(1)
    content = checkpoint.read(saved, {"a": 1}, Layout())
    assert checkpoint.restore(content, other, (), Layout()) == progress
    assert content["remarks"] == []
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("late", [[], [3, 5]])
def test_late_samples_are_restored_on_the_same_layout(late, tmp_path):
    saved = checkpoint.save(tmp_path, Progress(3), 1, {}, torch.nn.Linear(1, 1), (), Layout(), late=late)
    assert checkpoint.read(saved, {}, Layout())["late"] == late
    pretend_to_be_written_by(saved, dp=4)
    content = checkpoint.read(saved, {}, Layout({"dp": 2}, 1))
    assert content["late"] == []
    assert "samples that were late when the checkpoint was written are left out" in content["remarks"][1]


def test_a_remark_counts_evaluations_without_a_score(tmp_path):
    saved = checkpoint.save(tmp_path, Progress(3, unscored=2), 1, {}, torch.nn.Linear(1, 1), (), Layout())
    (remark,) = checkpoint.read(saved, {}, Layout())["remarks"]
    assert "evaluations without a score when the checkpoint was written: 2" in remark


@pytest.mark.parametrize(
    ("sizes", "difference"),
    [
        ({"dp": 2}, ""),
        ({"dp": 2, "cp": 2}, ", and layout.cp=2 instead of 1"),
        ({"dp": 2, "tp": 2}, ", and layout.tp=2 instead of 1"),
    ],
    ids=["dp", "cp", "tp"],
)
def test_a_remark_names_the_difference_of_another_layout(tmp_path, sizes, difference):
    saved = save(tmp_path, 1)
    pretend_to_be_written_by(saved, dp=4)
    (remark,) = checkpoint.read(saved, {}, Layout(sizes, 1))["remarks"]
    assert f"of 4 replicas, this run has 2{difference}: random states start anew" in remark


def test_all_ranks_of_a_replica_read_the_weights_of_its_first_rank(tmp_path):
    # written by dp 2 x cp 2 x tp 2: rank 0 alone has weights, and they are whole
    saved = save(tmp_path, 1)
    pretend_to_be_written_by(saved, dp=2, cp=2, tp=2)
    for rank in range(8):
        content = torch.load(saved / f"rank_{rank}.pt", weights_only=True)
        torch.save(content | {"seed": rank}, saved / f"rank_{rank}.pt")
    for sizes in ({"dp": 2, "cp": 2, "tp": 2}, {"dp": 1, "cp": 4, "tp": 2}, {"dp": 2, "tp": 4}):
        assert [checkpoint.read(saved, {}, Layout(sizes, rank))["seed"] for rank in range(8)] == [0] * 8


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"pp": 4, "dp": 2}])
def test_the_first_ranks_of_all_pipeline_stages_are_merged(tmp_path, sizes):
    # written by pp 2 x dp 3 x tp 2: the first ranks of the stages are 0 and 6
    saved = save(tmp_path, 1)
    pretend_to_be_written_by(saved, pp=2, dp=3, tp=2)
    for rank in range(12):
        content = torch.load(saved / f"rank_{rank}.pt", weights_only=True)
        state = {"step": torch.tensor(3), "momentum": {f"weight {rank}": torch.ones(1)}}
        torch.save(
            content | {"model": {f"weight {rank}": torch.ones(1)}, "updaters": [state]}, saved / f"rank_{rank}.pt"
        )
    content = checkpoint.read(saved, {}, Layout(sizes))
    assert list(content["model"]) == ["weight 0", "weight 6"]
    assert list(content["updaters"][0]["momentum"]) == ["weight 0", "weight 6"]
    assert content["updaters"][0]["step"] == 3


def test_a_number_of_another_stage_that_is_not_finite_is_refused(tmp_path):
    saved = checkpoint.save(tmp_path, Progress(1), 1, {}, build(0), (), Layout())
    pretend_to_be_written_by(saved, pp=2)
    content = torch.load(saved / "rank_1.pt", weights_only=True)
    content["model"]["0.weight"][0, 0] = float("nan")
    torch.save(content, saved / "rank_1.pt")
    with pytest.raises(CheckpointError, match=r"1 of the \d+ numbers of model\.0\.weight are not finite"):
        checkpoint.restore(checkpoint.read(saved, {}, Layout()), build(1), (), Layout())


def test_a_missing_file_of_another_rank_is_an_error(tmp_path):
    saved = save(tmp_path, 1)
    pretend_to_be_written_by(saved, dp=4)
    (saved / "rank_2.pt").unlink()
    with pytest.raises(CheckpointError, match="incomplete, 3 of the 4 ranks' files"):
        checkpoint.read(saved, {}, Layout())


def test_other_settings_are_refused(tmp_path):
    saved = checkpoint.save(tmp_path, Progress(), 1, {"micro_batch": 8}, build(0), (), Layout())
    with pytest.raises(CheckpointError, match="micro_batch=8, this run has micro_batch=4"):
        checkpoint.read(saved, {"micro_batch": 4}, Layout())


def test_another_format_is_refused(tmp_path):
    saved = save(tmp_path, 1)
    torch.save({"format": 1}, saved / "rank_0.pt")
    with pytest.raises(CheckpointError, match="format 1, this suite reads 7"):
        checkpoint.read(saved, {}, Layout())


@pytest.mark.parametrize("spoil", [lambda old: old[: len(old) // 2], lambda old: b"", lambda old: b"not a checkpoint"])
def test_a_damaged_file_is_named(spoil, tmp_path):
    file = save(tmp_path, 1) / "rank_0.pt"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"rank_0.pt: unreadable"):
        checkpoint.read(file.parent, {}, Layout())


def test_a_folder_without_files_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        checkpoint.read(tmp_path, {}, Layout())


def test_a_run_that_resumed_from_an_earlier_step_keeps_what_it_writes(tmp_path):
    for written, step in enumerate((8, 9, 3), start=1):
        os.utime(save(tmp_path, 1, step), (written, written))
    checkpoint.keep_newest(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000009"]


@pytest.mark.parametrize("named", ["run", "run/checkpoints", "run/checkpoints/step_00000003"])
def test_a_message_about_a_wrong_folder_names_the_newest_checkpoint_of_the_run(named, tmp_path):
    newest = save(tmp_path / "run" / "checkpoints", 1, step=2)
    with pytest.raises(CheckpointError, match=rf"no checkpoint there .*; the newest checkpoint near it is {newest}"):
        checkpoint.read(tmp_path / named, {}, Layout())


def test_the_weights_of_another_model_are_refused(tmp_path):
    content = checkpoint.read(save(tmp_path, 1), {}, Layout())
    with pytest.raises(CheckpointError, match="of another model"):
        checkpoint.restore(content, build(0), (), Layout())


class Lagging:
    """An updater that brings its model up to date only in ``materialize``."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def materialize(self) -> None:
        self._model.weight.data.fill_(7.0)

    def state_dict(self) -> dict:
        return {}


def test_weights_are_materialized_before_they_are_saved(tmp_path):
    model = torch.nn.Linear(1, 1)
    saved = checkpoint.save(tmp_path, Progress(step=3), 1, {}, model, (Lagging(model),), Layout())
    assert checkpoint.read(saved, {}, Layout())["model"]["weight"].item() == 7.0


class Kept:
    """An updater with a given state."""

    def __init__(self, state: dict) -> None:
        self._state = state

    def materialize(self) -> None:
        """The model is always up to date."""

    def state_dict(self) -> dict:
        return self._state


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value, tmp_path):
    model = build(0)
    model[0].weight.data[1, 2] = value
    saved = checkpoint.save(tmp_path, Progress(step=3), 1, {}, model, (), Layout())
    with pytest.raises(CheckpointError, match=r"rank_0.pt: 1 of the 6 numbers of model\.0\.weight are not finite"):
        checkpoint.read(saved, {}, Layout())


def test_an_optimizer_state_that_is_not_finite_is_refused_by_name(tmp_path):
    whole = {"step": torch.tensor(3), "momentum": {"0.bias": torch.zeros(2)}}
    broken = {"step": torch.tensor(3), "momentum": {"0.bias": torch.tensor([0.0, float("nan")], dtype=torch.bfloat16)}}
    updaters = (Kept(whole), Kept(broken))
    saved = checkpoint.save(tmp_path, Progress(step=3), 1, {}, build(0), updaters, Layout())
    with pytest.raises(CheckpointError, match=r"1 of the 2 numbers of updaters\.1\.momentum\.0\.bias are not finite"):
        checkpoint.read(saved, {}, Layout())


def test_buffers_of_other_ranks_that_are_not_finite_are_refused(tmp_path):
    saved = checkpoint.save(tmp_path, Progress(step=3), 1, {}, build(0), (), Layout())
    pretend_to_be_written_by(saved, dp=2)
    content = torch.load(saved / "rank_1.pt", weights_only=True)
    content["buffers"] = {"1.running_var": torch.tensor([1.0, float("inf")])}
    torch.save(content, saved / "rank_1.pt")
    with pytest.raises(CheckpointError, match=r"rank_1.pt: 1 of the 2 numbers of buffers\.1\.running_var"):
        checkpoint.read(saved, {}, Layout({"dp": 2}, 1))


class Streaming:
    """An updater that writes its rows to a separate folder; the write fails with ``problem``, if given."""

    loss_scale, metrics = None, {}

    def __init__(self, rows: list[int], problem: str = "") -> None:
        self.rows, self.problem = rows, problem

    def nothing(self, *_: object) -> None:
        pass

    begin = arm = collect = measure = write = materialize = named_state = load_state_dict = nothing

    def state_dict(self) -> dict[str, object]:
        return {"step": 1}

    def save_shards(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "rows_0").write_bytes(bytes(self.rows))
        if self.problem:
            raise OSError(self.problem)

    def load_shards(self, folder: Path) -> None:
        self.rows = list((folder / "rows_0").read_bytes())


def test_separately_written_shards_are_restored(tmp_path):
    updaters = (Streaming([1, 2]), Streaming([3]))
    saved = checkpoint.save(tmp_path, Progress(step=3), 1, {}, build(0), updaters, Layout())
    fresh = (Streaming([]), Streaming([]))
    checkpoint.restore(checkpoint.read(saved, {}, Layout()), build(1), fresh, Layout())
    assert [updater.rows for updater in fresh] == [[1, 2], [3]]


def test_the_earlier_checkpoint_stays_if_shards_cannot_be_written(tmp_path):
    checkpoint.save(tmp_path, Progress(step=3), 1, {}, build(0), (Streaming([1]),), Layout())
    with pytest.raises(CheckpointError, match="rank 0: disk full"):
        checkpoint.save(tmp_path, Progress(step=3), 2, {}, build(0), (Streaming([2], "disk full"),), Layout())
    assert [path.name for path in tmp_path.iterdir()] == [STEP]
    assert seed_at(tmp_path / STEP) == 1
    assert (tmp_path / STEP / "updater_0" / "rows_0").read_bytes() == b"\x01"
