"""The command ``schedule``: its file, its tables and its Slurm script."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import cli
from common.errors import ConfigError
from common.measure.jobs import Job
from common.measure.table import MeasuredCopy, write_results

JOBS = """
jobs:
  a: {seconds: {1: 7200, 2: 3600}, command: "COMMAND {gpus}"}
  b: {seconds: {1: 3600, 2: 3500}, command: "COMMAND {gpus}"}
  c: {seconds: {1: 3600, 2: 3500}, command: "COMMAND {gpus}"}
"""


def schedule(tmp_path, capsys, text, *options):
    """Return exit code, standard output and error messages of the command."""
    file = tmp_path / "jobs.yaml"
    file.write_text(text)
    code = cli.run(["schedule", str(file), *map(str, options)])
    return code, *capsys.readouterr()


def test_the_tables_compare_the_schedule_with_two_simple_ones(tmp_path, capsys):
    code, out, _ = schedule(tmp_path, capsys, JOBS, "--gpus", 2, "--json", tmp_path / "out.json")
    assert code == 0
    head, _, _, *rows = out.splitlines()
    assert head == "3 jobs on 2 GPUs, smallest makespan"
    values = {" ".join(row.split()[:-2]): row.split()[-2] for row in rows[:3]}
    assert values == {"optimal": "2.00", "all GPUs, one job at a time": "2.94", "one GPU for each job": "2.00"}
    found = json.loads((tmp_path / "out.json").read_text())
    assert max(job["end"] for job in found["schedules"]["optimal"]["jobs"]) == 7200
    assert found["curves"]["a"] == {"1": 7200, "2": 3600}


def test_times_follow_from_the_median_rate_of_valid_measurements(tmp_path, capsys):
    def copy(gpus, rate, valid=True, place=0):
        figures = {"samples_per_second": rate, "updated": valid}
        return MeasuredCopy(Job("bert", gpus, f"{gpus}xH200", False), figures, "", (place,))

    copies = [copy(1, 9.0), copy(1, 10.0, place=1), copy(1, 12.0, place=2), copy(1, 99.0, False, 3), copy(2, 16.0)]
    failed = MeasuredCopy(Job("bert", 4, "4xH200", False), None, "out of memory", (0,))
    write_results(tmp_path / "results.json", "mlperf-suite measure", [*copies, failed])
    text = "jobs: {one: {measured: results.json, benchmark: bert, samples: 3600.0}}"
    assert schedule(tmp_path, capsys, text, "--json", tmp_path / "out.json")[0] == 0
    assert json.loads((tmp_path / "out.json").read_text())["curves"] == {"one": {"1": 360.0, "2": 225.0}}


def test_times_are_those_of_the_best_estimates(tmp_path, capsys):
    def row(gpus, seconds, best=True, benchmark="bert"):
        return {"benchmark": benchmark, "layout": {"gpus": gpus}, "seconds": seconds, "best": best}

    rows = [row(1, 360.0), row(1, 350.0, best=False), row(2, 200.0), row(4, 9.0, benchmark="resnet")]
    (tmp_path / "bert.json").write_text(json.dumps({"estimates": rows}))
    text = "jobs: {one: {estimated: bert.json, benchmark: bert}}"
    assert schedule(tmp_path, capsys, text, "--json", tmp_path / "out.json")[0] == 0
    assert json.loads((tmp_path / "out.json").read_text())["curves"] == {"one": {"1": 360.0, "2": 200.0}}
    code, _, errors = schedule(tmp_path, capsys, "jobs: {dlrm: {estimated: bert.json}}")
    assert (code, "has no estimate of dlrm" in errors) == (ConfigError.exit_code, True)
    code, _, errors = schedule(tmp_path, capsys, "jobs: {one: {estimated: jobs.yaml}}")
    assert "is no file of `mlperf-suite estimate --json`" in errors


MISTAKES = [
    ("jobs: {}", "jobs: none"),
    ("jobs: [a]", "jobs=['a']: expected a section of keys"),
    ("jobs: {a: {}}", "jobs.a.seconds, measured, estimated: give one of them"),
    ("jobs: {a: {seconds: {0: 1.0}}}", "jobs.a.seconds={0: 1.0}: expected times by number of GPUs, from 1 on"),
    ("jobs: {a: {seconds: {1: -1.0}}}", "jobs.a.seconds.1=-1.0: positive and finite"),
    ("jobs: {a: {measured: results.json}}", "jobs.a.samples: belongs to measured, which needs it"),
    ("jobs: {a: {measured: none.json, samples: 1.0}}", "none.json has no results of `mlperf-suite measure`"),
    ("jobs: {a: {seconds: {16: 1.0}}}", "a needs 16 GPUs; there are 8"),
    ("jobs: {a b: {seconds: {1: 1.0}}}", "'a b' names a job: letters, digits and _ only"),
    ("jobs: {a: {second: {1: 1.0}}}", "jobs.a.second: unknown key"),
    ("jobs: {a: [", "is no valid YAML"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_in_the_file_is_one_clear_error(tmp_path, capsys, text, message):
    code, out, error = schedule(tmp_path, capsys, text)
    assert (code, out) == (2, "")
    assert "jobs.yaml" in error
    assert message in error


@pytest.mark.parametrize(
    ("rate", "gpus"), [(0, 1), (float("inf"), 1), (True, 1), ("9", 1), (None, 1), (9.0, 0), (9.0, "1"), (9.0, True)]
)
def test_measurements_with_wrong_numbers_are_refused(rate, gpus, tmp_path, capsys):
    copy = MeasuredCopy(Job("a", gpus, "1xH200", False), {"samples_per_second": rate, "updated": True}, "", (0,))
    write_results(tmp_path / "results.json", "mlperf-suite measure", [copy])
    text = "jobs: {a: {measured: results.json, samples: 1.0}}"
    code, _, error = schedule(tmp_path, capsys, text)
    assert code == 2
    assert "results.json has no results of `mlperf-suite measure`: " in error


@pytest.mark.parametrize(("seconds", "gpus"), [(0.0, 1), (-1.0, 1), ("60", 1), (60.0, 0), (60.0, "1")])
def test_estimates_with_wrong_numbers_are_refused(seconds, gpus, tmp_path, capsys):
    row = {"benchmark": "a", "layout": {"gpus": gpus}, "seconds": seconds, "best": True}
    (tmp_path / "a.json").write_text(json.dumps({"estimates": [row]}))
    code, _, error = schedule(tmp_path, capsys, "jobs: {a: {estimated: a.json}}")
    assert code == 2
    assert "a.json is no file of `mlperf-suite estimate --json`: " in error


def test_more_gpus_than_a_node_can_have_are_refused(tmp_path, capsys):
    code, _, error = schedule(tmp_path, capsys, JOBS, "--gpus", 10**9)
    assert code == 2
    assert "schedule: --gpus=1000000000: expected from 1 to 1,024" in error


def test_measurements_without_the_benchmark_are_refused(tmp_path, capsys):
    write_results(tmp_path / "results.json", "mlperf-suite measure", [])
    _, _, error = schedule(tmp_path, capsys, "jobs: {a: {measured: results.json, samples: 1.0}}")
    assert "results.json has no valid measurement of a" in error


def test_a_script_needs_commands(tmp_path, capsys):
    text = "jobs: {a: {seconds: {1: 1.0}}}"
    code, _, error = schedule(tmp_path, capsys, text, "--script", tmp_path / "run.sub")
    assert code == 2
    assert "jobs.a.command: missing; --script needs it" in error


@pytest.mark.parametrize("failing", [None, "b"])
def test_the_script_runs_every_job_on_its_own_gpus(tmp_path, capsys, failing):
    command = tmp_path / "command.sh"
    # Takes a folder for each of its GPUs; this fails while another job has it.
    command.write_text(
        'for gpu in ${CUDA_VISIBLE_DEVICES//,/ }; do mkdir "gpu$gpu" || exit 9; done\n'
        'echo "$1 GPUs: $CUDA_VISIBLE_DEVICES"\n'
        'for gpu in ${CUDA_VISIBLE_DEVICES//,/ }; do rmdir "gpu$gpu"; done\n'
    )
    text = JOBS.replace("COMMAND", f"bash {command}")
    if failing:
        begin, end = text.split(f"  {failing}: ")
        text = f"{begin}  {failing}: {end.replace('bash', 'exit 3; bash', 1)}"
    script = tmp_path / "run.sub"
    assert schedule(tmp_path, capsys, text, "--gpus", 2, "--script", script)[0] == 0
    assert "#SBATCH --gpus-per-node=2" in script.read_text()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "4,7"}
    done = subprocess.run(["bash", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    outputs = {name: (tmp_path / f"{name}.out").read_text() for name in "abc"}
    assert (done.returncode, done.stderr) == ((1, "failed: b\n") if failing else (0, ""))
    used = {"1 GPUs: 4\n", "1 GPUs: 7\n", "2 GPUs: 4,7\n"}
    assert all(text in used for name, text in outputs.items() if name != failing)


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_the_script_passes_shellcheck(tmp_path, capsys):
    schedule(tmp_path, capsys, JOBS, "--gpus", 2, "--script", tmp_path / "run.sub")
    done = subprocess.run([SHELLCHECK, tmp_path / "run.sub"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
