"""Building what runs on a rank, a trainer or an evaluation rank, before anything of the run happens."""

from __future__ import annotations

import pytest
import torch

from common import cli
from common.config.composition import compose
from common.distributed import job_store
from common.distributed.rank_info import RankInfo
from common.errors import CheckpointError
from common.run.evaluation_rank import EvaluationRank
from common.run.trainer import Trainer
from tests import toy
from tests.toy.workload import CosmoFlow


def test_a_checkpoint_of_another_schedule_is_another_run_s_unless_only_the_end_is_another(tmp_path):
    def settings(*overrides: str) -> dict[str, object]:
        fixed = ["benchmark=resnet", "scale=test", "device=cpu", f"output_dir={tmp_path / 'out'}"]
        run, session = cli.load(compose([*fixed, *overrides]))
        alone = RankInfo(0, 1, 0, 1, 0, "single")
        return Trainer(cli.workload_class("resnet"), run, session, alone, torch.device("cpu")).settings

    assert settings("benchmark.schedule.last_epoch=7") == settings()
    changed = settings("benchmark.schedule.interval=2")
    assert [name for name, value in settings().items() if changed[name] != value] == ["benchmark.schedule"]


def test_a_trainer_reads_no_checkpoint_and_asks_no_rank_before_it_trains(tmp_path, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(job_store, "from_rank_0", lambda name, value, timeout=None: asked.append(name) or value)
    place, output = tmp_path / "step_00000001", tmp_path / "out"
    overrides = [f"resume={place}", f"output_dir={output}", "benchmark=resnet", "scale=test", "device=cpu"]
    run, session = cli.load(compose(overrides))
    alone = RankInfo(0, 1, 0, 1, 0, "single")
    trainer = Trainer(cli.workload_class("resnet"), run, session, alone, torch.device("cpu"))
    assert asked == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        trainer.train()


def test_an_evaluation_rank_asks_no_rank_before_it_evaluates(tmp_path, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(job_store, "from_rank_0", lambda name, value, timeout=None: asked.append(name) or "1")
    ranks = ["scale.gpus_per_node=2", "evaluation.ranks=1"]
    overrides = [f"output_dir={tmp_path / 'out'}", "benchmark=resnet", "scale=test", "device=cpu", *ranks]
    run, session = cli.load(compose(overrides))
    EvaluationRank(cli.workload_class("resnet"), run, session, RankInfo(1, 2, 1, 2, 0, "torchrun"), torch.device("cpu"))
    assert asked == []


def test_a_run_goes_on_above_the_base_that_its_checkpoint_was_made_with_alone(data_of, tmp_path, monkeypatch):
    def train(digest: str, *overrides: str) -> None:
        monkeypatch.setattr(CosmoFlow, "base_digest", lambda self: digest)
        fixed = [f"benchmark={toy.NAME}", "scale=test", "device=cpu", "seed=1", f"data_dir={data_of(toy.NAME)}"]
        run, session = cli.load(compose([*fixed, "benchmark.schedule.last_epoch=1", *overrides]))
        Trainer(CosmoFlow, run, session, RankInfo(0, 1, 0, 1, 0, "single"), torch.device("cpu")).train()

    with toy.known():
        train("the first", f"output_dir={tmp_path / 'first'}", "checkpoint_every=1", "keep_checkpoints=1")
        (place,) = (tmp_path / "first" / "checkpoints").iterdir()
        train("the first", f"output_dir={tmp_path / 'again'}", f"resume={place}")
        with pytest.raises(CheckpointError, match="made with the base weights the first, this run has the second"):
            train("the second", f"output_dir={tmp_path / 'other'}", f"resume={place}")


def test_a_run_that_resumes_does_not_begin_as_a_new_one_does(data_of, tmp_path, monkeypatch):
    begun: list[bool] = []

    def load_start(self: CosmoFlow) -> None:
        begun.append(self._optimizer is not None)  # it has state to load

    monkeypatch.setattr(CosmoFlow, "load_start", load_start)
    fixed = [f"benchmark={toy.NAME}", "scale=test", "device=cpu", "seed=1", f"data_dir={data_of(toy.NAME)}"]

    def train(*overrides: str) -> None:
        run, session = cli.load(compose([*fixed, "benchmark.schedule.last_epoch=1", *overrides]))
        Trainer(CosmoFlow, run, session, RankInfo(0, 1, 0, 1, 0, "single"), torch.device("cpu")).train()

    with toy.known():
        train(f"output_dir={tmp_path / 'out'}", "checkpoint_every=1", "keep_checkpoints=1")
        assert begun == [True]
        (place,) = (tmp_path / "out" / "checkpoints").iterdir()
        train(f"output_dir={tmp_path / 'again'}", f"resume={place}")
    assert begun == [True]
