"""`package` and `check` refuse broken results and name the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from closed_logs import END, POINT, START, closed_log, event
from launched import (
    SERIES,
    SYSTEM,
    Clone,
    begin_and_end,
    entries_of,
    first_line_ms,
    in_begin,
    in_entries,
    log_of,
    log_text,
    package_arguments,
    seed_of,
    submission,
    write_entries,
    write_series,
    write_submission,
)

from common.errors import ConfigError, DataError
from common.mlperf.parsed_log import read_log
from common.submission import check
from common.submission.entries import gather, refusals
from common.submission.package import main
from common.submission.settings import read_settings

Break = Callable[[Path], None]


def in_log(change: Callable[[str], str], experiment: int = 2) -> Break:
    """Change the text of one log."""

    def apply(results: Path) -> None:
        path = log_of(results, experiment)
        before = path.read_text()
        after = change(before)
        assert after != before
        path.write_text(after)

    return apply


def value(key: str, new: object) -> Callable[[str], str]:
    """Another value at ``key``."""
    return lambda text: re.sub(rf'("key": "{key}", "value": )[^,]+(, "metadata")', rf"\g<1>{json.dumps(new)}\2", text)


def added(line: str, before: str = "run_stop") -> Callable[[str], str]:
    """Another line before the one with the key ``before``."""

    def change(text: str) -> str:
        lines = text.splitlines(keepends=True)
        at = next(index for index, each in enumerate(lines) if f'"key": "{before}"' in each)
        return "".join([*lines[:at], line + "\n", *lines[at:]])

    return change


def moved_to_front(key: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        lines = text.splitlines(keepends=True)
        return "".join(sorted(lines, key=lambda line: f'"key": "{key}"' not in line))

    return change


def cut_before(key: str, characters: int) -> Callable[[str], str]:
    """Only what precedes the line of ``key``, and some characters of it."""

    def change(text: str) -> str:
        start = text.rindex("\n", 0, text.index(f'"key": "{key}"')) + 1
        return text[: start + characters]

    return change


def line_by_line(text: str) -> str:
    other = closed_log("resnet", 555, start=first_line_ms(2) + 5000).splitlines(keepends=True)
    own = text.splitlines(keepends=True)
    pairs = zip(own, [*other, *[""] * len(own)], strict=False)
    return "".join(a + b for a, b in pairs)


def mid_line(text: str) -> str:
    """Another writer's event within the line of the seed: the checkers would not see the seed at all."""
    at = text.index('"key": "seed"') + 3
    return text[:at] + event(1_700_000_000_500, POINT, "tracked_stats", {"throughput": 1.0}) + "\n" + text[at:]


def failed(*experiments: int) -> Break:
    """Runs that were aborted below the target, in log and runs.jsonl."""

    def apply(results: Path) -> None:
        for number in experiments:
            log_of(results, number).write_text(log_text("resnet", number, status="aborted", minutes=10.0))
        in_entries(lambda entry: entry | FAILED if is_end(entry, *experiments) else entry)(results)

    return apply


def is_end(entry: dict, *experiments: int) -> bool:
    return entry["event"] == "end" and entry["experiment"] in experiments


def same_seed(results: Path) -> None:
    log_of(results, 2).write_text(closed_log("resnet", seed_of(1), start=first_line_ms(2)))
    in_begin(2, seed=seed_of(1))(results)


def too_fast(results: Path) -> None:
    for number in range(1, 6):
        minutes = 10.0 + (number - 1) / 8
        log_of(results, number).write_text(log_text("resnet", number, 31.0, minutes=minutes))


def doctor(results: Path) -> None:
    path = results / f"{SERIES}_doctor.json"
    content = json.loads(path.read_text())
    content["nodes"]["node2"]["facts"]["accelerator_model_name"] = "NVIDIA H100"
    path.write_text(json.dumps(content))


LOG = f"{SERIES}_2.log"
FIRST = first_line_ms(2)
SYNTHETIC = event(FIRST, POINT, "data_set", "stand-in")
RESUMED = event(FIRST, POINT, "resumed_from", "step 100")
SECOND_START = event(FIRST + 500_000, START, "run_start")
SECOND_STOP = event(FIRST + 400_000, END, "run_stop", None, status="success")
ABORTED = event(FIRST + 400_000, END, "run_stop", None, status="aborted")
FAILED = {"status": "aborted", "exit_code": 10, "verdict": "format", "minutes": 10.0}

