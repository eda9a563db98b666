"""``launch.instances=3`` under a real Slurm: three instances of the toy workload, each on a node with two ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from common.launch.series import Series, read_runs
from common.mlperf.compliance import check_lines
from common.mlperf.parsed_log import read_log
from common.submission.registry_evidence import own_contradictions
from tests import toy
from tests.command_line import ENDLESS
from tests.slurm.cluster import CREDENTIAL_SECONDS, Cluster
from tests.slurm.test_launch import ENTRY, SECONDS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3000)]

INSTANCES = 3


def submit(slurm: Cluster, folder: Path, data: Path, *overrides: str, of_a_rank: str = "true", **variables: str) -> int:
    """Submit a job of all instances; results go to ``folder/results``.

    Args:
        of_a_rank: shell command that runs in every rank before it trains, with ``EXPERIMENT`` set.
    """
    python = folder / "python"
    python.write_text(
        "#!/bin/bash\n"
        f"[[ $3 != task || $4 != train ]] || {{ {of_a_rank}; }}\n"
        f'[[ $2 != common.cli ]] || set -- -m {toy.entry([f"benchmark={toy.NAME}"])} "${{@:3}}"\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return slurm.sbatch(
        f"--nodes={INSTANCES}", "--ntasks-per-node=2", "--requeue", f"--output={folder}/job.out", ENTRY,
        f"benchmark={toy.NAME}", "scale=test", "scale.gpus_per_node=2", "device=cpu", f"data_dir={data}",
        f"launch.results={folder}/results", f"launch.instances={INSTANCES}", "launch.doctor=false", *overrides,
        MLPERF_SUITE_PYTHON=str(python), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", DROPCACHE_CMD="true",
        **variables,
    )  # fmt: skip


def the_series(folder: Path) -> Series:
    (series,) = read_runs(folder / "results")
    return series


def outcomes(folder: Path) -> list[tuple[str, int | None]]:
    """Status and exit code of each instance."""
    return [(run.end.status, run.end.exit_code) for run in the_series(folder).experiments if run.end is not None]


def test_three_instances_begin_together_and_end_in_three_accepted_logs(slurm: Cluster, tmp_path: Path, data_of) -> None:
    slow_node = tmp_path / "slow_node"  # which every shell of the job reads first
    slow_node.write_text("[[ $SLURMD_NODENAME != n3 || -z $SLURM_STEP_ID || $0 != */run_and_time.sh ]] || sleep 5\n")
    at_the_gate = (
        f"grep -c ^RANK_WAITS {tmp_path}/results/*_3.log >>{tmp_path}/waiting; "
        f"echo $MLPERF_STAGING_ADDRESS >{tmp_path}/staged_as_$MLPERF_STAGING_INSTANCE.of_$MLPERF_STAGING_INSTANCES"
    )
    staged = f"staging_dir={tmp_path}/staged/${{oc.env:SLURMD_NODENAME,none}}"
    job = submit(slurm, tmp_path, data_of(toy.NAME), staged, of_a_rank=at_the_gate, BASH_ENV=str(slow_node))
    slurm.wait(job, {"COMPLETED"}, 2 * SECONDS)
    assert (tmp_path / "waiting").read_text().split() == ["2"] * 6, "a rank trained before all instances had started"
    series = the_series(tmp_path)
    assert list(own_contradictions(series)) == []
    assert outcomes(tmp_path) == [("success", 0)] * INSTANCES
    seeds = [run.begin.seed for run in series.experiments]
    assert seeds == [seeds[0], seeds[0] + 1, seeds[0] + 2]
    nodes = []
    for run in series.experiments:
        log = read_log(run.log)
        assert check_lines([event.text for event in log.events], "hpc", "3.0.0") == []
        assert (log.value("seed"), log.value("number_of_nodes")) == (run.begin.seed, 1)
        assert (run.folder / run.begin.output_dir / "metrics_rank1.jsonl").exists()
        nodes += re.findall(r"^:::DLPAL none none \d+ 1 (.*)$", run.log.read_text(), re.MULTILINE)
        (duration,) = [event.metadata["staging_duration"] for event in log.events if event.key == "staging_stop"]
        assert duration > 0
    assert nodes == ["n1", "n2", "n3"]
    assert all((tmp_path / "staged" / node / "mlperf-staged" / "staged.json").exists() for node in nodes)
    assert sorted(path.name for path in tmp_path.glob("staged_as_*")) == [f"staged_as_{n}.of_3" for n in range(3)]
    assert len({path.read_text() for path in tmp_path.glob("staged_as_*")}) == 1, "instances meet at several addresses"
    assert "3 of 3 instances, 0 pruned" in slurm.output(job)


def test_an_instance_that_fails_does_not_end_the_others(slurm: Cluster, tmp_path: Path, data_of) -> None:
    failing = "[[ $EXPERIMENT != 2 ]] || exit 3"
    job = submit(slurm, tmp_path, data_of(toy.NAME), of_a_rank=failing)
    slurm.wait(job, {"FAILED"}, 2 * SECONDS)
    assert slurm.field(job, "ExitCode") == "3:0"
    assert outcomes(tmp_path) == [("success", 0), ("not started", 3), ("success", 0)]
    assert "2 of 2 instances, 0 pruned" in slurm.output(job)


def test_a_requeue_closes_the_log_of_every_instance_and_launches_none_again(
    slurm: Cluster, tmp_path: Path, data_of
) -> None:
    job = submit(slurm, tmp_path, data_of(toy.NAME), *ENDLESS)

    def all_have_evaluated(_: str) -> bool:
        logs = list((tmp_path / "results").glob("*.log"))
        return len(logs) == INSTANCES and all("eval_error" in log.read_text() for log in logs)

    slurm.wait_until(job, all_have_evaluated, "an instance has no evaluation", SECONDS)
    slurm.requeue(job)
    slurm.wait(job, {"COMPLETED"}, SECONDS + CREDENTIAL_SECONDS)
    assert slurm.field(job, "Restarts") == "1"
    assert [status for status, _ in outcomes(tmp_path)] == ["aborted"] * INSTANCES
    assert [read_log(run.log).status for run in the_series(tmp_path).experiments] == ["aborted"] * INSTANCES
