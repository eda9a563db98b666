"""Numbers of a log that must agree: counts, sizes of the data sets, blocks, evaluations and schedules."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from handwritten_logs import END, POINT, START, Line, replaced, resnet_lines

from common.errors import DataError
from common.mlperf.agreement import disagreeing_progress, odd_blocks, odd_sizes, wrong_counts
from common.mlperf.evaluation_points import check_evaluation_points
from common.mlperf.parsed_log import ParsedLog, read_log
from common.mlperf.rules import rules_for

WriteLog = Callable[..., Path]


def log_of(write_log: WriteLog, lines: Sequence[Line]) -> ParsedLog:
    return read_log(write_log(list(lines)))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("global_batch_size", "1024", 'is text, "1024": write a number'),
        ("global_batch_size", None, "is null, which states nothing"),
        ("global_batch_size", 3264.5, "is 3264.5, not a whole number"),
        ("global_batch_size", True, "is true, not a number"),
        ("global_batch_size", 0, "is 0, less than 1"),
        ("global_batch_size", float("inf"), "is inf, not a whole number"),
        ("eval_samples", [50000], "is [50000], not a number"),
        ("train_samples", -1, "is -1, less than 0"),
        ("gradient_accumulation_steps", 1.5, "is 1.5, not a whole number"),
    ],
)
def test_a_value_that_is_no_count_is_named(write_log, key, value, words):
    lines = replaced(resnet_lines(), key, value)
    number = next(index for index, line in enumerate(lines, start=1) if line[1] == key)
    assert wrong_counts(log_of(write_log, lines)) == [f"line {number}: {key} {words}"]


@pytest.mark.parametrize(("value", "words"), [("50000", "is text"), (None, "is null")])
def test_a_size_that_no_checker_reads_is_a_note(write_log, value, words):
    log = log_of(write_log, replaced(resnet_lines(), "eval_samples", value))
    assert wrong_counts(log) == []
    (note,) = odd_sizes(log, rules_for("resnet", "4.0.0"))
    assert words in note


def test_counts_of_a_good_log_are_counts(write_log):
    assert wrong_counts(log_of(write_log, resnet_lines())) == []


def test_part_of_a_sample_is_no_count(write_log):
    lines = [(START, "block_start", None, {"samples_count": 0.5}, 0)]
    assert wrong_counts(log_of(write_log, lines)) == ["line 1: samples_count of block_start is 0.5, not a whole number"]


# Sizes as published logs have them; the references' data sets.
@pytest.mark.parametrize(
    ("benchmark", "ruleset", "batch", "train", "evaluate"),
    [
        ("resnet", "4.0.0", 3264, 1281167, 50000),
        ("resnet", "0.7.0", 32768, 1277952, 65536),  # whole batches, and padded
        ("ssd", "4.1.0", 256, 4572, 97),  # batches
        ("unet3d", "4.0.0", 56, 168, 42),
        ("bert", "5.0.0", 448, 3001600, 10000),  # what was trained
        ("llama2_70b_lora", "6.1.0", 8, 3901, 173),
        ("dlrm", "2.1.0", 55296, 4195197692, 89137318),
    ],
)
def test_sizes_of_published_logs_are_those_of_the_reference(write_log, benchmark, ruleset, batch, train, evaluate):
    assert odd_sizes(sized(write_log, batch, train, evaluate), rules_for(benchmark, ruleset)) == []


def sized(write_log: WriteLog, batch: int, train: int, evaluate: int) -> ParsedLog:
    values = {"global_batch_size": batch, "train_samples": train, "eval_samples": evaluate}
    return log_of(write_log, [(POINT, key, value, {}, 0) for key, value in values.items()])


@pytest.mark.parametrize(
    ("train", "evaluate", "words"),
    [
        (1281167, 49999, "line 3: eval_samples is 49,999; the reference data set of resnet has 50,000"),
        (1281167, 500000, "line 3: eval_samples is 500,000; the reference data set of resnet has 50,000"),
        (640000, 50000, "line 2: train_samples is 640,000; the reference data set of resnet has 1,281,167"),
    ],
)
def test_sizes_of_other_data_are_noted(write_log, train, evaluate, words):
    assert odd_sizes(sized(write_log, 3264, train, evaluate), rules_for("resnet", "4.0.0")) == [words]


def run(blocks: Sequence[tuple[dict[str, Any], dict[str, Any]]], points: Sequence[float], **start: Any) -> list[Line]:
    """Blocks with the metadata of their start and stop, each followed by an evaluation."""
    lines: list[Line] = [(POINT, "global_batch_size", start.pop("batch", 256), {}, 0)]
    key = start.pop("key", "epoch_num")
    for (begin, end), point in zip(blocks, points, strict=True):
        lines += [
            (START, "block_start", None, begin, 1),
            (END, "block_stop", None, end, 2),
            (POINT, "eval_accuracy", 0.1, {key: point}, 3),
        ]
    return lines


def epochs(*firsts: float, count: float = 1) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [({"first_epoch_num": first, "epoch_count": count}, {"first_epoch_num": first}) for first in firsts]


# How published logs number blocks and evaluations.
NUMBERED: dict[str, tuple[str, str, list[Line]]] = {
    "from 1": ("resnet", "4.0.0", run(epochs(1, 5, 9, count=4), [4, 8, 12])),
    "from 0": ("bert", "0.7.0", run(epochs(0, 62, 124, count=62), [62, 124, 186])),
    "in samples called epochs": (
        "unet3d", "4.0.0",
        run([*epochs(0, count=168_000), *epochs(168_000, 171_360, count=3360)], [168_000, 171_360, 174_720])),
    "in samples called epochs, the first from the first epoch's on": (
        "unet3d", "4.0.0",
        run([*epochs(168, count=168_000), *epochs(168_168, 171_528, count=3360)], [168_000, 171_360, 174_720],
            batch=2)),
    "blocks in steps, evaluations in samples": (
        "bert", "3.0.0", run(epochs(0, 335, 670, count=335), [150_080, 300_160, 450_240], batch=448)),
    "blocks by index": ("bert", "2.0.0", run(epochs(0, 1, 2), [175_000, 350_000, 525_000], batch=3072)),
    "first block without its start": (
        "gpt3", "4.0.0",
        [(END, "block_stop", None, {"first_epoch_num": 0}, 0),
         (POINT, "eval_accuracy", 2.75, {"epoch_num": 50331648}, 0),
         *run(epochs(50331648, 100663296, count=50331648), [100663296, 150994944], batch=2048)]),
    "samples by position": (
        "llama2_70b_lora", "4.0.0",
        run([({"samples_count": a}, {"samples_count": b}) for a, b in ((0, 1536), (1536, 1920), (1920, 2304))],
            [1536, 1920, 2304], batch=8, key="samples_count")),
    "samples by length": (
        "flux1", "6.0.0",
        run([({"samples_count": 262144}, {"samples_count": 262144})] * 3, [262144, 524288, 786432], batch=2048,
            key="samples_count")),
    "a batch less than the block": (
        "llama31_8b", "6.0.0",
        run([({"samples_count": a}, {"samples_count": a + 12288}) for a in (0, 12288)], [12256, 24544], batch=32,
            key="samples_count")),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_of_published_logs_agree(write_log, name):
    benchmark, ruleset, lines = NUMBERED[name]
    assert disagreeing_progress(log_of(write_log, lines), rules_for(benchmark, ruleset)) == []


def test_evaluation_where_no_block_ends_is_refused(write_log):
    lines = run(epochs(1, 5, 9, 13, count=4), [4, 8, 12, 26])
    found = disagreeing_progress(log_of(write_log, lines), rules_for("resnet", "4.0.0"))
    assert found == ["line 13: an evaluation after epoch_num 26 is where no block ends: they end after 4, 8, 12, 16"]


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        (slice(3, 4), "the block begins after 16, the one before ends after 12: training is missing"),
        (slice(6, 8), "an evaluation after epoch_num 28 is where no block ends"),
    ],
)
def test_blocks_that_are_missing_are_training_that_is_missing(write_log, left_out, words):
    """Evaluations after 4, 8, ..., 32, of which some have no block before them."""
    firsts = list(range(1, 32, 4))
    lines = run(epochs(*firsts, count=4), [first + 3 for first in firsts])
    gone = set(firsts[left_out])
    lines = [line for line in lines if line[3].get("first_epoch_num") not in gone]
    found = disagreeing_progress(log_of(write_log, lines), rules_for("resnet", "4.0.0"))
    assert words in found[0]


def test_run_that_begins_within_its_samples_is_refused(write_log):
    ends = [175_104 * number for number in range(11, 15)]
    lines = run([({"samples_count": end - 175_104}, {"samples_count": end}) for end in ends], ends, batch=3072)
    found = disagreeing_progress(log_of(write_log, lines), rules_for("bert", "5.0.0"))
    assert found == ["line 2: the first block begins after 1751040: the training before it is missing"]


def test_progress_is_read_where_the_rules_have_it(write_log):
    """The RCP checker reads epoch_num; a samples_count beside it must not hide it."""
    lines = run(epochs(1, 5, 9, count=4), [4, 8, 24])
    lines = [
        (*line[:3], {**line[3], "samples_count": 1}, line[4]) if line[1] == "eval_accuracy" else line for line in lines
    ]
    log = log_of(write_log, lines)
    assert disagreeing_progress(log, rules_for("resnet", "4.0.0")) != []
    assert check_evaluation_points(log, rules_for("resnet", "4.0.0"))[0] != []


def test_run_that_does_not_begin_at_its_start_is_refused(write_log):
    lines = run(epochs(9, 13, 17, count=4), [12, 16, 20])
    found = disagreeing_progress(log_of(write_log, lines), rules_for("resnet", "4.0.0"))
    assert found == ["line 2: the first block begins after 8: the training before it is missing"]


# Intervals by the rules' formulas, worked by hand; published logs round to batches.
SCHEDULED = [
    ("bert", "5.0.0", 448, "epoch_num", [150_080, 300_160, 450_240]),  # 0.05 (230.23 x 448 + 3e6) = 155,157 -> 150,000
    ("gpt3", "4.1.0", 1536, "epoch_num", [50_331_648, 100_663_296]),  # 24,576 sequences of 2,048 tokens
    ("llama2_70b_lora", "6.1.0", 8, "samples_count", [1536, 1920, 2304]),  # from the fourth of 384 on
    ("dlrm_dcnv2", "6.0.0", 55_296, "epoch_num", [0.049980888109768154, 0.09997495683348931]),
    ("rgat", "5.1.0", 16_384, "epoch_num", [0.05, 0.1, 0.15]),
]


@pytest.mark.parametrize(("benchmark", "ruleset", "batch", "key", "points"), SCHEDULED)
def test_evaluations_on_the_rules_grid_are_accepted(write_log, benchmark, ruleset, batch, key, points):
    log = log_of(write_log, evaluated(batch, key, points))
    assert check_evaluation_points(log, rules_for(benchmark, ruleset)) == ([], [])


def evaluated(batch: int, key: str, points: Sequence[float]) -> list[Line]:
    return [
        (POINT, "global_batch_size", batch, {}, 0),
        *((POINT, "eval_accuracy", 0.1, {key: point}, 1) for point in points),
    ]


@pytest.mark.parametrize(("benchmark", "ruleset", "batch", "key", "points"), SCHEDULED)
@pytest.mark.parametrize(
    "change", [lambda points: [*points[:-1], 1.3 * points[-1]], lambda points: [*points, 5 * points[-1]]]
)
def test_evaluations_off_the_rules_grid_are_refused(write_log, benchmark, ruleset, batch, key, points, change):
    log = log_of(write_log, evaluated(batch, key, change(points)))
    assert check_evaluation_points(log, rules_for(benchmark, ruleset))[0] != []


def test_batch_that_the_evaluations_contradict_is_refused(write_log):
    """At a batch of 448 the interval is 150,000: evaluations every 175,000 are another batch's."""
    log = log_of(write_log, evaluated(448, "epoch_num", [175_000 * number for number in range(1, 20)]))
    (refusal,), _ = check_evaluation_points(log, rules_for("bert", "5.0.0"))
    assert "at a batch of 448 the rules' schedule has one every 150000" in refusal


