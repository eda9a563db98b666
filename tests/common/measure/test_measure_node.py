"""What a node measures, beside what, and the table of it."""

from __future__ import annotations

import fcntl
import json
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import WORKLOADS
from common import cli
from common.config.composition import compose
from common.distributed.launcher import await_turn
from common.errors import ConfigError
from common.measure import command, node
from common.measure.arguments import counts_up_to, parser_of
from common.measure.jobs import OVERRIDES, Job, jobs_of
from common.measure.node import Node, share_of
from common.measure.table import ATTRIBUTION, COLUMNS, MeasuredCopy, published_rates, read_results, table
from common.mlperf.rules import rules_for
from common.run.bench_figures import RankFigures

SCALES = {"resnet": ["1xH200", "2xH200", "8xH200"], "bert": ["1xH200", "8xH200"], "dlrm": ["1xH200"]}


def test_a_number_of_gpus_has_its_own_recipe_or_fewer_ranks_of_the_largest():
    jobs = jobs_of(SCALES, "8xH200", [1, 2, 8], {"resnet"}, 8)
    assert [(job.benchmark, job.gpus, job.scale, job.whole_run, job.copies) for job in jobs] == [
        ("bert", 8, "8xH200", False, 1),
        ("bert", 1, "1xH200", False, 8),
        ("resnet", 8, "8xH200", True, 1),
        ("resnet", 1, "1xH200", False, 8),
        ("bert", 2, "8xH200", False, 1),
        ("resnet", 2, "2xH200", False, 1),
    ]
    ranks = ["scale.nodes=1", "scale.gpus_per_node=2"]
    assert jobs[4].words() == ["benchmark=bert", "scale=8xH200", *ranks, "bench.only=step", "bench.traffic=both"]
    assert jobs[2].words() == ["benchmark=resnet", "scale=8xH200", "bench.traffic=both"]
    assert jobs[1].words() == ["benchmark=bert", "scale=1xH200", "bench.only=step"]


def test_one_gpu_that_nothing_is_compared_with_is_measured_once():
    assert [job.copies for job in jobs_of(SCALES, "1xH200", [1], (), 8)] == [1, 1, 1]


@pytest.mark.parametrize("benchmark", OVERRIDES)
def test_overrides_for_measuring_are_known_options(benchmark):
    job = Job(benchmark, 1, "1xH200", False)
    assert set(OVERRIDES[benchmark]) <= set(job.words())
    cli.load(compose(job.words()))
    assert not set(OVERRIDES[benchmark]) & set(Job(benchmark, 1, "test", False).words())


class Scripted:
    """Stands in for processes that end in a given order, one whenever nothing else can be started.

    Attributes:
        beside: at each end, those that had their turn.
        ahead: at each end, those that waited for it.
        places: the GPUs of each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, order: Sequence[str]) -> None:
        self.order, self.beside, self.ahead, self.places = list(order), [], [], {}
        self._going: dict[str, str] = {}
        monkeypatch.setattr(node.subprocess, "Popen", self._popen)
        monkeypatch.setattr(node.time, "sleep", self._end_one)
        monkeypatch.setattr(node, "_end", lambda process: None)

    def _popen(self, command: list[str], *, env: Mapping[str, str], **_: object) -> Scripted.Process:
        words = dict(word.split("=", 1) for word in command[4:])
        name = Path(words["bench.report"]).stem
        self._going[name] = env["MLPERF_SUITE_TURN"]
        self.places[name] = [int(place) for place in env["CUDA_VISIBLE_DEVICES"].split(",")]
        Path(words["bench.report"]).write_text("{}")
        return self.Process(self, name)

    def _end_one(self, seconds: float) -> None:
        if self._going:
            ahead = [name for name, turn in sorted(self._going.items()) if locked(turn)]
            self.ahead.append(ahead)
            self.beside.append(sorted(set(self._going) - set(ahead)))
            del self._going[self.order.pop(0)]

    class Process:
        """One of them."""

        pid = 0

        def __init__(self, script: Scripted, name: str) -> None:
            self.script, self.name = script, name

        @property
        def returncode(self) -> int:
            return 0

        def poll(self) -> int | None:
            return None if self.name in self.script._going else 0


def locked(path: str) -> bool:
    """Whether who waits for this turn would still wait."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture
def eight(tmp_path):
    def made(apart: bool = False) -> Node:
        return Node(8, [str(number) for number in range(8)], tmp_path, 60.0, lambda job: [], apart)

    return made


