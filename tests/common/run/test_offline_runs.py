"""Whole runs with offline scoring: every way of scoring has the same result, and nothing is scored twice or lost."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common import cli
from common.config.composition import compose
from common.config.override import override
from common.contract.evaluation import Predictions
from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError, Interrupted
from common.evaluation import checkpoint_writer
from common.evaluation.checkpoint_queue import CheckpointQueue
from common.evaluation.checkpoint_writer import CheckpointWriter
from common.mlperf.parsed_log import read_log
from common.mlperf.rcp import convergence_of
from common.mlperf.rules import rules_for
from common.mlperf.verdict import judge
from common.run import checkpoint as run_checkpoint
from common.run.score_run import configuration
from common.run.trainer import Trainer
from tests import toy
from tests.command_line import finish, logged, official_exit_code, ranked, started, the_message, training
from tests.conftest import SECONDS, Finished, checkpoint
from tests.toy.evaluate import MeanAbsoluteError
from tests.toy.pictures import Pictures, TwoMetrics

CHECKPOINT_ERROR, NOT_CONVERGED = 4, 10
INTERVAL = 64


@dataclass(frozen=True)
class Decision:
    """Result of scoring in a run's log: the metrics of each checkpoint, and the end."""

    scores: dict[tuple[int, str], float]
    status: str
    samples: int


def trained(data: Path, output: Path, *overrides: str, ranks: int = 1) -> Finished:
    """A run of the toy that is scored offline, ended."""
    arguments = training(data, output, *overrides, benchmark=toy.PICTURES)
    return _ended(arguments if ranks == 1 else [*arguments, f"scale.gpus_per_node={ranks}"], ranks)


def scored(output: Path, *overrides: str, ranks: int = 1) -> Finished:
    """``mlperf-suite score`` on the run in ``output``, ended."""
    return _ended(["score", str(output), *overrides, f"scale.gpus_per_node={ranks}"], ranks)


def _ended(arguments: list[str], ranks: int) -> Finished:
    alone = [sys.executable, "-m", "tests.toy"]
    with started(arguments, command=alone if ranks == 1 else ranked("tests.toy", ranks)) as process:
        return finish(process, SECONDS)


def decision(log: Path) -> Decision:
    """The result in a log; fails if ``run_stop`` does not have the time of its checkpoint."""
    scores = logged(log, "eval_accuracy")
    found = {(each["metadata"]["samples_count"], each["metadata"]["metric"]): each["value"] for each in scores}
    assert len(found) == len(scores), "scored twice"
    (stop,) = logged(log, "run_stop")
    samples = stop["metadata"]["samples_count"]
    assert stop["time_ms"] == timestamps(log.parent)[samples]
    assert stop == logged(log)[-1]
    return Decision(found, stop["metadata"]["status"], samples)


def timestamps(output: Path) -> dict[int, int]:
    """Samples to the time in the name of each checkpoint."""
    name = re.compile(r"weights--timestamp=(\d+)-step=(\d+)-consumed_samples=(\d+)\.safetensors")
    found = [name.fullmatch(path.name) for path in (output / "offline").glob("weights*")]
    assert all(found)
    assert all(int(each[3]) == 16 * int(each[2]) for each in found if each)
    return {int(each[3]): int(each[1]) for each in found if each}


def records(output: Path, file: str) -> list[dict]:
    """The JSON lines of a file of the queue."""
    return [json.loads(line) for line in (output / "offline" / file).read_text().splitlines()]


@pytest.fixture(scope="module")
def data(data_of: Callable[[str], Path]) -> Path:
    return data_of(toy.NAME)


