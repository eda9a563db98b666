"""The clock of a run: arrangements of published logs are accepted, and changed times are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from handwritten_logs import END, POINT, START, Line

from common.mlperf.parsed_log import read_log
from common.mlperf.rules import rules_for
from common.mlperf.run_clock import check_clock

WriteLog = Callable[..., Path]

HEAD: list[Line] = [
    (POINT, "submission_benchmark", "resnet", {}, 0),
    (POINT, "submission_division", "closed", {}, 0),
    (START, "init_start", None, {}, 0),
    (POINT, "global_batch_size", 3264, {}, 1),
    (END, "init_stop", None, {}, 50),
    (START, "run_start", None, {}, 60),
]


def block_start(first: int, second: int, count: int = 4) -> Line:
    return (START, "block_start", None, {"first_epoch_num": first, "epoch_count": count}, second)


def block_stop(first: int, second: int) -> Line:
    return (END, "block_stop", None, {"first_epoch_num": first}, second)


def eval_start(epoch: int, second: int) -> Line:
    return (START, "eval_start", None, {"epoch_num": epoch}, second)


def accuracy(epoch: int, second: int, value: float = 0.5) -> Line:
    return (POINT, "eval_accuracy", value, {"epoch_num": epoch}, second)


def eval_stop(epoch: int, second: int) -> Line:
    return (END, "eval_stop", None, {"epoch_num": epoch}, second)


def epoch_start(epoch: int, second: int) -> Line:
    return (START, "epoch_start", None, {"epoch_num": epoch}, second)


def epoch_stop(epoch: int, second: int) -> Line:
    return (END, "epoch_stop", None, {"epoch_num": epoch}, second)


def run_stop(second: int, status: str = "success") -> Line:
    return (END, "run_stop", None, {"status": status}, second)


# How published logs of v0.7 to v6.0 arrange their lines.
SHAPES: dict[str, list[Line]] = {
    "evaluation after its block": [
        block_start(1, 60), block_stop(1, 70), eval_start(4, 70), accuracy(4, 72), eval_stop(4, 72),
        block_start(5, 72), block_stop(5, 80), eval_start(8, 80), accuracy(8, 82, 0.76), eval_stop(8, 82), run_stop(82),
    ],
    "evaluation within its block, its value after its end": [
        block_start(1, 60), eval_start(4, 70), eval_stop(4, 72), accuracy(4, 72), block_stop(1, 72),
        block_start(5, 72), eval_start(8, 80), eval_stop(8, 82), accuracy(8, 82, 0.76), block_stop(5, 82), run_stop(82),
    ],
    "values alone, after blocks": [
        block_start(1, 60), block_stop(1, 70), accuracy(4, 72),
        block_start(5, 72), block_stop(5, 80), accuracy(8, 82, 0.76), run_stop(82),
    ],
    "first block without its beginning": [
        block_stop(0, 70), accuracy(4, 72), block_start(4, 72), block_stop(4, 80), accuracy(8, 82, 0.76), run_stop(82),
    ],
    "one block and one epoch around everything, closed after run_stop": [
        block_start(1, 60), epoch_start(1, 60), eval_start(4, 70), accuracy(4, 72), eval_stop(4, 72),
        eval_start(8, 80), accuracy(8, 82, 0.76), eval_stop(8, 82), run_stop(82), epoch_stop(8, 82), block_stop(1, 83),
    ],
    "evaluations that wait for each other beside the training": [
        block_start(1, 60), block_stop(1, 70), eval_start(4, 70), block_start(5, 70), block_stop(5, 80),
        eval_start(8, 80), block_start(9, 80), accuracy(4, 85), eval_stop(4, 85), block_stop(9, 90), eval_start(12, 90),
        accuracy(8, 95, 0.76), eval_stop(8, 95), run_stop(95),
    ],
    "checkpoints scored after the training, with the times of their training": [
        block_start(1, 60), block_stop(1, 70), block_start(5, 70), block_stop(5, 80), block_start(9, 80),
        block_stop(9, 90), accuracy(4, 70), accuracy(8, 80, 0.76), run_stop(80),
    ],
    "epochs without blocks, the next begun before the score": [
        epoch_start(0, 60), epoch_stop(0, 70), eval_start(1, 70), epoch_start(1, 71), accuracy(1, 73), eval_stop(1, 73),
        epoch_stop(1, 80), eval_start(2, 80), epoch_start(2, 81), accuracy(2, 84, 0.76), eval_stop(2, 84), run_stop(88),
        epoch_stop(2, 88),
    ],
    "a further block after run_stop": [
        block_start(1, 60), block_stop(1, 70), eval_start(4, 70), accuracy(4, 72, 0.76), eval_stop(4, 72), run_stop(72),
        block_start(5, 72), block_stop(5, 80),
    ],
    "an evaluation rank that ends the run while others train": [
        block_start(1, 60), block_stop(1, 70), eval_start(4, 70), block_start(5, 70), block_stop(5, 80),
        eval_start(8, 80), block_start(9, 80), accuracy(4, 75, 0.76), eval_stop(4, 75), run_stop(75),
    ],
    "an aborted run that ends within a block": [block_start(1, 60), run_stop(65, "aborted")],
    "block within a block": [
        block_start(1, 60), block_start(1, 61), block_stop(1, 70), eval_start(4, 70), accuracy(4, 72), eval_stop(4, 72),
        block_start(5, 72), block_stop(5, 80), eval_start(8, 80), accuracy(8, 82, 0.76), eval_stop(8, 82), run_stop(82),
    ],
    "block that ends twice": [
        block_start(1, 60), block_stop(1, 70), block_stop(1, 70), eval_start(4, 70), accuracy(4, 72), eval_stop(4, 72),
        block_start(5, 72), block_stop(5, 80), eval_start(8, 80), accuracy(8, 82, 0.76), eval_stop(8, 82), run_stop(82),
    ],
    "block that ends as another": [
        block_start(1, 60), block_stop(5, 70), eval_start(4, 70), accuracy(4, 72), eval_stop(4, 72),
        block_start(5, 72), block_stop(9, 80), eval_start(8, 80), accuracy(8, 82, 0.76), eval_stop(8, 82), run_stop(82),
    ],
}  # fmt: skip


def complaints(write_log: WriteLog, lines: Sequence[Line], head: Sequence[Line] = HEAD) -> list[str]:
    return check_clock(read_log(write_log([*head, *lines])), rules_for("resnet", "4.0.0"))[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_published_logs_are_accepted(write_log, shape):
    assert complaints(write_log, SHAPES[shape]) == []


PLAIN = SHAPES["evaluation after its block"]
WITHIN = SHAPES["evaluation within its block, its value after its end"]
VALUES = SHAPES["values alone, after blocks"]


def at(lines: Sequence[Line], index: int, second: int) -> list[Line]:
    """``lines`` with another time of one."""
    return [(*line[:4], second) if number == index else line for number, line in enumerate(lines)]


ONE_EPOCH_BLOCKS: list[Line] = [
    line
    for epoch in range(1, 9)
    for line in (block_start(epoch, 50 + 10 * epoch, 1), block_stop(epoch, 60 + 10 * epoch))
]

TURNED: dict[str, tuple[list[Line], str]] = {
    "run_stop before the evaluation that it ends": (at(PLAIN, 10, 79), "line 17: run_stop is 3.0 s earlier than"),
    "evaluation and run_stop before the training": (
        [*PLAIN[:7], eval_start(8, 74), accuracy(8, 75, 0.76), eval_stop(8, 75), run_stop(75)],
        "line 14: eval_start is 6.0 s earlier than block_stop in line 13: the clock goes back",
    ),
    "value before its evaluation": (at(PLAIN, 8, 74), "line 15: eval_accuracy is 6.0 s earlier than eval_start"),
    "value without a beginning before its training": (
        [*VALUES[:5], accuracy(8, 75, 0.76), run_stop(82)], "line 12: eval_accuracy is 5.0 s earlier than block_stop",
    ),
    "evaluation and run_stop moved into their block": (
        [*WITHIN[:6], eval_start(8, 73), eval_stop(8, 74), accuracy(8, 74, 0.76), block_stop(5, 82), run_stop(74)],
        "run_stop is 8.0 s earlier than block_stop in line 16, which it ends",
    ),
    "run_stop moved up in the file": ([*PLAIN[:2], PLAIN[10], *PLAIN[2:10]], "which it follows: was run_stop moved?"),
    "run of no length": ([run_stop(60)], "run_stop has the time of run_start in line 6: a run of no length"),
    "training before run_start": (at(PLAIN, 0, 50), "line 7: block_start is 10.0 s earlier than run_start in line 6"),
    "a later evaluation hides the one that reached the target": (
        [*PLAIN[:10], eval_start(12, 90), accuracy(12, 91, 0.77), run_stop(91)],
        "line 18: eval_accuracy follows the evaluation that reached the target in line 15",
    ),
    "evaluation that begins with the run": (
        [eval_start(8, 60), *PLAIN[:2], *PLAIN[5:7], accuracy(8, 62, 0.76), eval_stop(8, 62), run_stop(62)],
        "line 12: eval_accuracy is 8.0 s earlier than block_stop in line 9",
    ),
    "values alone, after fewer epochs than they say": (
        [*ONE_EPOCH_BLOCKS, accuracy(4, 71), accuracy(8, 81, 0.76), run_stop(81)],
        "line 23: eval_accuracy is 9.0 s earlier than block_stop in line 10",
    ),
}  # fmt: skip


def test_training_after_the_target_is_a_note(write_log):
    """Published logs of 3D U-Net train one more block: the clock may stop at the target and need not."""
    lines = [*PLAIN[:10], block_start(9, 82), block_stop(9, 90), run_stop(90)]
    refusals, notes = check_clock(read_log(write_log([*HEAD, *lines])), rules_for("resnet", "4.0.0"))
    assert refusals == []
    assert "line 17: training goes on after the evaluation that reached the target in line 15" in notes[0]


def test_synthetic_data_have_their_own_target(write_log):
    # A demo that goes on to 0.95 passes the rules' 0.759 on its way; such a log earns no more than the format.
    lines = [*PLAIN[:10], block_start(9, 82), block_stop(9, 90), accuracy(12, 92, 0.96), run_stop(92)]
    synthetic = [*HEAD[:2], (POINT, "data_set", "stand-in", {}, 0), *HEAD[2:]]
    assert complaints(write_log, lines, synthetic) == []


@pytest.mark.parametrize("name", TURNED)
def test_turned_clock_is_refused_with_its_line(write_log, name):
    lines, words = TURNED[name]
    assert any(words in text for text in complaints(write_log, lines)), complaints(write_log, lines)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ([*HEAD[:4], HEAD[5], HEAD[4]], "run_start comes during initialization"),
        ([*HEAD[:2], *HEAD[4:]], "init_stop comes before init_start"),
        (at(HEAD, 4, 70), "run_start is 10.0 s earlier than init_stop in line 5"),
        ([*HEAD[:2], PLAIN[0], *HEAD[2:]], "block_start comes before init_start: the run begins with run_start"),
        ([*HEAD, HEAD[2]], "init_start comes during the run"),
    ],
)
def test_phases_out_of_order_are_refused(write_log, head, words):
    assert any(words in text for text in complaints(write_log, PLAIN, head))


@pytest.mark.parametrize(
    "time_ms",
    ["1700000082", "1700000082000000", "82000"],  # seconds, microseconds, milliseconds since the start
)
def test_times_that_are_no_milliseconds_are_refused(write_log, time_ms):
    path = write_log([*HEAD, *PLAIN])
    text = path.read_text()
    path.write_text(text.replace('"time_ms": 1700000070000', f'"time_ms": {time_ms}', 1))
    found = check_clock(read_log(path), rules_for("resnet", "4.0.0"))[0]
    assert [text.partition(";")[0] for text in found] == [
        f"line 8: time_ms of block_stop is {time_ms}, no milliseconds since 1970"
    ]


def test_times_may_have_parts_of_milliseconds(write_log):
    """A program that passes ``1000 * time.time()`` to the logger writes such times."""
    path = write_log([*HEAD, *PLAIN])
    path.write_text(path.read_text().replace("000,", "000.4375,"))
    assert check_clock(read_log(path), rules_for("resnet", "4.0.0"))[0] == []


def test_times_of_other_keys_do_not_matter(write_log):
    """Published logs have a time of 0 in their heads, and a seed of the next day."""
    path = write_log([*HEAD, *PLAIN])
    path.write_text(path.read_text().replace('"time_ms": 1700000001000', '"time_ms": 0', 1))
    assert check_clock(read_log(path), rules_for("resnet", "4.0.0")) == ([], [])


def checkpoints(stop: int) -> list[Line]:
    """Stable Diffusion: three checkpoints, scored after the run; the second is the first to pass."""
    head = [(*HEAD[0][:2], "stable_diffusion", {}, 0), *HEAD[1:]]
    lines: list[Line] = []
    for number in (1, 2, 3):
        start, end = {"samples_count": 512_000 * (number - 1)}, {"samples_count": 512_000 * number}
        lines += [
            (START, "block_start", None, start, 50 + 10 * number),
            (END, "block_stop", None, end, 60 + 10 * number),
        ]
    for number, fid, clip in ((1, 120.0, 0.1), (2, 85.0, 0.2), (3, 80.0, 0.2)):
        at_checkpoint = {"samples_count": 512_000 * number}
        lines += [
            (POINT, "eval_accuracy", fid, {"metric": "FID", **at_checkpoint}, 200),
            (POINT, "eval_accuracy", clip, {"metric": "CLIP", **at_checkpoint}, 201),
        ]
    return [*head, *lines, run_stop(stop)]


def repeated_labels(lines: Sequence[Line]) -> list[Line]:
    """Blocks whose end repeats the label of their start, as in published logs of v5.0."""
    found: list[Line] = []
    for line in lines:
        label = found[-1][3] if line[1] == "block_stop" else line[3]
        found.append((*line[:3], label, line[4]))
    return found


def odd_labels(lines: Sequence[Line]) -> list[Line]:
    """Blocks whose labels are one sample more than those of the checkpoints."""
    return [
        (*line[:3], {"samples_count": line[3]["samples_count"] + 1}, line[4]) if line[1].startswith("block_") else line
        for line in repeated_labels(lines)
    ]


@pytest.mark.parametrize("stop", [62, 68])
def test_run_of_checkpoints_does_not_end_before_a_block_that_it_includes(write_log, stop):
    """However blocks are labelled: the second one starts at second 70 with less progress than the checkpoint."""
    found = check_clock(read_log(write_log(odd_labels(checkpoints(stop)))), rules_for("stable_diffusion", "5.0.0"))[0]
    assert any("which began training that the checkpoint at samples_count 1.024e+06 includes" in each for each in found)


@pytest.mark.parametrize("labels", [list, repeated_labels], ids=["end of the block", "start of the block"])
@pytest.mark.parametrize(("stop", "fits"), [(80, True), (95, True), (75, False)])
def test_run_of_checkpoints_ends_with_the_training_of_the_first_that_passes(write_log, stop, fits, labels):
    path = write_log(labels(checkpoints(stop)))
    found = check_clock(read_log(path), rules_for("stable_diffusion", "5.0.0"))[0]
    assert (found == []) is fits
    assert fits or "which ended the training of the checkpoint at samples_count 1.024e+06" in found[0]
