"""Whole runs that copy their data to a local disk: when they do it, what they read then, and how they fail."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from common import cli
from common.config.composition import compose
from common.config.schema import BenchmarkConfig
from common.contract.workload import Workload
from common.data.staging import LOCK, SHARDS, STAGED, read_shards
from common.distributed.staging import ADDRESS, INSTANCE, INSTANCES
from common.errors import ConfigError, DataError, RankFailure
from common.mlperf.admission import admit
from common.mlperf.verdict import judge
from common.run import staging as staging_of_runs
from common.run.trainer import Trainer
from tests import toy
from tests.command_line import finish, logged, ranked, started, the_message, training
from tests.common.run.sharded_toy import FOLDERS
from tests.conftest import SECONDS, suite
from tests.toy.workload import Toy

LAST = "benchmark.schedule.last_epoch=1"


@pytest.fixture(autouse=True, scope="module")
def known_toy() -> Iterator[None]:
    """Let this process compose the toy workload's configuration."""
    with toy.known():
        yield


@pytest.fixture
def data(data_of, tmp_path) -> Path:
    """A copy of the toy's data, which a test may change."""
    shutil.copytree(data_of(toy.NAME), tmp_path / "data")
    return tmp_path / "data"


def trainer(data: Path, output: Path, *overrides: str) -> Trainer:
    return toy.trainer(training(data, output, LAST, *overrides)[1:], Toy)


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics_rank0.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("ruleset", ["2.0.0", "3.0.0"])
def test_data_are_staged_where_the_rules_have_it_and_read_there(ruleset, data, tmp_path, monkeypatch):
    trainer(data, tmp_path / "plain", f"ruleset={ruleset}").train()
    run = trainer(data, tmp_path / "out", f"ruleset={ruleset}", f"staging_dir={tmp_path / 'local'}")
    opened = []
    open_data = Toy.open_data

    def open_and_note(self, root: Path):
        opened.append(root)
        shutil.rmtree(data)  # nothing reads it any more
        return open_data(self, root)

    monkeypatch.setattr(Toy, "open_data", open_and_note)
    run.train()
    assert opened == [tmp_path / "local" / STAGED]
    assert losses(tmp_path / "out") == losses(tmp_path / "plain")
    log = tmp_path / "out" / "mlperf.log"
    keys = ("init_start", "staging_start", "staging_stop", "init_stop", "run_start", "train_samples")
    order = [event["key"] for event in logged(log, *keys)]
    untimed = list(keys)
    timed = ["init_start", "init_stop", "run_start", "staging_start", "staging_stop", "train_samples"]
    assert order == (untimed if ruleset == "3.0.0" else timed)
    assert judge(log, ruleset).kind == "format"  # synthetic data


