"""Trainer and EvaluationRank: what their constructors do, and how a run begins."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from common import cli
from common.config.composition import compose
from common.contract.evaluation import Predictions, Weights
from common.data.batches import Block, DataSource, HostBatch
from common.distributed import job_store
from common.distributed.rank_info import RankInfo
from common.errors import CheckpointError
from common.mlperf.schedules import SCHEDULES, Schedule, every_generation
from common.run.evaluation_rank import EvaluationRank
from tests import command_line, toy
from tests.toy.evaluate import MeanAbsoluteError
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


class Playing:
    """A source of generations: the second one has more steps than the others, and each one is trained on two."""

    steps = (2, 3, 2)
    seen: list[object] = []  # noqa: RUF012

    def __init__(self, source: DataSource) -> None:
        self.train_samples, self.eval_samples = source.train_samples, source.eval_samples
        self.synthetic, self.close, self._source = source.synthetic, source.close, source

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        self.seen.append(("read", block.index, start))
        epoch = Block(0, 1, 1, 0, self.train_samples)
        for batch in itertools.islice(self._source.batches(epoch), 2 * self.steps[block.index]):
            yield replace(batch, samples=8)

    def watch(self, progress: Callable[[], None], stopping: Callable[[], bool]) -> None:
        progress()

    def trained(self, block: Block, weights: Mapping[str, Tensor]) -> None:
        self.seen.append(("trained", block.index, sum(tensor.sum().item() for tensor in weights.values())))

    def games(self, block: Block) -> list[int]:
        return [10 + block.index, 11 + block.index]

    def measures(self) -> dict[str, float | str]:
        return {"games_per_second": 2.5, "bound": "search"}


def test_generations_end_when_their_source_ends_and_their_weights_are_saved_before_the_next(
    data_of, tmp_path, monkeypatch
):
    data, open_data, scored = data_of(toy.NAME), Toy.open_data, []
    monkeypatch.setattr(Toy, "open_data", lambda self, root: Playing(open_data(self, root)))
    monkeypatch.setattr(Playing, "seen", [])
    predict = MeanAbsoluteError.predict

    def noted(self: MeanAbsoluteError, weights: Weights) -> Predictions:
        scored.append(sum(tensor.sum().item() for tensor in weights.tensors.values()))
        return predict(self, weights)

    monkeypatch.setattr(MeanAbsoluteError, "predict", noted)
    fixed = [f"benchmark={toy.NAME}", "scale=test", "device=cpu", "seed=1", f"data_dir={data}"]
    last = "benchmark.schedule.last_epoch=3"
    target = "benchmark.targets.mean_absolute_error.value=0.0"

    def generations(global_batch: int, last_epoch: int) -> Schedule:
        return every_generation(global_batch, last_epoch)

    with toy.known(), mock.patch.dict(SCHEDULES, {toy.NAME: generations}):
        outcome = toy.trainer([*fixed, last, target, f"output_dir={tmp_path / 'out'}"], Toy).train()
    assert outcome.steps == 7
    assert outcome.samples == 7 * 16  # the toy accumulates two micro-batches
    events = [event[:2] for event in Playing.seen]
    assert events == [(kind, number) for number in range(3) for kind in ("read", "trained")]
    saved = [event[2] for event in Playing.seen if event[0] == "trained"]
    assert len(set(saved)) == 3
    assert [value for value in scored if value in saved] == saved
    lines = command_line.logged(tmp_path / "out" / "mlperf.log")
    steps = ("epoch_start", "epoch_stop", "eval_start", "eval_stop")
    spans = [(line["key"], line["metadata"]["epoch_num"]) for line in lines if line["key"] in steps]
    assert spans == [(key, number) for number in (1, 2, 3) for key in steps]
    games = [line for line in lines if line["key"] == "actual_selfplay_games_per_generation"]
    assert [(line["value"], line["metadata"]["epoch_num"]) for line in games] == [
        (10, 1), (11, 1), (11, 2), (12, 2), (12, 3), (13, 3),
    ]  # fmt: skip
    (stop,) = [line for line in lines if line["key"] == "run_stop"]
    assert stop["metadata"] == {**stop["metadata"], "status": "aborted", "epoch_num": 3}
    measured = [json.loads(line) for line in (tmp_path / "out" / "self_play_rank0.jsonl").read_text().splitlines()]
    assert [line.pop("time") > 0 for line in measured] == [True] * 3
    assert measured == [{"generation": number, "games_per_second": 2.5, "bound": "search"} for number in (1, 2, 3)]