@pytest.fixture(scope="module")
def unscored(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with eight unscored checkpoints; a test works on a copy."""
    output = tmp_path_factory.mktemp("unscored") / "out"
    ended = trained(data, output, "evaluation.by_command=true")
    assert ended.code == 0, ended.errors
    assert f"mlperf-suite score {output}" in ended.output
    assert logged(output / "mlperf.log", "eval_accuracy", "eval_start", "run_stop") == []
    assert list(timestamps(output))
    assert not list((output / "offline").glob(".*"))
    return output


@pytest.fixture
def copy(unscored: Path, tmp_path: Path) -> Path:
    return shutil.copytree(unscored, tmp_path / "copy")


@pytest.fixture(scope="module")
def after(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose own rank scores the checkpoints after training."""
    output = tmp_path_factory.mktemp("after") / "out"
    ended = trained(data, output)
    assert ended.code == 0, ended.errors
    return output


def test_scoring_ends_with_the_first_checkpoint_that_meets_both_targets(after):
    found = decision(after / "mlperf.log")
    assert found.status == "success"
    passing = [
        samples
        for samples in sorted(timestamps(after))
        if found.scores.get((samples, "FID"), 1e9) <= 90 and found.scores[samples, "CLIP"] >= 0.15
    ]
    assert found.samples == passing[0]
    assert sorted({samples for samples, _ in found.scores}) == list(range(INTERVAL, found.samples + 1, INTERVAL))
    assert found.samples < 8 * INTERVAL, "a run that passes at its last checkpoint shows nothing"
    assert [record["samples"] for record in map(json.loads, (after / "evaluations.jsonl").open())] == [
        INTERVAL * number for number in range(1, found.samples // INTERVAL + 1)
    ]


@pytest.mark.parametrize(
    "scoring", ["during training", "after training on two ranks", "by the command", "by the command on two ranks"]
)
def test_every_way_of_scoring_has_the_same_result(scoring, after, copy, data, tmp_path):
    output = copy
    if scoring == "during training":  # which continues until the passing checkpoint is known
        output = tmp_path / "during"
        ended = trained(data, output, "evaluation.ranks=1", "benchmark.schedule.last_samples=100000000", ranks=2)
    elif scoring == "after training on two ranks":
        output = tmp_path / "after"
        ended = trained(data, output, ranks=2)
    else:
        ended = scored(output, ranks=2 if "two" in scoring else 1)
    assert ended.code == 0, ended.errors
    expected, found = decision(after / "mlperf.log"), decision(output / "mlperf.log")
    assert (found.status, found.samples) == (expected.status, expected.samples)
    assert found.scores.keys() == expected.scores.keys()
    for key, value in found.scores.items():  # two ranks sum in another order
        assert value == pytest.approx(expected.scores[key], rel=1e-6)
    verdict = judge(output / "mlperf.log")
    assert verdict.kind == "format", verdict.reasons
    assert "Traceback" not in ended.errors
    assert not list((output / "offline").glob(".*"))


@pytest.mark.parametrize("ruleset", ["3.1.0", "4.1.0", "5.0.0"])
def test_the_checkers_accept_the_log(ruleset, after, data, tmp_path):
    output = after
    if ruleset == "3.1.0":  # counts steps
        output = tmp_path / "out"
        ended = trained(data, output, f"ruleset={ruleset}")
        assert ended.code == 0, ended.errors
    log = output / "mlperf.log"
    assert official_exit_code(log, ruleset) == 0
    rules = rules_for("stable_diffusion", ruleset)
    (stop,) = logged(log, "run_stop")
    assert convergence_of(read_log(log), rules) == stop["metadata"][rules.progress_key]


def test_the_log_with_sizes_of_real_data_is_valid(after, tmp_path):
    text = (after / "mlperf.log").read_text()
    real = {'"stand-in"': '"laion-400m"', '"cache_clear", "value": false': '"cache_clear", "value": true'}
    real |= {'"train_samples", "value": 256': '"train_samples", "value": 6513144'}
    real |= {'"eval_samples", "value": 60': '"eval_samples", "value": 30000'}
    for found, wanted in real.items():
        assert found in text
        text = text.replace(found, wanted)
    log = tmp_path / "result_0.txt"
    log.write_text(text)
    verdict = judge(log)
    assert verdict.kind == "valid run", verdict.reasons
    (stop,), (start,) = logged(log, "run_stop"), logged(log, "run_start")
    assert verdict.minutes == pytest.approx((stop["time_ms"] - start["time_ms"]) / 60_000)


def test_a_killed_command_continues_and_scores_no_checkpoint_twice(after, copy):
    first = scored(copy)
    assert first.code == 0, first.errors
    whole, log = (copy / "offline" / "scores.jsonl").read_text(), (copy / "mlperf.log").read_text()
    kept = whole.splitlines(keepends=True)[:2]
    (copy / "offline" / "scores.jsonl").write_text("".join(kept) + '{"number": 3, "file": "weig')
    open_log = [line for line in log.splitlines(keepends=True) if '"run_stop"' not in line and '"eval_' not in line]
    (copy / "mlperf.log").write_text("".join(open_log))
    again = scored(copy)
    assert again.code == 0, again.errors
    assert (copy / "offline" / "scores.jsonl").read_text().splitlines(keepends=True)[:2] == kept
    assert [each["number"] for each in records(copy, "scores.jsonl")] == list(range(1, len(whole.splitlines()) + 1))
    assert decision(copy / "mlperf.log") == decision(after / "mlperf.log")
    done = (copy / "mlperf.log").read_text()
    assert scored(copy).code == 0
    assert (copy / "mlperf.log").read_text() == done


def test_scoring_begins_with_evaluation_first_and_includes_the_checkpoint_before(after, copy):
    expected = decision(after / "mlperf.log")
    passing = expected.samples // INTERVAL
    ended = scored(copy, f"evaluation.first={passing}")
    assert ended.code == 0, ended.errors
    found = decision(copy / "mlperf.log")
    assert [each["number"] for each in records(copy, "scores.jsonl")] == [passing, passing - 1]
    assert found.samples == expected.samples
    every = scored(copy, f"evaluation.first={passing}", "evaluation.all=true")
    assert every.code == 0, every.errors
    assert decision(copy / "mlperf.log").scores == expected.scores
    assert sorted(each["number"] for each in records(copy, "scores.jsonl")) == list(range(1, passing + 1))


def test_a_missing_checkpoint_is_one_error(copy):
    (gone,) = (copy / "offline").glob("weights*consumed_samples=128.safetensors")
    gone.unlink()
    before = (copy / "mlperf.log").read_text()
    ended = scored(copy)
    assert ended.code == CHECKPOINT_ERROR
    message = ended.errors.splitlines()[-1]
    assert f"{gone} is gone, and was not scored" in message
    assert "Traceback" not in ended.errors
    assert (copy / "mlperf.log").read_text() == before


def test_a_run_that_misses_its_targets_ends_with_its_last_checkpoint(data, tmp_path):
    ended = trained(
        data, tmp_path / "out", "benchmark.targets.FID.value=1", "evaluation.first=99", "evaluation.buffers=1"
    )
    assert ended.code == NOT_CONVERGED, ended.errors
    found = decision(tmp_path / "out" / "mlperf.log")
    assert (found.status, found.samples) == ("aborted", 8 * INTERVAL)
    assert {samples for samples, _ in found.scores} == {7 * INTERVAL, 8 * INTERVAL}


def test_a_resumed_run_continues_the_queue(data, after, tmp_path):
    output = tmp_path / "out"
    first = trained(
        data, output, "benchmark.schedule.last_samples=192", "checkpoint_every=6", "evaluation.by_command=true"
    )
    assert first.code == 0, first.errors
    assert checkpoint(output, 6)["progress"]["step"] == 6
    before = timestamps(output)
    resumed = trained(data, output, f"resume={output / 'checkpoints' / 'step_00000006'}")
    assert resumed.code == 0, resumed.errors
    now = timestamps(output)
    assert sorted(now) == [INTERVAL * number for number in range(1, 9)]
    assert now[64] == before[64]
    assert now[128] > before[192], "checkpoints after the position are written again"
    log = output / "mlperf_resumed_at_6.log"
    assert decision(log) == decision(after / "mlperf.log")


def test_a_second_run_refuses_the_checkpoints_of_the_first(data, copy):
    (copy / "mlperf.log").unlink()
    ended = trained(data, copy)
    assert ended.code == 2
    assert "has the checkpoints of another run" in the_message(ended)


def test_a_run_whose_training_has_not_ended_is_not_judged(copy):
    queue = copy / "offline" / "checkpoints.jsonl"
    queue.write_text("".join(queue.read_text().splitlines(keepends=True)[:-1]))
    ended = scored(copy)
    assert ended.code == CHECKPOINT_ERROR
    assert "the training of this run has not ended" in the_message(ended)


def trainer_of(data: Path, output: Path, workload: type[Pictures], *overrides: str) -> Trainer:
    """A run of the toy in this process."""
    with toy.known():
        return toy.trainer(training(data, output, *overrides, benchmark=toy.PICTURES)[1:], workload)


def test_a_full_disk_ends_the_run_as_aborted(data, tmp_path, monkeypatch):
    write, files = checkpoint_writer.write_tensors, []

    def second_fails(*arguments: Any) -> None:
        files.append(arguments)
        if len(files) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", second_fails)
    with pytest.raises(CheckpointError, match=r"was not written to .*: No space left on device"):
        trainer_of(data, tmp_path / "out", Pictures).train()
    (stop,) = logged(tmp_path / "out" / "mlperf.log", "run_stop")
    assert stop["metadata"]["status"] == "aborted"
    assert len(timestamps(tmp_path / "out")) <= 1


def test_evaluation_checkpoints_are_on_the_disk_before_a_checkpoint_to_resume_from(data, tmp_path, monkeypatch):
    """Otherwise, a run that is killed after the checkpoint would lose weights that are not yet on the disk."""
    output, asked, there = tmp_path / "out", threading.Event(), []
    write, collect, save = checkpoint_writer.write_tensors, CheckpointWriter.collect, run_checkpoint.save

    def slow(*arguments: Any) -> None:  # until the trainer waits for it
        assert asked.wait(SECONDS)
        write(*arguments)

    def waiting(writer: CheckpointWriter, wait: bool = False) -> list[Path]:
        if wait:
            asked.set()
        return collect(writer, wait)

    def saved(folder: Path, progress: run_checkpoint.Progress, *arguments: Any, **named: Any) -> Path:
        there.append((progress.step, [each["point"]["step"] for each in records(output, "checkpoints.jsonl")]))
        return save(folder, progress, *arguments, **named)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", slow)
    monkeypatch.setattr(CheckpointWriter, "collect", waiting)
    monkeypatch.setattr(run_checkpoint, "save", saved)
    trainer_of(data, output, Pictures, "checkpoint_every=5", "benchmark.schedule.last_samples=128").train()
    assert there == [(5, [4])]


class SignalledScorer(TwoMetrics):
    """Raises SIGTERM with the second score."""

    def __init__(self) -> None:
        super().__init__()
        self.scored = 0

    def score(self, predictions: Predictions) -> dict[str, float]:
        self.scored += 1
        if self.scored == 2:
            signal.raise_signal(signal.SIGTERM)
        return super().score(predictions)


class Signalled(Pictures):
    """The toy, which is asked to stop while its checkpoints are scored."""

    def evaluation(self, layout: Layout) -> MeanAbsoluteError:
        made = super().evaluation(layout)
        made.scorer = SignalledScorer()
        return made


def test_a_signal_between_two_checkpoints_leaves_a_run_that_the_command_completes(data, after, tmp_path):
    output = tmp_path / "out"
    with pytest.raises(Interrupted, match="mlperf-suite score goes on"):
        trainer_of(data, output, Signalled).train()
    assert [each["number"] for each in records(output, "scores.jsonl")] == [1, 2]
    assert logged(output / "mlperf.log", "run_stop") == []
    ended = scored(output)
    assert ended.code == 0, ended.errors
    assert decision(output / "mlperf.log") == decision(after / "mlperf.log")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["nowhere"], CheckpointError, "nowhere: no run whose checkpoints are scored offline"),
        (["a", "b"], ConfigError, "name the folder of one run, these are 2"),
        (["RUN", "hparams.base_learning_rate=1"], ConfigError, "cannot differ from the training run"),
        (["RUN", "evaluation.ranks=1"], ConfigError, "evaluation.ranks=1: all ranks score here, and none trains"),
        (["RUN", "layout.dp.x=1"], ConfigError, "layout.dp.x: unknown configuration key"),
    ],
)
def test_a_wrong_command_line_is_an_error(arguments, error, message, unscored):
    with pytest.raises(error, match=re.escape(message)):
        configuration([str(unscored) if argument == "RUN" else argument for argument in arguments])