def test_the_next_run_replaces_the_staged_files_and_nothing_beside_them(data, tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    data = data.rename(local / "data")
    staged = local / STAGED
    for number in range(2):
        trainer(data, local / f"out{number}", f"staging_dir={local}").train()
        assert read_shards(staged) is not None
        assert not (staged / "of another run").exists()
        (staged / "of another run").touch()
    assert sorted(path.name for path in local.iterdir()) == ["data", STAGED, "out0", "out1"]
    assert (local / "out0" / "mlperf.log").exists()


@pytest.mark.parametrize("name", ["data_dir", "output_dir", "assets_dir"])
def test_a_folder_of_the_run_is_never_emptied(name, data, tmp_path):
    trainer(data, tmp_path / "first", f"staging_dir={tmp_path}").train()
    inside = tmp_path / STAGED / "deeper" / "folder"
    shutil.copytree(data, inside)
    (tmp_path / "link").symlink_to(inside)
    settings = {"data_dir": data, "output_dir": tmp_path / "out", name: tmp_path / "link"}
    overrides = [f"{key}={path}" for key, path in settings.items()]
    run = toy.trainer([*training(data, tmp_path / "out", LAST)[1:], *overrides, f"staging_dir={tmp_path}"], Toy)
    with pytest.raises(ConfigError, match=f"{name}={tmp_path / 'link'}: staging empties"):
        run.train()
    assert (inside / "manifest.json").exists()


def test_the_part_of_a_node_is_no_data_set(data, tmp_path):
    trainer(data, tmp_path / "out", f"staging_dir={tmp_path}").train()
    done = suite(*training(tmp_path / STAGED, tmp_path / "out2"))
    assert done.code == DataError.exit_code
    assert "has the part of a data set that a run has staged for one node" in the_message(done)


def test_two_instances_of_two_ranks_stage_together(data, tmp_path):
    with ExitStack() as stack:
        processes = []
        for instance in range(2):
            settings = [f"staging_dir={tmp_path / f'local{instance}'}", "scale.gpus_per_node=2", f"seed={instance}"]
            shared = {ADDRESS: str(tmp_path / "meeting"), INSTANCE: str(instance), INSTANCES: "2"}
            arguments = training(data, tmp_path / f"out{instance}", LAST, *settings)
            processes.append(stack.enter_context(started(arguments, **shared)))
        ended = [finish(process, SECONDS) for process in processes]
    assert [each.code for each in ended] == [10, 10], [each.errors for each in ended]
    names = {*json.loads((data / "manifest.json").read_text())["files"], "manifest.json"}
    for instance in range(2):
        staged = {path.name: path for path in (tmp_path / f"local{instance}" / STAGED).iterdir()}
        assert set(staged) == {*names, LOCK, SHARDS}
        assert all(staged[name].read_bytes() == (data / name).read_bytes() for name in names)


def test_each_of_two_nodes_gets_its_shard(data, tmp_path):
    for folder, count in zip(FOLDERS, (9, 4), strict=True):
        (data / folder).mkdir()
        for number in range(count):
            (data / folder / str(number)).write_bytes(gzip.compress(f"{folder} {number}".encode(), mtime=0))
    settings = [f"staging_dir={tmp_path / 'local'}", "scale.gpus_per_node=4", "layout.machines=2", "micro_batch=4"]
    arguments = training(data, tmp_path / "out", LAST, *settings)
    with started(arguments, command=ranked("tests.common.run.sharded_toy", 4)) as process:
        done = finish(process, SECONDS)
    assert done.code == 10, done.errors
    found = [read_shards(tmp_path / "local" / f"{STAGED}-node{node}") for node in range(2)]
    assert [(shards.node, shards.nodes) for shards in found] == [(0, 2), (1, 2)]
    for folder, counts in zip(FOLDERS, ((5, 4), (2, 2)), strict=True):
        assert tuple(len(shards.files[folder]) for shards in found) == counts
        names = sorted(name for shards in found for name in shards.files[folder])
        assert names == [f"{folder}/{number}" for number in range(sum(counts))]
        for node, shards in enumerate(found):
            root = tmp_path / "local" / f"{STAGED}-node{node}"
            assert {f"{folder}/{path.name}" for path in (root / folder).iterdir()} == set(shards.files[folder])
            assert all((root / name).read_text() == name.replace("/", " ") for name in shards.files[folder])


def test_an_instance_waits_for_the_others_as_long_as_staging_may_take(data, tmp_path, monkeypatch):
    for name, value in {ADDRESS: str(tmp_path / "meeting"), INSTANCE: "1", INSTANCES: "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(staging_of_runs, "time_limit", lambda rules: timedelta(seconds=rules.init_minutes / 10))
    run = trainer(data, tmp_path / "out", f"staging_dir={tmp_path / 'local'}")
    message = f"staging: instance 1 did not meet the 1 others at {tmp_path / 'meeting'} within 3 s"
    with pytest.raises(RankFailure, match=message):
        run.train()


def test_a_folder_with_other_files_is_one_error(data, tmp_path):
    (tmp_path / STAGED).mkdir()
    (tmp_path / STAGED / "thesis").touch()
    done = suite(*training(data, tmp_path / "out", f"staging_dir={tmp_path}", "scale.gpus_per_node=2"))
    assert done.code == DataError.exit_code
    assert "has files that no run has staged, such as thesis" in the_message(done)


def test_a_workload_that_reads_its_data_in_place_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(Toy, "staging", Workload.staging)
    with pytest.raises(ConfigError, match="staging_dir: Toy reads its data in place; leave staging_dir out"):
        trainer(data, tmp_path / "out", f"staging_dir={tmp_path / 'local'}").train()


def test_data_in_memory_are_refused_where_staging_is_not_timed(data, tmp_path, monkeypatch):
    local = f"staging_dir={tmp_path / 'local'}"
    timed, untimed = (trainer(data, tmp_path / rules, f"ruleset={rules}", local) for rules in ("2.0.0", "3.0.0"))
    monkeypatch.setattr(staging_of_runs, "file_system_in_memory", lambda folder: "tmpfs")
    monkeypatch.setattr(BenchmarkConfig, "synthetic", False)
    with pytest.raises(DataError, match="holds 256 training and 60 evaluation samples of synthetic data"):
        timed.train()  # staged, and opened
    with pytest.raises(ConfigError, match=r"is in memory \(tmpfs\): the rules allow any storage but memory"):
        untimed.train()


@pytest.mark.parametrize("setting", ["evaluation.ranks=1", "evaluation.scoring=offline"])
def test_evaluations_that_would_read_other_data_are_refused(setting, data, tmp_path):
    name = toy.PICTURES if "offline" in setting else toy.NAME
    overrides = [setting, "scale.gpus_per_node=2", f"staging_dir={tmp_path}"]
    run, session = cli.load(compose(training(data, tmp_path / "out", *overrides, benchmark=name)[1:]))
    with pytest.raises(ConfigError, match=f"staging_dir={tmp_path}: only training ranks stage data"):
        admit(run, session)


def test_checkpoints_of_staged_runs_name_the_number_of_nodes(data, tmp_path):
    def order(*overrides: str) -> object:
        return trainer(data, tmp_path / "out", "scale.gpus_per_node=2", *overrides).settings["order of the data"]

    staged = [order("staging_dir=/local", f"layout.machines={nodes}") for nodes in (1, 2)]
    assert [text.removeprefix(str(order())) for text in staged] == [", staged on 1 nodes", ", staged on 2 nodes"]