BREAKS: dict[str, tuple[Break, str, str]] = {
    "log gone": (lambda results: log_of(results, 2).unlink(), LOG, "is missing"),
    "quality below the target with status success": (in_log(lambda t: t.replace("0.7592", "0.7589")), LOG,
                                                     "run_stop claims success, but no eval_accuracy meets the target"),
    "same seed twice": (same_seed, "runs.jsonl", "experiments 1 and 2 have the same seed 4000000000000"),
    "convergence faster than chance": (too_fast, "results", "the RCP test fails: the runs converge faster"),
    "hyperparameter that the checker fixes": (in_log(value("lars_epsilon", 1e-5)), LOG, "lars_epsilon = 1e-05 breaks"),
    "hyperparameter that the rules' table fixes": (in_log(value("lars_opt_momentum", 0.95)), LOG,
                                                   "lars_opt_momentum = 0.95 breaks the rules' table: 0.9"),
    "tail cut within a line": (in_log(cut_before("run_stop", 60)), LOG, "MLLOG line is truncated or corrupt"),
    "tail cut at the end of a line": (in_log(cut_before("run_stop", 0)), LOG, "no run_stop: the run was cut short"),
    "two logs mixed line by line": (in_log(line_by_line), LOG, "run_start occurs 2 times"),
    "two logs mixed within a line": (in_log(mid_line), LOG, "one MLLOG event begins within another"),
    "aborted run and a second start": (in_log(lambda t: added(SECOND_START)(added(ABORTED)(t))), LOG,
                                       "run_start occurs 2 times"),
    "resumed run": (in_log(added(RESUMED)), LOG, "a resumed run is not scored"),
    "synthetic data": (in_log(added(SYNTHETIC)), LOG, "synthetic: not an MLPerf result of any division"),
    "two run_stop": (in_log(added(SECOND_STOP)), LOG, "run_stop occurs 2 times"),
    "another batch in one log": (in_log(value("global_batch_size", 3200)), LOG,
                                 f"configurations: global_batch_size is 3264 in {SERIES}_1.log, line 13, 3200 in"),
    "two batches within a log": (in_log(added(event(FIRST, POINT, "global_batch_size", 3200), "seed")), LOG,
                                 "EXACTLY_ONE occurrence of 'global_batch_size' but found 2"),
    "evaluation that is missing": (in_log(lambda t: t.replace('"epoch_num": 31', '"epoch_num": 30')), LOG,
                                    "no evaluation between epoch_num 30 and 35"),
    "initialisation of 31 minutes": (
        lambda results: log_of(results, 2).write_text(log_text("resnet", 2, init_seconds=1860)),
        LOG, "init_stop = null breaks rule",
    ),
    "run_stop before run_start": (in_log(moved_to_front("run_stop")), LOG, "is refused"),
    "log of another submitter": (in_log(value("submission_org", "other")), LOG, "was submitted by 'other'"),
    "log of the open division": (in_log(value("submission_division", "open")), LOG, "is of the open division"),
    "log of another run": (
        lambda results: log_of(results, 2).write_bytes(log_of(results, 3).read_bytes()), LOG, "has the seed"),
    "too many runs without convergence": (failed(2, 3), "results",
                                          f"2 runs did not converge ({SERIES}_2.log, {SERIES}_3.log); 1 may"),
    "configuration changed": (in_begin(3, configuration="cd" * 32), "runs.jsonl", "the configuration changed within"),
    "commit changed": (in_begin(3, commit="0" * 40), "runs.jsonl", "the commit changed within"),
    "ruleset changed": (in_begin(3, ruleset="3.1.0"), "runs.jsonl", "the ruleset changed within"),
    "dirty source": (in_begin(3, dirty=True), "runs.jsonl", "experiment 3 ran a source that differs from its commit"),
    "source of nobody knows which commit": (
        in_entries(lambda e: e | {"commit": None, "dirty": None} if e["event"] == "begin" else e), "runs.jsonl",
        "does not know the commit",
    ),
    "experiment missing in runs.jsonl": (in_entries(lambda e: None if e["experiment"] == 3 else e), "runs.jsonl",
                                         f"experiment 3 of {SERIES} is missing"),
    "last experiment missing in runs.jsonl": (in_entries(lambda e: None if e["experiment"] == 5 else e), "runs.jsonl",
                                              f"experiment 5 of {SERIES} is missing"),
    "fewer runs than declared": (in_entries(lambda e: e | {"declared": 6} if e["event"] == "begin" else e),
                                 "runs.jsonl", "was declared with 6 experiments, 5 ran"),
    "more runs than declared": (in_entries(lambda e: e | {"declared": 4} if e["event"] == "begin" else e),
                                "runs.jsonl", "was declared with 4 experiments, 5 ran"),
    "run without an end": (in_entries(lambda e: None if is_end(e, 5) else e), "runs.jsonl", "experiment 5 has no end"),
    "status that the log contradicts": (in_entries(lambda e: e | {"status": "aborted"} if is_end(e, 2) else e), LOG,
                                        "run_stop says 'success'"),
    "run hidden as not started": (in_entries(lambda e: e | {"status": "not started"} if is_end(e, 2) else e), LOG,
                                  "has a run_start"),
    "unlike nodes": (doctor, f"{SERIES}_doctor.json: node2",
                     "accelerator_model_name is 'NVIDIA H200' on .*node1, 'NVIDIA H100' on"),
}  # fmt: skip