def test_the_largest_come_first_and_smaller_ones_fill_what_is_free(monkeypatch, eight):
    jobs = jobs_of(SCALES, "8xH200", [2, 4, 8], (), 8)
    assert [job.gpus for job in jobs] == [8, 8, 4, 4, 2, 2]
    ends = ["resnet-8", "resnet-4", "bert-2", "resnet-2", "bert-4"]
    script = Scripted(monkeypatch, ["bert-8", *ends])
    assert [outcome.job.name for outcome in eight().measure(jobs)] == ["bert-8", *ends]
    assert script.beside[:3] == [["bert-8"], ["resnet-8"], ["bert-4", "resnet-4"]]
    assert script.beside[3] == ["bert-2", "bert-4", "resnet-2"]
    assert script.places["bert-2"] == script.places["resnet-4"][:2]


def test_all_gpus_are_measured_alone_at_the_same_time_each_in_its_own_process(monkeypatch, tmp_path):
    singles = ["bert-1-gpu0", "bert-1-gpu1"]
    script = Scripted(monkeypatch, ["bert-2", *singles, "resnet-2", "resnet-1-gpu1", "resnet-1-gpu0"])
    two = Node(2, ["4", "7"], tmp_path, 60.0, lambda job: [])
    jobs = jobs_of({name: SCALES[name] for name in ("bert", "resnet")}, "8xH200", [1, 2], (), 2)
    assert [(outcome.name, outcome.places) for outcome in two.measure(jobs)] == [
        ("bert-2", (0, 1)),
        ("bert-1 (GPU 0)", (0,)),
        ("bert-1 (GPU 1)", (1,)),
        ("resnet-2", (0, 1)),
        ("resnet-1 (GPU 1)", (1,)),
        ("resnet-1 (GPU 0)", (0,)),
    ]
    assert script.beside[:4] == [["bert-2"], singles, singles[1:], ["resnet-2"]]
    assert [script.places[name] for name in ("bert-2", *singles)] == [[4, 7], [4], [7]]


def test_the_next_benchmark_imports_but_waits_for_its_turn(monkeypatch, tmp_path):
    script = Scripted(monkeypatch, ["bert-2", "bert-1-gpu0", "bert-1-gpu1", "resnet-2"])
    two = Node(2, ["0", "1"], tmp_path, 60.0, lambda job: [])
    jobs = jobs_of({"bert": SCALES["bert"], "resnet": ["8xH200"]}, "8xH200", [1, 2], (), 2)[:3]
    assert len(list(two.measure(jobs))) == 4
    assert script.ahead == [["bert-1-gpu0", "bert-1-gpu1"], ["resnet-2"], ["resnet-2"], []]
    assert list(tmp_path.glob("mlperf-suite-*")) == []


def test_a_rank_waits_until_its_turn(monkeypatch, tmp_path):
    turn, begun, seen = tmp_path / "turn", threading.Event(), []
    turn.touch()
    monkeypatch.setenv("MLPERF_SUITE_TURN", str(turn))
    with open(turn, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rank = threading.Thread(target=lambda: (await_turn(), seen.append(begun.is_set())))
        rank.start()
        begun.set()
    rank.join(200)
    await_turn()  # who comes later does not wait at all
    assert seen == [True]


def test_a_whole_run_has_the_node_for_itself(monkeypatch, eight):
    jobs = [*jobs_of(SCALES, "8xH200", [2], ("bert", "resnet"), 8), *jobs_of(SCALES, "8xH200", [1], (), 8)]
    script = Scripted(monkeypatch, [job.name for job in jobs])
    assert all(outcome.figures == {} for outcome in eight().measure(jobs))
    assert script.beside == [["bert-2"], ["resnet-2"], ["bert-1", "resnet-1"], ["resnet-1"]]
    assert [script.places[name] for name in ("bert-2", "resnet-1")] == [[0, 1], [1]]
    assert script.ahead == [[], [], [], []]  # imports would take processors from its reader


def test_apart_nothing_runs_beside_another(monkeypatch, eight):
    jobs = jobs_of(SCALES, "8xH200", [2, 4], (), 8)
    script = Scripted(monkeypatch, [job.name for job in jobs])
    assert len(list(eight(apart=True).measure(jobs))) == 4
    assert [len(names) for names in script.beside] == [1, 1, 1, 1]
    assert script.ahead == [[], [], [], []]


@pytest.mark.parametrize("text", ["x", "1,", "0", "-1,2"])
def test_numbers_of_gpus_that_are_none_are_a_plain_sentence(capsys, text):
    with pytest.raises(SystemExit):
        parser_of("measure", "", "measured").parse_args([f"--gpus={text}"])
    expected = f"argument --gpus: {text}: expected numbers from 1 on, with commas between them\n"
    assert capsys.readouterr().err.endswith(expected)


def test_more_gpus_than_there_are_is_refused(tmp_path):
    few = Node(4, list("0123"), tmp_path, 60.0, lambda job: [])
    with pytest.raises(ValueError, match="bert-8 needs 8 GPUs, and there are 4"):
        next(few.measure([Job("bert", 8, "8xH200", False)]))


SLEEPER = "import time; time.sleep(600)"


def of_sleepers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float) -> tuple[Node, list[Any]]:
    """A node whose benches never end, and their processes."""
    started: list[Any] = []
    popen = subprocess.Popen

    def sleep(command: list[str], **options: Any) -> Any:
        started.append(popen([sys.executable, "-c", SLEEPER], **options))
        return started[-1]

    monkeypatch.setattr(node.subprocess, "Popen", sleep)
    return Node(2, [], tmp_path, seconds, lambda job: []), started


