"""Results as a launcher writes them: ``runs.jsonl``, logs and the file of `doctor`; and the repository of the code."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from closed_logs import RECIPES, closed_log, drawn_convergence

SERIES = "2026-05-01T12-00-00"
SYSTEM = "2xH200_torch"
FIRST_LAUNCH = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)
BETWEEN_LAUNCHES = datetime.timedelta(minutes=90)
FIRST_SEED = 4_000_000_000_000

FACTS: dict[str, Any] = {
    "host_processor_model_name": "Intel(R) Xeon(R) Platinum 8480C",
    "host_processors_per_node": "2",
    "host_processor_core_count": "56",
    "host_processor_vcpu_count": "224",
    "host_processor_frequency": "3800 MHz",
    "host_processor_caches": "L3 105 MiB",
    "host_processor_interconnect": "UPI",
    "host_memory_capacity": "2 TB",
    "host_memory_configuration": "32x 64 GB",
    "host_storage_type": "NVMe",
    "host_storage_capacity": "30 TB",
    "host_networking": "8x NDR",
    "accelerators_per_node": "8",
    "accelerator_model_name": "NVIDIA H200",
    "accelerator_host_interconnect": "PCIe 5.0 x16",
    "accelerator_frequency": "1980 MHz",
    "accelerator_memory_capacity": "141 GB",
    "accelerator_memory_configuration": "HBM3e",
    "accelerator_interconnect": "NVLink 4",
    "operating_system": "Ubuntu 24.04",
    "framework": "PyTorch 2.11",
    "other_software_stack": {"cuda_version": "13.0", "nccl_version": "2.28"},
}

Entry = dict[str, Any]


@dataclass(frozen=True)
class Clone:
    """A repository, and the commit that the runs used."""

    path: Path
    commit: str


def make_repository(folder: Path) -> str:
    """Create a small clone with one commit; return the commit."""
    files = {
        "train.py": "seed = None\n",
        "common/model.py": "# a model\n",
        "scripts/run_and_time.sh": "#!/bin/bash\n",
        ".gitignore": "runs/\n",
        ".ci/run": "true\n",
        "constraints.txt": "\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return commit_all(folder)


def commit_all(folder: Path) -> str:
    """Commit everything below ``folder``; return the commit."""
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}

    def git(*arguments: str) -> str:
        command = ["git", "-c", "init.defaultBranch=main", "-C", str(folder), *arguments]
        return subprocess.run(command, env={**os.environ, **who}, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    git("add", "--all", "--force")
    git("commit", "--quiet", "--message", "a commit")
    return git("rev-parse", "HEAD").strip()


def write_series(
    folder: Path,
    benchmark: str,
    commit: str,
    convergence: Sequence[float | None] | None = None,
    minutes: Callable[[int], float] = lambda index: 10.0 + index / 8,
) -> Path:
    """Write a complete series with a run for each convergence, None for an aborted one; return ``folder``."""
    folder.mkdir(parents=True)
    recipe = RECIPES[benchmark]
    wanted = drawn_convergence(benchmark) if convergence is None else convergence
    entries: list[Entry] = []
    for index, reached in enumerate(wanted):
        number, status = index + 1, "aborted" if reached is None else "success"
        log_of(folder, number).write_text(log_text(benchmark, number, reached, minutes=minutes(index), status=status))
        entries += begin_and_end(
            benchmark, recipe.ruleset, number, len(wanted), seed_of(number), commit, status, minutes(index)
        )
    write_entries(folder, entries)
    write_doctor(folder)
    return folder


def write_doctor(folder: Path) -> None:
    """Write the file in which `doctor` describes two nodes."""
    node = {"facts": FACTS, "measurements": {}}
    doctor = {"time": "2026-05-01T11:59:00+00:00", "nodes": {"node1": node, "node2": node}, "findings": [], "ok": True}
    (folder / f"{SERIES}_doctor.json").write_text(json.dumps(doctor))


def seed_of(experiment: int) -> int:
    """The seed of an experiment of a series."""
    return FIRST_SEED + experiment - 1


def launch_time(experiment: int) -> datetime.datetime:
    """The time at which an experiment of a series was launched."""
    return FIRST_LAUNCH + BETWEEN_LAUNCHES * (experiment - 1)


def first_line_ms(experiment: int) -> int:
    """The time of the first line of an experiment's log, 20 seconds after its launch."""
    return round(1000 * launch_time(experiment).timestamp()) + 20_000


