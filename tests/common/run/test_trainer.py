"""Trainer and EvaluationRank: what their constructors do, and how a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common import cli
from common.config.composition import compose
from common.data.batches import DataSource
from common.distributed import job_store
from common.distributed.rank_info import RankInfo
from common.errors import CheckpointError
from common.run.evaluation_rank import EvaluationRank
from tests import toy
from tests.toy.workload import Toy


def train_one_epoch(data: Path, *overrides: str) -> None:
    """Train the toy, which must be known, for one epoch."""
    fixed = [f"benchmark={toy.NAME}", "scale=test", "device=cpu", "seed=1", f"data_dir={data}"]
    toy.trainer([*fixed, "benchmark.schedule.last_epoch=1", *overrides], Toy).train()


def test_settings_of_a_checkpoint_include_the_schedule_except_its_end(tmp_path):
    def settings(*overrides: str) -> dict[str, object]:
        fixed = ["benchmark=resnet", "scale=test", "device=cpu", f"output_dir={tmp_path / 'out'}"]
        return toy.trainer([*fixed, *overrides], cli.workload_class("resnet")).settings

    assert settings("benchmark.schedule.last_epoch=7") == settings()
    changed = settings("benchmark.schedule.interval=2")
    assert [name for name, value in settings().items() if changed[name] != value] == ["benchmark.schedule"]


def test_the_constructor_of_a_trainer_reads_nothing_and_does_not_communicate(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(job_store, "from_rank_0", lambda name, value, timeout=None: asked.append(name) or value)
    saved, output = tmp_path / "step_00000001", tmp_path / "out"
    overrides = [f"resume={saved}", f"output_dir={output}", "benchmark=resnet", "scale=test", "device=cpu"]
    trainer = toy.trainer(overrides, cli.workload_class("resnet"))
    assert asked == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        trainer.train()


def test_the_constructor_of_an_evaluation_rank_does_not_communicate(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(job_store, "from_rank_0", lambda name, value, timeout=None: asked.append(name) or "1")
    ranks = ["scale.gpus_per_node=2", "evaluation.ranks=1"]
    overrides = [f"output_dir={tmp_path / 'out'}", "benchmark=resnet", "scale=test", "device=cpu", *ranks]
    run, session = cli.load(compose(overrides))
    EvaluationRank(cli.workload_class("resnet"), run, session, RankInfo(1, 2, 1, 2, 0, "torchrun"), torch.device("cpu"))
    assert asked == []


def test_a_run_resumes_only_with_the_base_weights_of_its_checkpoint(data_of, tmp_path, monkeypatch):
    def train(digest: str, *overrides: str) -> None:
        monkeypatch.setattr(Toy, "base_digest", lambda self: digest)
        train_one_epoch(data_of(toy.NAME), *overrides)

    with toy.known():
        train("the first", f"output_dir={tmp_path / 'first'}", "checkpoint_every=1", "keep_checkpoints=1")
        (saved,) = (tmp_path / "first" / "checkpoints").iterdir()
        train("the first", f"output_dir={tmp_path / 'again'}", f"resume={saved}")
        with pytest.raises(CheckpointError, match="made with the base weights the first, this run has the second"):
            train("the second", f"output_dir={tmp_path / 'other'}", f"resume={saved}")


def test_a_resumed_run_does_not_load_initial_weights(data_of, tmp_path, monkeypatch):
    begun = []

    def load_start(self: Toy) -> None:
        begun.append(self._optimizer is not None)  # it has state to load

    monkeypatch.setattr(Toy, "load_start", load_start)
    data = data_of(toy.NAME)
    with toy.known():
        train_one_epoch(data, f"output_dir={tmp_path / 'out'}", "checkpoint_every=1", "keep_checkpoints=1")
        assert begun == [True]
        (saved,) = (tmp_path / "out" / "checkpoints").iterdir()
        train_one_epoch(data, f"output_dir={tmp_path / 'again'}", f"resume={saved}")
    assert begun == [True]


class Reordering:
    """A source that reports the micro-batch after the next one as late."""

    resumed: list[list[int]] = []  # noqa: RUF012

    def __init__(self, source: DataSource) -> None:
        self.train_samples, self.eval_samples = source.train_samples, source.eval_samples
        self.synthetic, self.batches, self.close = source.synthetic, source.batches, source.close

    def late(self, taken: int) -> list[int]:
        return [taken + 1]

    def resume(self, late: list[int]) -> None:
        self.resumed.append(late)


def test_a_resumed_run_gives_the_source_what_was_late(data_of, tmp_path, monkeypatch):
    data, open_data = data_of(toy.NAME), Toy.open_data
    monkeypatch.setattr(Toy, "open_data", lambda self, root: Reordering(open_data(self, root)))
    monkeypatch.setattr(Reordering, "resumed", [])
    with toy.known():
        train_one_epoch(data, f"output_dir={tmp_path / 'out'}", "checkpoint_every=1", "keep_checkpoints=1")
        (saved,) = (tmp_path / "out" / "checkpoints").iterdir()
        assert Reordering.resumed == []
        train_one_epoch(data, f"output_dir={tmp_path / 'again'}", f"resume={saved}")
    assert saved.name == "step_00000016"
    assert Reordering.resumed == [[2 * 16 + 1]]  # the toy accumulates two micro-batches