# Logs of one published 3D U-Net result label the end of a block; the first block of others is counted from 1.
ODD_LABELS: dict[str, tuple[str, str, list[Line], str]] = {
    "block labelled by its end": (
        "unet3d", "3.0.0",
        [line for line in
         run([({"first_epoch_num": max(1, a), "epoch_count": 20}, {"first_epoch_num": a + 20})
              for a in range(0, 1040, 20)], list(range(20, 1060, 20)), batch=56)
         if line[1] != "eval_accuracy" or line[3]["epoch_num"] >= 1000], ""),
    "counts that fit nothing": (
        "unet3d", "4.0.0", run(epochs(168, 188_160, 366_912, count=188_160), [168_000, 171_360, 174_720]),
        "the labels of blocks do not agree with the evaluations"),
    "a start that is logged twice": (
        "llama31_405b", "5.0.0",
        [*run([({"samples_count": 0}, {"samples_count": 46_080})], [46_080], key="samples_count", batch=1152),
         (START, "block_start", None, {"samples_count": 46_080}, 4),
         *run([({"samples_count": 46_080}, {"samples_count": 92_160})], [92_160], key="samples_count", batch=1152)],
        "blocks without a start or an end: lines 5"),
    "a block in the middle that never ends": (
        "llama2_70b_lora", "5.0.0",
        [line for line in
         run([({"samples_count": a}, {"samples_count": a + 384}) for a in range(0, 1920, 384)],
             list(range(384, 2304, 384)), batch=8, key="samples_count")
         if not (line[1] == "block_stop" and line[3]["samples_count"] == 1152)],
        "blocks without a start or an end: lines 8"),
    "a block that never ends": (
        "llama31_405b", "5.0.0",
        [*run([({"samples_count": 0}, {"samples_count": 46_080})], [46_080], key="samples_count", batch=1152),
         (START, "block_start", None, {"samples_count": 46_080}, 4)],
        "blocks without a start or an end: lines 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_LABELS)
def test_odd_blocks_of_published_logs_are_at_most_a_note(write_log, name):
    benchmark, ruleset, lines, words = ODD_LABELS[name]
    log, rules = log_of(write_log, lines), rules_for(benchmark, ruleset)
    assert disagreeing_progress(log, rules) == []
    notes = odd_blocks(log, rules)
    assert any(note.startswith(words) for note in notes) if words else True


def test_evaluations_without_training_between_them_are_refused(write_log):
    """The blocks of a run were cut out, and its evaluations stayed."""
    lines = run([({}, {})] * 5, [384 * n for n in range(4, 9)], batch=8, key="samples_count")
    rules = rules_for("llama2_70b_lora", "5.0.0")
    assert disagreeing_progress(log_of(write_log, lines), rules) == []
    cut = [line for number, line in enumerate(lines) if not (line[1].startswith("block_") and number > 6)]
    (refusal,) = disagreeing_progress(log_of(write_log, cut), rules)
    assert "no training is logged between this evaluation and the previous one" in refusal
    alone = [line for line in lines if not line[1].startswith("block_")]
    assert disagreeing_progress(log_of(write_log, alone), rules) == []


BATCHES = [({"samples_count": a}, {"samples_count": a + 384}) for a in range(0, 5 * 384, 384)]


@pytest.mark.parametrize(
    ("points", "refused"),
    [
        ([384, 768, 1152, 1536, 1920], False),
        ([384, 768, 1152, 1536, 1536], True),  # the last evaluation is one interval before the end of its block
        ([384, 768, 768, 1536, 1920], True),
        ([384, 384, 768, 1152, 1536], False),  # evaluations lag behind the training: nothing is compared
    ],
)
def test_the_only_evaluation_that_disagrees_with_its_block_is_refused(write_log, points, refused):
    lines = run(BATCHES, points, batch=8, key="samples_count")
    found = disagreeing_progress(log_of(write_log, lines), rules_for("llama2_70b_lora", "5.0.0"))
    assert [each.reason for each in found] == (["evaluation-untrained"] if refused else [])
    assert all("follows a block that ends after" in each for each in found)


def test_key_twice_in_one_object_is_an_error(tmp_path):
    record = json.dumps({"time_ms": 1, "event_type": "", "key": "seed", "value": 1, "metadata": {}})
    (tmp_path / "log").write_text(f':::MLLOG {record[:-1]}, "value": 2}}\n')
    with pytest.raises(DataError, match=r"line 1: MLLOG line is ambiguous: it has 'value' twice"):
        read_log(tmp_path / "log")