def log_text(benchmark: str, experiment: int, convergence: float | None = None, **more: Any) -> str:
    """The log of an experiment of a series, with its seed and time."""
    return closed_log(benchmark, seed_of(experiment), convergence, start=first_line_ms(experiment), **more)


def begin_and_end(
    benchmark: str,
    ruleset: str,
    experiment: int,
    declared: int,
    seed: int,
    commit: str,
    status: str,
    minutes: float = 10.0,
) -> list[Entry]:
    """The two lines of one experiment, as a launcher writes them."""
    name, begun = f"{SERIES}_{experiment}", launch_time(experiment)
    ran = status != "not started"
    ended = begun + datetime.timedelta(minutes=minutes + 2 if ran else 1)
    return [
        {
            "event": "begin", "series": SERIES, "experiment": experiment, "declared": declared,
            "time": begun.isoformat(), "seed": seed, "commit": commit, "dirty": False,
            "configuration": "ab" * 32, "benchmark": benchmark, "scale": "2x8", "ruleset": ruleset,
            "log": f"{name}.log", "output_dir": name, "job": None,
            "overrides": [f"benchmark={benchmark}", "scale=2x8xH200", "data_dir=/data/my set", "seed=7"],
        },
        {
            "event": "end", "series": SERIES, "experiment": experiment, "time": ended.isoformat(),
            "exit_code": {"success": 0, "aborted": 10, "not started": 1}[status], "status": status,
            "minutes": minutes if ran else None,
            "verdict": {"success": "valid run", "aborted": "format", "not started": "refused"}[status], "reason": "",
        },
    ]  # fmt: skip


def entries_of(folder: Path) -> list[Entry]:
    """The lines of ``runs.jsonl``."""
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def write_entries(folder: Path, entries: Sequence[Entry]) -> None:
    """Write ``runs.jsonl``."""
    (folder / "runs.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def in_entries(change: Callable[[Entry], Entry | None]) -> Callable[[Path], None]:
    """Return a function that changes each line of ``runs.jsonl`` in a folder; ``change`` returns None to drop one."""

    def apply(results: Path) -> None:
        changed = [change(entry) for entry in entries_of(results)]
        write_entries(results, [entry for entry in changed if entry is not None])

    return apply


def in_begin(experiment: int, **values: object) -> Callable[[Path], None]:
    """Return a function that changes values in the line that begins an experiment."""
    return in_entries(lambda e: e | values if (e["event"], e["experiment"]) == ("begin", experiment) else e)


def log_of(folder: Path, experiment: int) -> Path:
    """The log of an experiment."""
    return folder / f"{SERIES}_{experiment}.log"


def submission(*results: Entry, **fields: str) -> Entry:
    """The content of a submission's YAML with one system."""
    system = {
        "system_name": "Acme server, 2 nodes of 8x H200",
        "division": "closed",
        "status": "Available on-premise",
        "fields": {"cooling": "air", "host_networking_topology": "rail-optimised", **fields},
    }
    return {"submitter": "acme", "systems": {SYSTEM: system}, "results": list(results)}


def write_submission(path: Path, content: Entry) -> Path:
    """Write a submission's YAML."""
    path.write_text(yaml.safe_dump(content))
    return path


def package_arguments(settings: Path, output: Path, clone: Clone, ruleset: str = "4.0.0") -> list[str]:
    """Arguments of `package`."""
    return [
        "--ruleset", ruleset, "--submission", str(settings), "--output", str(output), "--repository", str(clone.path),
    ]  # fmt: skip
