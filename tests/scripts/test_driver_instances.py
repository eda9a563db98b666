"""``launch.instances``: the driver gives each instance its own nodes, and lets the ranks of all begin together.

Programs take the place of Slurm's: ``srun`` runs two tasks on this machine, which do not train.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from common.launch.series import read_runs
from tests import toy
from tests.conftest import Finished
from tests.scripts.driver import planned, script

pytestmark = pytest.mark.timeout(600)

TWO_OF_TWO_NODES = (
    f"benchmark={toy.NAME}", "scale=test", "scale.nodes=2", "device=cpu", "launch.instances=2", "launch.doctor=false",
    "launch.clear_caches=false",
)  # fmt: skip
SCONTROL = """#!/bin/bash
case $* in
  "show hostnames n[1-4]") printf 'n%d\\n' 1 2 3 4 ;;
  *" show node n"?) echo "NodeName=$4 Arch=x86_64 NodeAddr=10.0.0.${4#n} State=ALLOCATED" ;;
esac
"""
SRUN = """#!/bin/bash
echo "$EXPERIMENT $MASTER_ADDR $*" >>{folder}/steps
{of_a_step}
while [[ $1 == --* ]]; do shift; done
{{ tee >("$@" >&3) | "$@"; }} 3>&1
"""
"""Like the real one, it gives every task all of its standard input."""


def toy_python(folder: Path, forking: Path) -> Path:
    """Write a Python that knows the toy workload and trains nothing; it notes the ranks in the file ``ranks``."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/bash\n[[ $3 != task ]] || {{ echo "$EXPERIMENT" >>{folder}/ranks; exit 0; }}\n'
        f'[[ $2 != common.cli ]] || set -- -m {toy.entry([f"benchmark={toy.NAME}"])} "${{@:3}}"\n'
        f'exec {forking} "$@"\n'
    )
    python.chmod(0o755)
    return python


def run_job(folder: Path, forking: Path, data: Path, *overrides: str, of_a_step: str = ":", **more: str) -> Finished:
    """Run the driver as the job 7 on n1 to n4; ``of_a_step`` is a shell command before the tasks of a step."""
    (folder / "bin").mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN.format(folder=folder, of_a_step=of_a_step)}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return script(
        "run.sub", *TWO_OF_TWO_NODES, f"data_dir={data}", f"launch.results={folder}/results", *overrides,
        cwd=folder, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-4]", MLPERF_SUITE_PYTHON=str(toy_python(folder, forking)),
        PATH=f"{folder}/bin:/usr/bin:/bin", **more,
    )  # fmt: skip


def test_each_instance_has_its_own_nodes_and_address_and_one_that_cannot_start_holds_up_no_other(
    tmp_path: Path, forking: Path, data_of
) -> None:
    done = run_job(tmp_path, forking, data_of(toy.NAME), of_a_step="[[ $EXPERIMENT != 1 ]] || exit 4")
    assert done.code == 4, done.errors
    steps = sorted(line.split() for line in (tmp_path / "steps").read_text().splitlines())
    assert [words[:2] for words in steps] == [["1", "10.0.0.1"], ["2", "10.0.0.3"]]
    nodes = [[word for word in words if word.startswith("--node")] for words in steps]
    assert nodes == [["--nodes=2", "--nodelist=n1,n2"], ["--nodes=2", "--nodelist=n3,n4"]]
    assert (tmp_path / "ranks").read_text().split() == ["2", "2"]
    (series,) = read_runs(tmp_path / "results")
    assert [run.end.exit_code for run in series.experiments if run.end] == [4, 0]
    assert [run.begin.scale for run in series.experiments] == ["2x1", "2x1"]


def test_no_rank_begins_after_a_signal(tmp_path: Path, forking: Path, data_of) -> None:
    note_driver = f"launch.hooks.pre_run=['echo $PPID >{tmp_path}/driver']"
    stop = f"[[ $EXPERIMENT != 1 ]] || kill -TERM $(<{tmp_path}/driver)"
    done = run_job(tmp_path, forking, data_of(toy.NAME), note_driver, of_a_step=stop)
    assert done.code == 143
    assert not (tmp_path / "ranks").exists()
    for log in (tmp_path / "results").glob("*.log"):
        assert log.read_text().count("the driver was stopped before all instances had started") == 2


@pytest.mark.parametrize("numbers", [(1,), (1, 2)], ids=["run", "instances"])
def test_a_limit_before_run_start_ends_the_series(
    tmp_path: Path, forking: Path, data_of, numbers: tuple[int, ...]
) -> None:
    shape = (
        f"launch.instances={len(numbers)}",
        f"scale.nodes={4 // len(numbers)}",
        "launch.run_minutes=1",
        "micro_batch=4",
    )
    limit = "echo 'slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***'"
    of_a_step = f"[[ $EXPERIMENT -le {len(numbers)} ]] || exit 4; {limit}; exit 143"
    done = run_job(tmp_path, forking, data_of(toy.NAME), *shape, of_a_step=of_a_step)
    assert done.code == 143, done.errors
    assert "reached launch.run_minutes=1 before its run_start: no other begins" in done.errors
    assert "not queued again" not in done.errors
    (series,) = read_runs(tmp_path / "results")
    ends = [(run.begin.experiment, run.end.status) for run in series.experiments if run.end]
    assert ends == [(number, "not started") for number in numbers]


def test_an_address_for_all_instances_is_refused(tmp_path: Path, forking: Path, data_of) -> None:
    done = run_job(tmp_path, forking, data_of(toy.NAME), MASTER_ADDR="n1")
    assert done.code == 2
    assert "MASTER_ADDR=n1 is one address, and each of the 2 instances has its own" in done.errors
    assert not (tmp_path / "results" / "runs.jsonl").exists()


def test_a_dry_run_shows_an_instance_in_a_container_that_reads_its_gate(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, forking: Path
) -> None:
    python = toy_python(tmp_path_factory.mktemp("python"), forking)
    docker = ("launch.container=docker", "launch.image=suite:vision")
    commands = planned(tmp_path, *TWO_OF_TWO_NODES, *docker, MLPERF_SUITE_PYTHON=str(python))
    (training,) = [words for words in commands if "train" in words]
    assert {"--ntasks=2", "--nodes=2", "--nodelist=NODE1,NODE2", "--interactive", "MLPERF_GATE"} <= set(training)


def test_instances_need_a_job(tmp_path: Path, forking: Path, data_of) -> None:
    data, python = f"data_dir={data_of(toy.NAME)}", str(toy_python(tmp_path, forking))
    done = script("run.sub", *TWO_OF_TWO_NODES, data, cwd=tmp_path, MLPERF_SUITE_PYTHON=python)
    assert done.code == 2
    assert "4 nodes need a Slurm job: sbatch -N4" in done.errors