def package(results: Path, clone: Clone, ruleset: str = "4.0.0", **fields: str) -> int:
    settings = write_submission(results.parent / "acme.yaml", submission(**fields))
    return main([str(results), *package_arguments(settings, results.parent / "out", clone, ruleset)])


@pytest.mark.parametrize("name", BREAKS)
def test_broken_results_are_refused_naming_file_and_reason(results, clone, name):
    damage, file, words = BREAKS[name]
    damage(results)
    with pytest.raises(DataError) as caught:
        package(results, clone)
    complaints = [line for line in str(caught.value).splitlines() if file in line]
    pattern = words if ".*" in words else re.escape(words)
    assert [line for line in complaints if re.search(pattern, line)], str(caught.value)
    assert not (results.parent / "out").exists()


IN_THE_SUBMISSION = ("unlike nodes", "log of another submitter", "source of nobody knows which commit")


@pytest.mark.parametrize("name", [name for name in BREAKS if name not in IN_THE_SUBMISSION])
def test_check_refuses_broken_results_naming_file_and_reason(results, name, capsys):
    damage, file, words = BREAKS[name]
    damage(results)
    if name == "log of the open division":
        words = "submission_division is 'closed'"
    assert check.main([str(results), "--ruleset", "4.0.0"]) == 1
    out = capsys.readouterr().out
    assert file in out
    assert words in out


@pytest.mark.parametrize("damage", [failed(2), lambda results: None], ids=["one failed run", "undamaged"])
def test_good_results_are_not_refused(results, damage, capsys):
    damage(results)
    assert check.main([str(results)]) == 0
    assert "SUBMITTABLE" in capsys.readouterr().out


@pytest.mark.parametrize("next_key", ["train_samples", "block_start", "eval_start"])
def test_run_killed_early_is_one_failed_run(results, next_key):
    in_log(lambda text: cut_before(next_key, 0)(text) + ABORTED + "\n")(results)
    log = read_log(log_of(results, 2))
    minutes = (FIRST + 400_000 - log.all("run_start")[0].time_ms) / 60_000
    in_entries(lambda e: e | FAILED | {"minutes": minutes} if is_end(e, 2) else e)(results)
    assert check.main([str(results)]) == 0


def test_benchmark_that_the_ruleset_does_not_accept_is_refused(results, clone):
    with pytest.raises(DataError, match=r"_1\.log is refused: ruleset 5\.0\.0 does not accept resnet"):
        package(results, clone, "5.0.0")


def test_series_of_too_few_runs_is_refused(tmp_path, clone):
    results = write_series(tmp_path / "results", "resnet", clone.commit, [35.0] * 4)
    with pytest.raises(DataError, match=r"a result of resnet needs 5 runs, these are 4"):
        package(results, clone)


def test_wrong_size_of_the_evaluation_set_is_refused(tmp_path, clone):
    results = write_series(tmp_path / "results", "unet3d", clone.commit, [None, 357_000.0])
    in_log(value("eval_samples", 41))(results)
    with pytest.raises(DataError, match=r"_2\.log is refused: line 30: eval_samples = 41 breaks rule"):
        package(results, clone)


def test_series_whose_median_window_failed_is_refused(tmp_path, clone):
    results = write_series(tmp_path / "results", "resnet", clone.commit, [35.0, 35.0, 35.0, None, None, 35.0, 35.0])
    with pytest.raises(DataError, match="2 runs did not converge"):
        package(results, clone)


def test_seed_that_two_runs_share_outside_the_window_is_refused(tmp_path, clone):
    logs = [tmp_path / f"{index}.log" for index in range(7)]
    for index, path in enumerate(logs):
        path.write_text(closed_log("resnet", max(index, 1), minutes=10.0 + index, start=first_line_ms(index + 1)))
    assert check.main([*map(str, logs)]) == 1