def test_a_run_of_an_earlier_version_is_refused_by_name(unscored, tmp_path):
    run = shutil.copytree(unscored, tmp_path / "run", symlinks=True)
    described = run / "offline" / "run.json"
    described.write_text(described.read_text().replace('"synthetic": ', '"stand_in": '))
    with pytest.raises(
        ConfigError, match=r"of an earlier version of the suite \(stand_in is synthetic now\); score it with"
    ):
        configuration([str(run)])


def test_scoring_has_the_settings_of_the_run_and_the_overrides(unscored):
    tree, arguments = configuration([str(unscored), "data_dir=/elsewhere", "evaluation.all=true"])
    assert tree["data_dir"] == "/elsewhere"
    assert tree["evaluation"]["all"] is True
    assert (tree["evaluation"]["ranks"], tree["evaluation"]["by_command"]) == (0, False)
    assert tree["seed"] == 1234
    assert arguments == [str(unscored), "data_dir=/elsewhere", "evaluation.all=true", f"output_dir={unscored}"]


@pytest.mark.parametrize(("scale", "ranks"), [("8xH100", 4), ("256xA100", 32), ("1792xA100", 64)])
def test_as_many_ranks_score_as_trained(scale, ranks, tmp_path):
    described = {"configuration": compose(["benchmark=minigo", f"scale={scale}", "device=cpu"]), "seed": 1}
    CheckpointQueue(tmp_path, lambda values: False, 1).begin(None, described)
    tree, _ = configuration([str(tmp_path)])
    run, _ = cli.load(tree)
    assert run.scale.nodes * run.scale.gpus_per_node == run.layout["dp"] == ranks
    assert not any(run.other_ranks.values())


def test_folders_to_score_may_have_any_name(unscored, tmp_path):
    run, data = tmp_path / "jürgen's (runs) = a", "/data/jürgen's, #1: ${x}"
    run.symlink_to(unscored)
    tree, arguments = configuration([str(run), override("data_dir", data)])
    assert (tree["data_dir"], tree["output_dir"]) == (data, str(run))
    assert arguments == [str(run), override("data_dir", data), override("output_dir", run)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation.scoring=inline", "evaluation.first=2"], "evaluation.first=2: is for scoring=offline"),
        (["evaluation.scoring=background", "evaluation.all=true"], "evaluation.all=True: is for scoring=offline"),
        (["evaluation.ranks=1", "evaluation.by_command=true", "scale.gpus_per_node=2"], "would have nothing to do"),
        (["benchmark=toy", "evaluation.scoring=offline"], "count the evaluation of toy in a run's time"),
    ],
)
def test_contradictory_settings_are_refused(overrides, message):
    with toy.known(), pytest.raises(ConfigError, match=re.escape(message)):
        cli.admitted(compose([f"benchmark={toy.PICTURES}", "scale=test", *overrides]))