def test_a_measurement_that_takes_too_long_is_ended(monkeypatch, tmp_path):
    sleepers, started = of_sleepers(monkeypatch, tmp_path, 0.2)
    outcomes = list(sleepers.measure([Job("dlrm", 1, "test", False)]))
    assert [outcome.figures for outcome in outcomes] == [None]
    assert "took too long" in outcomes[0].failure
    assert started[0].poll() is not None


def test_jobs_that_have_not_started_within_the_time_of_all_jobs_fail(monkeypatch, tmp_path):
    sleepers, started = of_sleepers(monkeypatch, tmp_path, 600.0)
    jobs = [Job("dlrm", 2, "test", False), Job("bert", 1, "test", False, copies=2, variant="fp32")]
    outcomes = {each.name: each.failure for each in sleepers.measure(jobs, within=0.3)}
    assert outcomes["bert-1-fp32"] == "not started within 0 s"
    assert "took too long" in outcomes["dlrm-2"]
    assert all(process.poll() is not None for process in started)


@pytest.mark.parametrize(("variant", "waiting", "seconds"), [("", 5, 300.0), ("fp32", 4, 100.0), ("fp32", 0, 300.0)])
def test_a_slow_variant_leaves_time_for_those_that_wait(variant, waiting, seconds):
    assert share_of(Job("dlrm", 1, "test", False, variant=variant), 300.0, waiting) == seconds