@pytest.mark.parametrize(
    ("org", "stated", "accepted"),
    [
        ("ACME", None, True),
        ("Ac-me", None, True),
        ("Acme, Inc.", None, False),
        ("Acme, Inc.", "Acme, Inc.", True),
        ("acme", "Acme, Inc.", False),
    ],
)
def test_submission_org_is_the_stated_one_or_the_submitters_letters(results, org, stated, accepted):
    for number in range(1, 6):
        in_log(lambda text: text.replace('"acme"', json.dumps(org)) + " ", number)(results)
    content = submission({"system": SYSTEM, "results": str(results)})
    settings = read_settings(write_submission(results.parent / "s.yaml", content | {"submission_org": stated}))
    found = refusals(gather(settings, "4.0.0"), settings)
    assert ("give submission_org" not in " ".join(found)) is accepted


def test_a_stated_field_is_not_compared_between_nodes(results, clone):
    doctor(results)
    assert package(results, clone, accelerator_model_name="NVIDIA H200 and H100") == 0
    description = json.loads((results.parent / f"out/acme/systems/{SYSTEM}.json").read_text())
    assert description["accelerator_model_name"] == "NVIDIA H200 and H100"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["systems"][SYSTEM].update(status="onprem"), f"systems.{SYSTEM}.status=onprem: expected one of"),
        (lambda c: c["systems"][SYSTEM]["fields"].update(number_of_nodes=8), 'number_of_nodes=8: .*write "8"'),
        (lambda c: c["systems"][SYSTEM]["fields"].update(colour="red"), "fields.colour: no field of a system"),
        (lambda c: c["systems"][SYSTEM]["fields"].update(division="open"), "fields.division: is not set here"),
        (lambda c: c["systems"].update(other=c["systems"][SYSTEM]), "systems.other: no results belong to it"),
        (lambda c: c["systems"].update({"two words": c["systems"][SYSTEM]}), "'two words' names a folder"),
        (lambda c: c.update(submitter="../acme"), "submitter: '../acme' names a folder"),
        (lambda c: c.update(results=[{"system": "other", "results": "x"}]), "other: no such system"),
        (lambda c: c.update(results=[{"system": SYSTEM}]), "needs results, a folder, or logs"),
        (lambda c: c.update(results=[{"system": SYSTEM, "logs": ["a"], "code": "b"}]), "readme, setup, init_datasets"),
        (lambda c: c["results"][0].update(series="x"), f"no series x.*{SERIES}"),
        (lambda c: c.update(results=[]), "results: none"),
        (lambda c: c.pop("submitter"), "submitter: missing"),
        (lambda c: c.update(color=1), "color: unknown key"),
    ],
)  # fmt: skip
def test_mistake_in_the_submission_is_named(results, clone, change, words):
    content = submission({"system": SYSTEM, "results": "results"})
    change(content)
    path = write_submission(results.parent / "acme.yaml", content)
    with pytest.raises(ConfigError, match=words):
        main(package_arguments(path, results.parent / "out", clone))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no valid YAML"),
        ("", "expected the keys"),
        ("a: !!python/name:os.system ''", "no valid YAML"),
        ("submitter: a\nsystems: {}\nsubmitter: b", r"acme\.yaml, line 3: .*the key 'submitter' is given twice"),
        ("systems:\n  x: {division: closed}\n  'x': {}", r"acme\.yaml, line 3: .*the key 'x' is given twice"),
        ("systems:\n  x:\n    fields: {cooling: air, cooling: air}", r"acme\.yaml, line 3: .*'cooling' is given twice"),
    ],
)
def test_file_that_is_no_submission_is_named(tmp_path, text, words):
    (tmp_path / "acme.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_settings(tmp_path / "acme.yaml")


def test_results_without_what_doctor_found_need_the_facts(results, clone):
    (results / f"{SERIES}_doctor.json").unlink()
    with pytest.raises(ConfigError, match="no file of `doctor` to take the nodes from"):
        package(results, clone)


def test_added_experiment_that_never_started_must_have_its_log(results, clone):
    late = begin_and_end("resnet", "4.0.0", 6, 5, seed_of(6), clone.commit, "not started")
    write_entries(results, [*entries_of(results), *late])
    with pytest.raises(DataError, match=r"_6\.log is missing: without it nobody can see"):
        package(results, clone)
