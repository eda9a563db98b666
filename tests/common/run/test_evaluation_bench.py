"""Test ``bench.only=evaluation``, which times an evaluation with prepared data or with synthetic samples."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common import cli
from common.config.composition import compose
from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.detection.evaluation import SyntheticPictures
from common.distributed import job_store
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError
from common.run import evaluation_bench
from common.run.evaluation_bench import EvaluationTiming, prepared_everywhere, time_evaluation
from tests.conftest import suite
from tests.stopped_clock import Clock

SAMPLES_OF_DATA, SAMPLES_OF_RECIPE = 60, 100


class ScriptedScorer(Scorer):
    """A scorer whose parts take the given seconds."""

    def __init__(self, clock: Clock, scoring: list[float]) -> None:
        self.clock, self.scoring, self.calls = clock, iter(scoring), list[Any]()

    def warm_up(self) -> None:
        self.clock.sleep(2)
        self.calls.append("warm up")

    def open_data(self, root: Path) -> None:
        self.clock.sleep(8)
        self.calls.append(root)

    def score(self, predictions: Predictions) -> dict[str, float]:
        self.clock.sleep(next(self.scoring))
        self.calls.append(predictions.values["weights"])
        return {"eval_samples": SAMPLES_OF_DATA}


class ScriptedEvaluation(Evaluation):
    """An evaluation whose parts take the given seconds."""

    def __init__(self, clock: Clock, predicting: list[float], scoring: list[float]) -> None:
        self.scorer: ScriptedScorer = ScriptedScorer(clock, scoring)
        self.clock, self.predicting, self.calls = clock, iter(predicting), list[Any]()

    def warm_up(self) -> None:
        self.clock.sleep(1)
        self.calls.append("warm up")

    def open_data(self, root: Path) -> None:
        self.clock.sleep(4)
        self.calls.append(root)

    def predict(self, weights: Weights) -> Predictions:
        self.clock.sleep(next(self.predicting))
        return Predictions({"weights": weights})

    def close(self) -> None:
        self.calls.append("closed")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(evaluation_bench, "time", clock)
    return clock


def timed(
    clock: Clock, prepared: ScriptedEvaluation | None, synthetic: ScriptedEvaluation | None, root: Path
) -> EvaluationTiming:
    """Three evaluations after the first one."""
    workload: Any = SimpleNamespace(
        layout=Layout(), weights=lambda: "weights", warm_up_reader=lambda: clock.sleep(16), title="scripted",
        evaluation=lambda layout: prepared, synthetic_evaluation=lambda layout: synthetic,
        cfg=SimpleNamespace(benchmark=SimpleNamespace(eval_samples=SAMPLES_OF_RECIPE)),
    )  # fmt: skip
    return time_evaluation(workload, root, prepared is not None, 3)


def test_the_first_evaluation_is_timed_apart_from_the_median_of_the_others(clock, tmp_path):
    evaluation = ScriptedEvaluation(clock, [30, 3, 9, 6], [0.5, 1, 4, 2])
    timing = timed(clock, evaluation, None, tmp_path)
    assert evaluation.calls == ["warm up", tmp_path, "closed"]
    assert evaluation.scorer.calls == ["warm up", tmp_path, *["weights"] * 4]
    assert (timing.warm_up, timing.opening, timing.first) == (16 + 1 + 2, 4 + 8, (30, 0.5))
    assert timing.repetitions == ((3, 1), (9, 4), (6, 2))
    assert (timing.predicting, timing.scoring, timing.throughput) == (6, 2, SAMPLES_OF_DATA / (6 + 2))
    assert timing.rows()["evaluation"] == "8.0000 s, 7.5 samples/s, 60 samples"
    assert timing.rows()["first evaluation"] == "30.0000 s predicting, 0.5000 s scoring"
    assert timing.rows()["evaluation: scoring"] == "2.0000 s (median of 3)"


def test_synthetic_samples_are_not_scored(clock, tmp_path):
    evaluation = ScriptedEvaluation(clock, [30, 3, 9, 6], [])
    timing = timed(clock, None, evaluation, tmp_path / "none")
    assert evaluation.calls == ["warm up", tmp_path / "none", "closed"]
    assert evaluation.scorer.calls == []
    assert (timing.warm_up, timing.opening, timing.predicting, timing.scoring) == (1, None, 6, None)
    assert (timing.report()["first"], timing.report()["repetitions"]) == ((30,), [(3,), (9,), (6,)])
    assert timing.rows()["evaluation"] == "6.0000 s, 16.7 samples/s, 100 synthetic samples"
    assert timing.rows()["first evaluation"] == "30.0000 s predicting"
    assert timing.rows()["evaluation: scoring"].startswith("not measured: ")


def test_an_evaluation_that_fails_is_closed(clock, tmp_path):
    evaluation = ScriptedEvaluation(clock, [30], [0.5])
    with pytest.raises(StopIteration):
        timed(clock, evaluation, None, tmp_path)
    assert evaluation.calls[-1] == "closed"


def command(benchmark: str, data_dir: Path, *more: str) -> list[str]:
    return [
        "bench", f"benchmark={benchmark}", "scale=test", "device=cpu", "bench.only=evaluation", f"data_dir={data_dir}",
        *more,
    ]  # fmt: skip


def test_prepared_data_are_evaluated_and_scored(data_of, tmp_path, capsys):
    report = tmp_path / "report.json"
    words = command("bert", data_of("bert"), "bench.repetitions=3", f"bench.report={report}")
    assert cli.run(words) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^evaluation: scoring +[\d.]+ s \(median of 3\)$", printed, re.MULTILINE)
    assert re.search(r"^evaluation +[\d.]+ s, [\d.,]+ samples/s, 60 samples$", printed, re.MULTILINE)
    assert not re.search(r"^(step|run|CUDA graphs)", printed, re.MULTILINE)
    figures = json.loads(report.read_text())
    found = figures["evaluation"]
    assert figures["benchmark"] == "bert"
    assert "step_ms" not in figures
    assert (found["samples"], found["ranks"], found["synthetic"], len(found["repetitions"])) == (60, 1, False, 3)
    for index, name in enumerate(("predicting", "scoring")):
        assert found[name] == statistics.median(times[index] for times in found["repetitions"]) > 0
    assert found["samples_per_second"] == pytest.approx(60 / (found["predicting"] + found["scoring"]))


def test_a_folder_that_only_some_ranks_see_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(job_store, "from_all_ranks", lambda name, value: [value, str(False)])
    assert not prepared_everywhere(tmp_path / "none")
    with pytest.raises(DataError, match="exists on some ranks only"):
        prepared_everywhere(tmp_path)


def test_missing_data_are_one_message_where_there_are_no_synthetic_samples(tmp_path, capsys):
    assert cli.run(command("bert", tmp_path / "none")) == ConfigError.exit_code
    printed = capsys.readouterr().err
    assert f"bench.only=evaluation: there are no prepared data in {tmp_path / 'none'}" in printed
    assert len(printed.splitlines()) == 1


@pytest.mark.parametrize(
    ("benchmark", "samples"),
    [("maskrcnn", 3), ("retinanet", 3), ("ssd300", 3), ("stable_diffusion", 3), ("unet3d", 1)],
)
def test_every_synthetic_sample_is_evaluated_once(benchmark, samples):
    words = [f"benchmark={benchmark}", "scale=test", "device=cpu", f"benchmark.eval_samples={samples}"]
    run, _ = cli.load(compose(words))
    workload = cli.workload_class(benchmark)(run, Layout(run.layout, seed=1))
    evaluation = workload.synthetic_evaluation(workload.layout)
    evaluation.warm_up()
    evaluation.open_data(Path("none"))
    predictions = evaluation.predict(workload.weights())
    evaluation.close()
    values = predictions.values
    if benchmark == "stable_diffusion":
        assert values["pictures"] == samples
    elif benchmark == "unet3d":
        # the scorer checks that each voxel counts once
        assert evaluation.scorer.score(predictions)["eval_samples"] == samples
    else:
        assert sorted(values["pictures"]) == list(range(samples))
        assert len(values["score"]) > 0


def test_ranks_share_synthetic_pictures_and_the_last_batches_are_filled():
    batches = {key: {"picture": torch.full((3,), -1)} for key in ("landscape", "portrait")}
    shares = [list(SyntheticPictures(batches, 10, Layout({"dp": 2}, rank))) for rank in range(2)]
    ids = [[host.tensors["picture"].tolist() for host in share] for share in shares]
    assert ids == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, -1, -1]]]
    assert [host.key for host in shares[0]] == ["landscape", "portrait"]


def measured_by_ranks(report: Path, benchmark: str, data_dir: Path, *more: str) -> dict[str, Any]:
    """The report of two ranks, only one of which prints."""
    words = command(benchmark, data_dir, "scale.gpus_per_node=2", f"bench.report={report}", *more)
    done = suite(*words)
    assert done.code == 0, done.errors
    assert len(re.findall(r"^evaluation: predicting ", done.output, re.MULTILINE)) == 1
    found: dict[str, Any] = json.loads(report.read_text())["evaluation"]
    return found


def test_two_ranks_share_prepared_data(data_of, tmp_path):
    found = measured_by_ranks(tmp_path / "report.json", "bert", data_of("bert"))
    assert (found["samples"], found["ranks"], found["synthetic"]) == (60, 2, False)
    assert found["scoring"] > 0


def test_evaluation_ranks_evaluate_synthetic_samples(tmp_path):
    more = ["evaluation.ranks=1", "benchmark.eval_samples=5"]
    found = measured_by_ranks(tmp_path / "report.json", "ssd300", tmp_path / "none", *more)
    assert (found["samples"], found["ranks"], found["synthetic"]) == (5, 1, True)


def test_training_beside_evaluation_ranks_is_timed_with_transfers_of_the_weights(data_of, tmp_path) -> None:
    report = tmp_path / "report.json"
    few = ["bench.steps=4", "bench.warmup_steps=0", "scale.gpus_per_node=2", "evaluation.ranks=1"]
    data = f"data_dir={data_of('bert')}"
    overrides = ["benchmark=bert", "scale=test", "device=cpu", "bench.only=run", data, f"bench.report={report}", *few]
    done = suite("bench", *overrides)
    assert done.code == 0, done.errors
    run = json.loads(report.read_text())["run"]
    beside = run["beside_evaluation"]
    assert (run["eval_samples"], run["evaluation_seconds"] > 0) == (SAMPLES_OF_DATA, True)
    assert (beside["step_ms"] > 0, beside["every"] >= 1) == (True, True)
    assert f"{beside['sent_bytes'] / 1e6:,.1f} MB of weights sent every {beside['every']} steps" in done.output