def test_a_variant_has_its_own_settings_environment_and_prefix(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(node.subprocess, "Popen", lambda command, *, env, **_: found.append((command, env)))
    own = {"settings": ("precision=fp32",), "environment": {"A": "1"}, "prefix": ("ncu", "--csv")}
    job = Job("dlrm", 1, "1xH200", False, variant="fp32", **own)
    Node(1, ["3"], tmp_path, 60.0, lambda job: ["bench.seconds=1"])._copy(job, (0,), "turn")
    ((words, environment),) = found
    assert job.name == "dlrm-1-fp32"
    assert words[:3] == ["ncu", "--csv", sys.executable]
    assert words[-3:] == ["precision=fp32", f"bench.report={tmp_path}/dlrm-1-fp32.json", "bench.seconds=1"]
    assert (environment["A"], environment["CUDA_VISIBLE_DEVICES"]) == ("1", "3")


def test_a_failure_that_is_seen_after_the_time_limit_keeps_its_exit_code(monkeypatch, tmp_path):
    popen = subprocess.Popen

    def fail(command: list[str], **options: Any) -> Any:
        started = popen([sys.executable, "-c", "print('no memory'); raise SystemExit(3)"], **options)
        started.wait()
        return started

    monkeypatch.setattr(node.subprocess, "Popen", fail)
    outcomes = list(Node(2, [], tmp_path, 0.0, lambda job: []).measure([Job("dlrm", 1, "test", False)]))
    assert [outcome.failure.partition(" (")[0] for outcome in outcomes] == ["exit code 3: no memory"]


def test_sigterm_ends_what_runs(monkeypatch, tmp_path):
    sleepers, started = of_sleepers(monkeypatch, tmp_path, 600.0)
    monkeypatch.setattr(node.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        list(sleepers.measure([Job("dlrm", 1, "test", False), Job("bert", 1, "test", False)]))
    assert ended.value.code == 128 + signal.SIGTERM
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)
    assert signal.getsignal(signal.SIGTERM) is before


def test_counts_are_powers_of_two_and_all():
    assert [counts_up_to(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def figures(rate: float, samples: int, *ranks: RankFigures, **others):
    step_ms = samples / rate * 1e3
    known = {"joules": None, "reserved_bytes": None, "run": None, "updated": True, "without_traffic": None}
    by_rank = [asdict(rank) for rank in ranks or [RankFigures(step_ms)]]
    measured = {"step_ms": step_ms, "repetitions_ms": [step_ms], "by_rank": by_rank}
    return {"samples_per_second": rate, "samples": samples, **measured, **known, **others}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_says_what_several_gpus_keep_of_one():
    run = {"samples_per_second": 1_460.0, "with_evaluations": 1_400.0}
    ranks = RankFigures(64.0, 59.5, 4.75, 1.25, 44.8, 700.0, 1455.0), RankFigures(64.0, 60.0, 3.5, 1.0)
    spread = {"repetitions_ms": [63.0, 64.0, 64.6], "without_traffic": {"step_ms": 62.5}}
    single, each = Job("bert", 1, "1xH200", False, copies=2), {"joules": 33.6, "reserved_bytes": 61_250_000_000}
    outcomes = [
        MeasuredCopy(Job("bert", 2, "2xH200", True), figures(1_500.0, 96, *ranks, **spread, run=run), "", (0, 1)),
        MeasuredCopy(single, figures(800.0, 48, **each), "", (1,)),
        MeasuredCopy(single, figures(768.0, 48), "", (0,)),  # 62.5 ms: the slower of the two
        MeasuredCopy(Job("resnet", 1, "1xH200", False), None, "exit code 2: no"),
        MeasuredCopy(Job("unet3d", 1, "1xH200", False), figures(90.0, 7, updated=False)),
    ]
    lines = table(outcomes).splitlines()
    rows = [cells(line) for line in lines[2:5]]
    assert [len(row) for row in rows] == [len(COLUMNS)] * 3
    assert rows[0][:-1] == ["bert", "1 (GPU 0)", "768", "768", "", "62.50", *[""] * 9]
    assert rows[1][:-1] == ["bert", "1 (GPU 1)", "800", "800", "", "60.00", *[""] * 6, "61.2", "0.7", ""]
    assert rows[2][:7] == ["bert", "2", "1,500", "750", "0.977", "64.00", "2.5%"]
    assert rows[2][7:12] == ["59.50, 60.00", "4.75, 3.50", "1.25, 1.00", "1455", "700"]
    assert rows[2][12:-1] == ["", "", "0.973; evaluated 0.933"]
    assert {row[-1] for row in rows} == {"998.3 (v4.0, 8 x H200)"}
    assert lines[-2] == "resnet-1: failed: exit code 2: no"
    assert lines[-1].startswith("unet3d-1: not valid: the last gradients were not finite")
    title, lost = (cells(line) for line in (lines[7], lines[9]))
    assert title == list(ATTRIBUTION)
    assert lost == ["bert", "2", "62.50, 60.00", "64.00", "62.50", "2.50", "0.00", "1.50", "1.25"]


def test_a_gpu_that_is_missing_or_has_another_batch_is_compared_with_nothing():
    single = Job("bert", 1, "1xH200", False, copies=2)
    both = MeasuredCopy(
        Job("bert", 2, "2xH200", False), figures(1_500.0, 96, without_traffic={"step_ms": 9.0}), "", (0, 1)
    )
    one = MeasuredCopy(single, figures(800.0, 48), "", (0,))
    assert cells(table([both, one]).splitlines()[3])[4] == ""
    others = [MeasuredCopy(single, figures(rate, 24), "", (place,)) for place, rate in enumerate((768.0, 900.0))]
    lines = table([both, *others]).splitlines()
    assert cells(lines[4])[4] == "0.977"  # rates can be compared
    assert len(lines) == 5


def test_many_ranks_have_the_smallest_and_the_largest_figure():
    ranks = [RankFigures(64.0, 50.0 + rank, power_w=690.0 + rank) for rank in range(8)]
    row = cells(table([MeasuredCopy(Job("bert", 8, "8xH200", False), figures(6_000.0, 384, *ranks))]).splitlines()[2])
    assert (row[7], row[11]) == ("50.00 to 57.00", "690 to 697")


def test_published_rates_are_of_known_benchmarks():
    rates = published_rates()
    assert len(rates) >= 9
    rounds = {
        "maskrcnn": "3.1.0",
        "rnnt": "3.1.0",
        **dict.fromkeys(("cosmoflow", "deepcam", "oc20", "openfold"), "3.0.0"),
    }
    assert all(rules_for(benchmark, rounds.get(benchmark, "4.0.0")) for benchmark in rates)
    assert rates.keys() <= WORKLOADS.keys()
    assert "8 x H200" in rates["bert"]
    assert "8 x H100" in rates["rnnt"]


def test_a_row_stands_beside_the_rate_of_its_recipes_accelerator():
    measured = [MeasuredCopy(Job("bert", 2, scale, False), figures(200.0, 8)) for scale in ("4xH200", "8xH100")]
    h200, h100 = table(measured).splitlines()[2:]
    assert "8 x H200" in h200
    assert "8 x H100" in h100
    (only,) = table([MeasuredCopy(Job("rnnt", 2, "4xH200", False), figures(200.0, 8))]).splitlines()[2:]
    assert "8 x H100" in only  # nobody has published another


@pytest.mark.slow
def test_a_node_of_two_ranks_is_measured(tmp_path, capsys):
    few = ["device=cpu", "bench.steps=1", "bench.warmup_steps=0"]
    words = ["dlrm", "--scale", "test", "--gpus", "1,2", "--seconds", "900", "--output", str(tmp_path)]
    code = cli.run(["measure", *words, *(part for word in few for part in ("--override", word))])
    said = capsys.readouterr().out
    assert code == 0, "\n".join([said, *(path.read_text() for path in sorted(tmp_path.glob("*.log")))])
    found = [json.loads((tmp_path / f"dlrm-{name}.json").read_text()) for name in ("1-gpu0", "1-gpu1", "2")]
    assert [one["ranks"] for one in found] == [1, 1, 2]
    assert found[2]["samples"] == 2 * found[0]["samples"] == 2 * found[1]["samples"]
    assert [len(one["by_rank"]) for one in found] == [1, 1, 2]
    assert [len(one["repetitions_ms"]) for one in found] == [3, 3, 3]
    assert [one["without_traffic"] is None for one in found] == [True, True, False]
    assert found[0]["samples_per_second"] == pytest.approx(found[0]["samples"] / found[0]["step_ms"] * 1e3)
    assert (tmp_path / "table.md").read_text() in said
    assert '"command": "mlperf-suite measure dlrm --scale test' in (tmp_path / "results.json").read_text()
    assert table(read_results(tmp_path / "results.json")) in said
    assert said.count("| dlrm |") == 4
    slower = max(one["step_ms"] for one in found[:2])
    assert f" {slower / found[2]['step_ms']:.3f} |" in said


@pytest.mark.slow
def test_data_and_output_may_be_in_folders_of_any_name(tmp_path, capsys, data_of):
    folder = tmp_path / "jürgen's (runs), #1 = a"
    shutil.copytree(data_of("dlrm"), folder / "dlrm")
    few = ["device=cpu", "bench.steps=1", "bench.warmup_steps=0"]
    words = ["dlrm", "--scale", "test", "--gpus", "1", "--data", str(folder), "--output", str(folder / "measured")]
    code = cli.run(["measure", *words, *(part for word in few for part in ("--override", word))])
    said = capsys.readouterr().out
    assert code == 0, said
    assert json.loads((folder / "measured" / "dlrm-1.json").read_text())["run"]["samples_per_second"] > 0
    (bench,) = [line.partition(": bench ")[2] for line in said.splitlines() if ": bench " in line]
    assert f'data_dir="{folder}/dlrm"' in shlex.split(bench)


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
            "resnet has no scale 7xH200; it has ",
        ),
        (["bert", "dlrm", "--scale", "demo1"], "bert has no scale demo1; it has .*; did you mean demo"),
        (["--seconds", "nan"], "--seconds=nan: expected seconds"),
    ],
)
def test_what_cannot_be_measured_is_one_error(words, message):
    with pytest.raises(ConfigError, match=message):
        command.main(words, WORKLOADS)


def test_an_output_that_is_a_file_is_one_error(tmp_path):
    path = tmp_path / "results"
    path.touch()
    words = ["resnet", "--scale", "test", "--gpus", "1", "--output", str(path), "--override", "device=cpu"]
    with pytest.raises(ConfigError, match=f"--output={path} cannot be made: File exists"):
        command.main(words, WORKLOADS)


@pytest.mark.parametrize(
    ("visible", "words", "message"),
    [
        ("", [], "no GPU was found; .*device=cpu"),
        ("5", ["--gpus=2"], "1 GPUs are here, too few for --gpus=2"),
        ("5", ["--override=device=cpu"], "--gpus is missing"),
    ],
)
def test_gpus_that_are_not_there_are_one_error(monkeypatch, visible, words, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=message):
        command.main(words, WORKLOADS)
