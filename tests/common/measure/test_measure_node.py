"""What a node measures, beside what, and the table of it."""

from __future__ import annotations

import json

import pytest

from benchmarks import WORKLOADS
from common import cli
from common.errors import ConfigError
from common.measure import command
from common.measure.command import counts_up_to
from common.measure.jobs import Job, jobs_of, waves
from common.measure.table import COLUMNS, Outcome, published_rates, table
from common.mlperf.rules import rules_for

SCALES = {"resnet": ["1xH200", "2xH200", "8xH200"], "bert": ["1xH200", "8xH200"], "dlrm": ["1xH200"]}


def test_a_number_of_gpus_has_its_own_recipe_or_fewer_ranks_of_the_largest():
    jobs = jobs_of(SCALES, "8xH200", [1, 2, 8], {"resnet"})
    assert [(job.benchmark, job.gpus, job.scale, job.whole_run) for job in jobs] == [
        ("bert", 8, "8xH200", False),
        ("bert", 2, "8xH200", False),
        ("bert", 1, "1xH200", False),
        ("resnet", 8, "8xH200", True),
        ("resnet", 2, "2xH200", False),
        ("resnet", 1, "1xH200", False),
    ]
    ranks = ["scale.nodes=1", "scale.gpus_per_node=2"]
    assert jobs[1].words() == ["benchmark=bert", "scale=8xH200", *ranks, "bench.only=step"]
    assert jobs[3].words() == ["benchmark=resnet", "scale=8xH200"]


def test_what_leaves_gpus_idle_runs_beside_what_is_smaller():
    jobs = jobs_of(SCALES, "8xH200", [1, 2, 4, 8], ())
    assert [[job.name for job in wave] for wave in waves(jobs, 8)] == [
        ["bert-8"],
        ["bert-4", "bert-2", "bert-1", "resnet-1"],
        ["resnet-8"],
        ["resnet-4", "resnet-2"],
    ]
    pairs = waves(jobs_of(SCALES, "8xH200", [1, 2], ()), 2)
    assert [[job.name for job in wave] for wave in pairs] == [["bert-2"], ["bert-1", "resnet-1"], ["resnet-2"]]


def test_a_whole_run_has_the_processors_for_itself():
    jobs = jobs_of(SCALES, "8xH200", [1, 2], ("bert", "resnet"))
    assert [[job.name for job in wave] for wave in waves(jobs, 8)] == [
        ["bert-2"],
        ["bert-1", "resnet-1"],
        ["resnet-2"],
    ]


def test_more_gpus_than_there_are_is_refused():
    with pytest.raises(ValueError, match="bert-8 needs 8 GPUs, and there are 4"):
        waves([Job("bert", 8, "8xH200", False)], 4)


def test_counts_are_powers_of_two_and_all():
    assert [counts_up_to(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def figures(rate: float, samples: int, **others):
    known = {"joules": None, "exposed_communication_ms": None, "reserved_bytes": None, "run": None}
    return {"samples_per_second": rate, "samples": samples, "step_ms": samples / rate * 1e3, **known, **others}


def test_the_table_says_what_several_gpus_keep_of_one():
    run = {"samples_per_second": 1_460.0, "with_evaluations": 1_400.0}
    outcomes = [
        Outcome(Job("bert", 2, "2xH200", True), figures(1_500.0, 96, exposed_communication_ms=1.25, run=run)),
        Outcome(Job("bert", 1, "1xH200", False), figures(800.0, 48, joules=33.6, reserved_bytes=61_250_000_000)),
        Outcome(Job("resnet", 1, "1xH200", False), None, "exit code 2: no"),
    ]
    lines = table(outcomes).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:4]]
    assert [len(row) for row in rows] == [len(COLUMNS)] * 2
    assert rows[0][:-1] == ["bert", "1", "800", "800", "1.000", "60.00", "61.2", "0.7", ""]
    assert rows[1][:-1] == ["bert", "2", "1,500", "750", "0.938", "1.25 of 64.00", "", "", "0.973; evaluated 0.933"]
    assert rows[0][-1] == rows[1][-1] == "998.3 (v4.0, 8 x H200)"
    assert lines[-1] == "resnet-1: failed: exit code 2: no"


def test_published_rates_are_of_known_benchmarks():
    rates = published_rates()
    assert len(rates) >= 9
    assert all(rules_for(benchmark, "3.1.0" if benchmark in ("maskrcnn", "rnnt") else "4.0.0") for benchmark in rates)
    assert rates.keys() <= WORKLOADS.keys()


def test_a_node_of_two_ranks_is_measured(tmp_path, capsys):
    few = ["device=cpu", "bench.steps=1", "bench.warmup_steps=0"]
    words = ["dlrm", "--scale", "test", "--gpus", "1,2", "--output", str(tmp_path)]
    assert cli.run(["measure", *words, *(part for word in few for part in ("--override", word))]) == 0
    said = capsys.readouterr().out
    found = {count: json.loads((tmp_path / f"dlrm-{count}.json").read_text()) for count in (1, 2)}
    assert [found[count]["ranks"] for count in (1, 2)] == [1, 2]
    assert found[2]["samples"] == 2 * found[1]["samples"]
    assert found[1]["samples_per_second"] == pytest.approx(found[1]["samples"] / found[1]["step_ms"] * 1e3)
    assert (tmp_path / "table.md").read_text() in said
    assert said.count("| dlrm |") == 2


def test_a_bench_that_fails_is_named_and_the_others_go_on(tmp_path, capsys):
    words = ["dlrm", "--scale", "test", "--gpus", "1", "--output", str(tmp_path)]
    assert cli.run(["measure", *words, "--override", "device=cpu", "--override", "bench.steps=no"]) == 1
    assert "dlrm-1: failed: exit code" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "no benchmark 'nothing'"),
        (
            ["resnet", "--scale", "7xH200", "--gpus", "1", "--override", "device=cpu"],
            "no benchmark .* has a recipe 7xH200",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_error(words, message):
    with pytest.raises(ConfigError, match=message):
        command.main(words, WORKLOADS)
