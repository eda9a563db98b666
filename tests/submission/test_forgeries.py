"""Forged results are refused, and unusual input ends in a message instead of a traceback."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from closed_logs import closed_log, drawn_convergence
from launched import SERIES, entries_of, log_of, submission, write_entries, write_submission

from common.errors import ConfigError
from common.mlperf.parsed_log import TOKEN
from common.mlperf.verdict import judge
from common.submission import check, summarize
from common.submission.entries import gather
from common.submission.settings import read_settings

Records = list[dict[str, Any]]
Change = Callable[[Records], None]


def records(text: str) -> Records:
    return [json.loads(line.partition(TOKEN)[2]) for line in text.splitlines() if TOKEN in line]


def write_log(path: Path, log: Records) -> Path:
    path.write_text("".join(f"{TOKEN}{json.dumps(record)}\n" for record in log))
    return path


def index(log: Records, key: str) -> int:
    return next(number for number, record in enumerate(log) if record["key"] == key)


def begun_with_the_run(log: Records) -> None:
    """Let the last evaluation begin one millisecond after run_start, and everything end a minute later."""
    start = index(log, "run_start")
    last = [record for record in log if record["key"].startswith("eval_")][-3:]
    early = copy.deepcopy(last[0])
    early["time_ms"] = log[start]["time_ms"] + 1
    for record in (*last[1:], log[-1]):
        record["time_ms"] = log[start]["time_ms"] + 60_000
    log.remove(last[0])
    log.insert(start + 1, early)


def progress_beside_progress(log: Records) -> None:
    """Add another count, and increase the one of the rules by twelve epochs."""
    for record in log:
        if record["key"] == "eval_accuracy":
            record["metadata"]["samples_count"] = 1
            record["metadata"]["epoch_num"] += 12


def last_blocks_untrained(log: Records) -> None:
    blocks = [record for record in log if record["key"].startswith("block_")]
    for record in blocks[-4:]:
        log.remove(record)


def only_the_last_evaluation_counts(log: Records) -> None:
    for record in [record for record in log if record["key"] == "eval_accuracy"][:-1]:
        record["key"] = "eval_error"


def whole_batch_as_a_float(log: Records) -> None:
    """Write the batch as a float, and leave out evaluations."""
    log[index(log, "global_batch_size")]["value"] = 3264.0
    left_out = [record for record in log if record["metadata"].get("epoch_num") in (19, 23)]
    for record in left_out:
        log.remove(record)


def hours_before_the_start(log: Records) -> None:
    for record in log[index(log, "run_start") :]:
        record["time_ms"] += 5 * 3_600_000


def batch_of(value: object) -> Change:
    def change(log: Records) -> None:
        log[index(log, "global_batch_size")]["value"] = value

    return change


def size_of(value: object) -> Change:
    def change(log: Records) -> None:
        log[index(log, "train_samples")]["value"] = value

    return change


LOGS: dict[str, tuple[Change, str]] = {
    "evaluation that begins with the run": (begun_with_the_run, "earlier than block_stop"),
    "another progress beside the rules'": (progress_beside_progress, "is where no block ends"),
    "evaluations without training before them": (last_blocks_untrained, "is where no block ends"),
    "evaluations under another key": (only_the_last_evaluation_counts, "the first evaluation is after epoch_num"),
    "batch as a float": (whole_batch_as_a_float, "no evaluation between epoch_num"),
    "hours between init_stop and run_start": (hours_before_the_start, "minutes after init_start"),
    "batch of 1e308": (batch_of(1e308), "global_batch_size is 1e+308, larger than any count"),
    "infinite training set": (size_of(float("inf")), "train_samples is inf, not a whole number"),
    "training set that is no number": (size_of(float("nan")), "train_samples is nan, not a whole number"),
}


@pytest.mark.parametrize("name", LOGS)
def test_forged_log_is_refused(tmp_path, name):
    change, words = LOGS[name]
    log = records(closed_log("resnet", 7))
    change(log)
    verdict = judge(write_log(tmp_path / "log", log))
    assert verdict.kind == "refused"
    assert any(words in reason for reason in verdict.reasons), verdict.reasons


@pytest.mark.parametrize("benchmark", ["bert", "unet3d", "cosmoflow"])
@pytest.mark.parametrize("progress", [1e308, -1e308, 2**63, 5000])
def test_evaluations_with_equal_progress_are_refused(tmp_path, benchmark, progress):
    log = records(closed_log(benchmark, 7))
    for record in log:
        if record["key"].startswith("eval_") and "epoch_num" in record["metadata"]:
            record["metadata"]["epoch_num"] = progress
    assert judge(write_log(tmp_path / "log", log)).kind == "refused"


def test_contradicting_cache_clear_events_count_as_not_cleared(tmp_path):
    log = records(closed_log("resnet", 7))
    log.insert(0, {**log[0], "value": False})
    assert judge(write_log(tmp_path / "log", log)).kind == "format"


def fast_set(tmp_path: Path) -> list[Path]:
    """Write five logs that converge too fast, each with text that the RCP checker reads as 39 epochs."""
    paths = []
    for seed in range(5):
        log = records(closed_log("resnet", seed, 27.0, start=1_700_000_000_000 + 10_000_000 * seed))
        note = {"key": "note", "value": "eval_accuracy", "event_type": "POINT_IN_TIME"}
        log.insert(-1, {**log[-2], **note, "metadata": {"epoch_num": 39}})
        paths.append(write_log(tmp_path / f"{seed}.log", log))
    return paths


def test_text_of_another_event_does_not_slow_the_convergence(tmp_path, capsys):
    assert check.main([str(path) for path in fast_set(tmp_path)]) == 1
    assert "the runs converge faster than chance allows" in capsys.readouterr().out


def test_runs_on_other_machines_are_no_set(tmp_path, capsys):
    paths = []
    for seed, reached in enumerate(drawn_convergence("resnet")):
        log = records(closed_log("resnet", seed, reached, start=1_700_000_000_000 + 10_000_000 * seed))
        log.insert(1, {**log[1], "key": "number_of_nodes", "value": 1 + seed})
        paths.append(write_log(tmp_path / f"{seed}.log", log))
    assert check.main([str(path) for path in paths]) == 1
    assert "different configurations: number_of_nodes is 1" in capsys.readouterr().out


def test_runs_picked_from_a_series_are_no_set(results, capsys):
    assert check.main([str(log_of(results, number)) for number in (1, 2, 3, 4, 5)]) == 1
    assert f"is beside or below {results / 'runs.jsonl'}" in capsys.readouterr().out


def test_a_link_is_named_and_not_opened(results, capsys):
    secret = results.parent / "secret"
    secret.write_text(f"{TOKEN}{{SECRET\n")
    log_of(results, 2).unlink()
    log_of(results, 2).symlink_to(secret)
    assert check.main([str(results)]) == 1
    out = capsys.readouterr().out
    assert "SECRET" not in out
    assert f"{log_of(results, 2)} is a link" in out


def test_folders_of_links_are_no_submission(tree, capsys):
    shutil.move(tree / "results", tree.parent / "elsewhere")
    (tree / "results").symlink_to(tree.parent / "elsewhere")
    assert check.main([str(tree), "--ruleset", "4.0.0"]) == 1
    out = capsys.readouterr().out
    assert "acme/results: is a link" in out
    assert "VALID RUN" not in out


def test_a_series_of_many_experiments_without_run_start_is_judged_in_linear_time(results, capsys):
    begin, end = entries_of(results)[:2]
    entries = []
    for number in range(1, 4001):
        names = {"experiment": number, "log": f"{SERIES}_{number}.log", "output_dir": f"{SERIES}_{number}"}
        entries += [{**begin, **names, "seed": number}, {**end, "experiment": number, "status": "not started"}]
    write_entries(results, entries)
    assert check.main([str(results)]) == 1
    assert "is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "submitter: 2001-13-45",
        "submitter: !!int abc",
        "submitter: !!float abc",
        "submitter: !!bool abc",
        "submitter: !!timestamp x",
        f"submitter: {'9' * 6000}",
        "[" * 20_000,
        "submitter: " + "x" * 300_000,
    ],
)
def test_submission_on_which_yaml_parsers_crash_is_one_message(tmp_path, text):
    (tmp_path / "acme.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"acme\.yaml"):
        read_settings(tmp_path / "acme.yaml")


def test_summary_with_an_infinite_seed_is_valid_json(results):
    path = log_of(results, 2)
    log = records(path.read_text())
    log[index(log, "seed")]["value"] = float("inf")
    write_log(path, log)
    assert summarize.main([str(results), "--json", str(results.parent / "out.json")]) == 1

    def refuse(text: str) -> None:
        raise AssertionError(text)

    json.loads((results.parent / "out.json").read_text(), parse_constant=refuse)


def test_null_byte_in_the_name_of_a_log_is_one_message(tmp_path):
    content = submission({"system": "2xH200_torch", "logs": ["a\0b"]})
    path = write_submission(tmp_path / "acme.yaml", content)
    (entry,) = gather(read_settings(path), "4.0.0")
    assert any("cannot be read" in obstacle for obstacle in entry.score.obstacles)
