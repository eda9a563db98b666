"""A series of instances as the driver asks for it: they begin together, and not again once one of them has trained."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from common import cli
from common.config.composition import compose
from common.errors import ConfigError
from common.launch import experiment
from common.launch.experiment import begin, end, open_series
from common.launch.launch_config import LaunchConfig
from common.launch.series import launch_command, read_runs
from tests import toy

RUN_START = {"event_type": "INTERVAL_START", "key": "run_start", "value": None, "metadata": {"file": "a", "lineno": 1}}


@pytest.fixture(autouse=True)
def known_toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the toy workload known, and take its data for prepared."""
    monkeypatch.setattr(experiment, "require_prepared", lambda *_: None)
    with toy.known(pictures=False):
        yield


def overrides_of(results: Path, instances: int, *more: str) -> list[str]:
    settings = [f"launch.results={results}", f"launch.instances={instances}"]
    return [f"benchmark={toy.NAME}", "scale=test", "scale.nodes=2", *settings, *more]


def begun(results: Path, instances: int = 3, *more: str) -> list[dict[str, Any]]:
    overrides = overrides_of(results, instances, *more)
    tree = compose(overrides)
    return begin(tree, LaunchConfig.load(tree), "s", overrides, {"SLURM_JOB_ID": "7"}, cli.admitted)


def ended(results: Path, numbers: Sequence[int], trained: Sequence[int] = ()) -> list[int]:
    """End the experiments, of which some reached ``run_start``; return the remaining experiments after each."""
    settings = LaunchConfig.load(compose(overrides_of(results, 3)))
    for number in trained:
        line = json.dumps({"namespace": "", "time_ms": 1_700_000_000_000, **RUN_START})
        (results / f"s_{number}.log").write_text(f":::MLLOG {line}\n")
    return [end(settings, "s", number, 1, None) for number in numbers]


def opened(tmp_path: Path, instances: int, nodes: str, *more: str) -> dict[str, Any]:
    tree = compose(overrides_of(tmp_path, instances, *more))
    return open_series(tree, LaunchConfig.load(tree), {"SLURM_JOB_NODELIST": nodes}, cli.admitted)


def test_all_instances_begin_at_once_with_different_seeds_and_folders(tmp_path):
    values = begun(tmp_path, 3, "seed=40")
    assert [(each["experiment"], each["of"], each["seed"]) for each in values] == [(1, 3, 40), (2, 3, 41), (3, 3, 42)]
    assert [each["output_dir"] for each in values] == [f"{tmp_path}/s_{number}" for number in (1, 2, 3)]
    (series,) = read_runs(tmp_path)
    assert (series.instances, series.declared) == (3, 3)
    assert [run.begin.seed for run in series.experiments] == [40, 41, 42]


def test_either_all_instances_begin_or_none(tmp_path, monkeypatch):
    (tmp_path / "s_2.log").write_text("precious")
    with pytest.raises(ConfigError, match=r"s_2\.log exists"):
        begun(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["s_2.log"]
    (tmp_path / "s_2.log").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            begun(tmp_path)
    assert not list(tmp_path.glob("*.log"))
    assert [each["experiment"] for each in begun(tmp_path)] == [1, 2, 3]


def full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_job_has_the_nodes_of_all_instances_and_the_registry_those_of_one(tmp_path):
    values = opened(tmp_path, 3, "n[1-6]")
    assert (values["instances"], values["nodes"]) == (3, 6)
    begun(tmp_path)
    (series,) = read_runs(tmp_path)
    assert series.experiments[0].begin.scale == "2x1"
    assert launch_command(series).startswith("sbatch -N6 --ntasks-per-node=1 ")


@pytest.mark.parametrize("nodes", ["n[1-7]", "n[1-2]"])
def test_a_job_whose_nodes_do_not_fit_the_instances_is_refused(tmp_path, nodes):
    with pytest.raises(ConfigError, match=r"2 nodes for each of 3 instances, but the job has \d: sbatch -N6 …"):
        opened(tmp_path, 3, nodes)


def test_instances_of_which_none_has_trained_all_begin_again_with_other_seeds(tmp_path):
    begun(tmp_path, 3, "seed=40")
    assert ended(tmp_path, [1, 2, 3])[-1] == 3
    again = begun(tmp_path, 3, "seed=40")
    assert [(each["experiment"], each["seed"]) for each in again] == [(4, 43), (5, 44), (6, 45)]


def test_no_instance_begins_again_once_one_has_trained(tmp_path):
    begun(tmp_path)
    assert ended(tmp_path, [1, 2, 3], trained=[2]) == [0, 0, 0]
    assert begun(tmp_path) == []


def test_a_series_goes_on_with_its_number_of_instances(tmp_path):
    begun(tmp_path)
    with pytest.raises(ConfigError, match=r"launch\.instances=2: series s was launched with 3"):
        begun(tmp_path, 2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("benchmark=resnet",), "only HPC rounds have a throughput"),
        (("launch.experiments=5",), "experiments run one after the other, and instances at the same time"),
        (("resume=/runs/checkpoints/step_5", "seed=7"), "a series gives each of its runs a seed"),
    ],
    ids=["training round", "experiments", "resumed"],
)
def test_what_instances_cannot_be_is_one_message(tmp_path, more, words):
    with pytest.raises(ConfigError, match=words):
        opened(tmp_path, 3, "", *more)
