"""Which checkpoint is scored next, and what the files of a queue survive."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from common.contract.evaluation import Point
from common.errors import CheckpointError, ConfigError
from common.evaluation.checkpoint_queue import Checkpoint, CheckpointQueue, CheckpointScore, next_to_score

FIVE = range(1, 6)


@pytest.mark.parametrize(
    ("known", "passed", "first", "complete", "expected"),
    [
        pytest.param([], {}, 1, False, None, id="nothing is there yet"),
        pytest.param([1, 2], {}, 1, False, 1, id="in ascending order"),
        pytest.param([1, 2], {1: False}, 1, False, 2, id="the next one"),
        pytest.param([1, 2], {1: False, 2: False}, 1, False, None, id="the next one has yet to come"),
        pytest.param([1, 2], {1: False, 2: False}, 1, True, None, id="none comes any more"),
        pytest.param([1, 2], {}, 3, False, None, id="the first one to score has yet to come"),
        pytest.param([1, 2, 3, 4], {}, 3, False, 3, id="from the configured one on"),
        pytest.param(FIVE, {3: False, 4: True}, 3, False, None, id="the one before was scored"),
        pytest.param(FIVE, {3: True}, 3, False, 2, id="the one before was left out"),
        pytest.param(FIVE, {3: True, 2: True}, 3, False, 1, id="the one before passes too"),
        pytest.param(FIVE, {3: True, 2: True, 1: True}, 3, False, None, id="the very first passes"),
        pytest.param(FIVE, {3: True, 2: False}, 3, True, None, id="the one before fails"),
        pytest.param(FIVE, {1: True}, 1, False, None, id="there is none before"),
        pytest.param(FIVE, {4: True, 3: False}, 1, True, 1, id="all are wanted after all"),
        pytest.param(FIVE, {}, 9, True, 4, id="fewer than the first to score: the last two"),
        pytest.param(FIVE, {4: False}, 9, True, 5, id="fewer than the first to score: the last"),
        pytest.param([3, 4], {4: True}, 4, True, 3, id="what an earlier run had is elsewhere"),
        pytest.param([3, 4], {4: True, 3: True}, 4, True, None, id="and nothing before it is known"),
    ],
)
def test_the_next_checkpoint(known, passed, first, complete, expected):
    assert next_to_score(list(known), passed, first, complete) == expected


def reached(values: Mapping[str, float]) -> bool:
    return values["FID"] <= 90


def queue_in(folder: Path, first: int = 1) -> CheckpointQueue:
    return CheckpointQueue(folder, reached, first)


def add(queue: CheckpointQueue, number: int) -> Checkpoint:
    point = Point(number, 64 * number, 4 * number, 64 * number, 64 * number, 1000 * number)
    partial = queue.folder / f".weights_{number}.partial"
    partial.write_bytes(b"weights")
    queue.add(Checkpoint.of(point), partial)
    return Checkpoint.of(point)


def score(queue: CheckpointQueue, number: int, fid: float) -> None:
    queue.note(number, CheckpointScore(queue.checkpoints[number].file, {"FID": fid}, 5000, 6000, 1.0))


def test_the_name_of_a_file_has_time_step_and_samples_of_its_last_update(tmp_path):
    queue = queue_in(tmp_path)
    queue.begin(None, {})
    add(queue, 2)
    (found,) = queue.folder.glob("weights*")
    assert found.name == "weights--timestamp=2000-step=8-consumed_samples=128.safetensors"


def test_another_process_reads_the_added_checkpoints(tmp_path):
    queue = queue_in(tmp_path)
    queue.begin(None, {"seed": 7})
    added = [add(queue, number) for number in (1, 2)]
    score(queue, 1, 0.1 + 0.2)
    other = queue_in(tmp_path)
    other.open()
    assert list(other.checkpoints.values()) == added
    assert other.scores == queue.scores
    assert not other.complete
    assert other.described() == {"seed": 7}
    queue.end()
    other.open()
    assert other.complete
    assert other.passed() == 1


def test_a_partial_line_of_a_killed_process_is_removed(tmp_path):
    queue = queue_in(tmp_path)
    queue.begin(None, {})
    for number in (1, 2):
        add(queue, number)
    score(queue, 1, 100.0)
    with open(queue.folder / "scores.jsonl", "a") as file:
        file.write('{"number": 2, "file"')
    other = queue_in(tmp_path)
    other.take_over()
    assert list(other.scores) == [1]
    score(other, 2, 80.0)
    again = queue_in(tmp_path)
    again.open()
    assert [again.scores[number].values["FID"] for number in (1, 2)] == [100.0, 80.0]


def test_a_damaged_line_is_an_error(tmp_path):
    queue = queue_in(tmp_path)
    queue.begin(None, {})
    (queue.folder / "scores.jsonl").write_text("{no json\n")
    with pytest.raises(CheckpointError, match=r"scores\.jsonl is damaged"):
        queue_in(tmp_path).open()


def test_a_checkpoint_that_is_gone_is_an_error_unless_it_was_scored(tmp_path):
    queue = queue_in(tmp_path)
    queue.begin(None, {})
    checkpoints = [add(queue, number) for number in (1, 2, 3)]
    score(queue, 1, 100.0)
    for checkpoint in checkpoints[:2]:
        (queue.folder / checkpoint.file).unlink()
    with pytest.raises(CheckpointError, match=r"step=8-.* is gone, and was not scored: .* of step 8"):
        queue.next()
    score(queue, 2, 100.0)
    assert queue.next() == checkpoints[2]


def test_a_resumed_run_keeps_checkpoints_before_its_position(tmp_path):
    queue = queue_in(tmp_path)
    queue.begin(None, {})
    for number in (1, 2, 3):
        add(queue, number)
        score(queue, number, 100.0)
    queue.end()
    (queue.folder / ".weights_4.partial").write_bytes(b"half")
    resumed = queue_in(tmp_path)
    resumed.begin(9, {"log": "mlperf_resumed_at_9.log"})
    assert (list(resumed.checkpoints), list(resumed.scores), resumed.complete) == ([1, 2], [1, 2], False)
    assert sorted(path.name for path in resumed.folder.iterdir()) == [
        "checkpoints.jsonl", "run.json", "scores.jsonl",
        "weights--timestamp=1000-step=4-consumed_samples=64.safetensors",
        "weights--timestamp=2000-step=8-consumed_samples=128.safetensors",
    ]  # fmt: skip
    rewritten = Point(3, 192, 12, 192, 192, 99_000)
    (resumed.folder / "made").write_bytes(b"weights")
    resumed.add(Checkpoint.of(rewritten), resumed.folder / "made")
    assert resumed.next() == Checkpoint.of(rewritten)
    records = [json.loads(line) for line in (resumed.folder / "checkpoints.jsonl").read_text().splitlines()]
    assert [record["point"]["number"] for record in records] == [1, 2, 3]


def test_a_run_from_the_beginning_takes_no_queue_over(tmp_path):
    queue_in(tmp_path).begin(None, {})
    with pytest.raises(ConfigError, match="has the checkpoints of another run"):
        queue_in(tmp_path).begin(None, {})


def test_a_folder_of_no_such_run_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no run whose checkpoints are scored offline"):
        queue_in(tmp_path).described()
