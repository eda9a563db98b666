"""Whether the data folder is one of the benchmark's, before a run is opened."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import WORKLOADS
from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig, SessionConfig
from common.data import manifest
from common.data.manifest import Manifest
from common.errors import DataError
from common.launch.data_folder import require_prepared, require_samples
from common.launch.series import read_runs
from tests.conftest import suite


def configured(folder: Path, *overrides: str) -> tuple[RunConfig, SessionConfig]:
    return cli.load(compose([f"data_dir={folder}", *(overrides or ("benchmark=resnet", "scale=test"))]))


def test_the_message_about_a_missing_folder_has_the_commands_that_make_it(tmp_path):
    folder = tmp_path / "none"
    with pytest.raises(DataError) as raised:
        require_prepared(*configured(folder))
    message = str(raised.value)
    assert message.startswith(f"data folder {folder} does not exist; give another data_dir, or make it: ")
    for command in message.partition("make it: ")[2].split(" && "):
        assert cli.run(command.split()[1:]) == 0
    require_prepared(*configured(folder))


@pytest.mark.parametrize(("name", "option"), [("bert", "--raw-dir"), ("dlrm_dcnv2", "--adopt")])
def test_the_commands_download_real_data_and_generate_synthetic_data(tmp_path, name, option):
    raw = f"{tmp_path}/none-raw"
    commands = f"download benchmark={name} --raw-dir {raw} && mlperf-suite prepare benchmark={name} {option} {raw} "
    with pytest.raises(DataError, match=commands):
        require_prepared(*configured(tmp_path / "none", f"benchmark={name}", "scale=8xH200"))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "manifest.json is missing"),
        ("{", "manifest.json is not valid JSON"),
        ("[]", "manifest.json has a missing or invalid field"),
        (json.dumps({"format": "bert-hdf5/1"}), "format 'bert-hdf5/1' where 'imagenet-recordio/1' is needed"),
    ],
)
def test_a_folder_of_anything_else_is_named(tmp_path, content, complaint):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=complaint) as raised:
        require_prepared(*configured(tmp_path))
    assert "mlperf-suite generate benchmark=resnet scale=test" in str(raised.value)
    beside = tmp_path if content is None else f"{tmp_path}-resnet"
    assert str(raised.value).endswith(f"--data-dir {beside}")


def test_the_folder_of_here_is_named_too(tmp_path, monkeypatch):
    (tmp_path / "my data").mkdir()
    (tmp_path / "my data" / "manifest.json").write_text(json.dumps({"format": "bert-hdf5/1"}))
    monkeypatch.chdir(tmp_path / "my data")
    with pytest.raises(DataError, match=f"--data-dir '{tmp_path}/my data-resnet'"):
        require_prepared(*configured(Path(".")))


def test_a_workload_that_reads_no_folder_needs_none(tmp_path):
    run, session = configured(tmp_path / "none")
    with pytest.raises(DataError):
        require_prepared(run, session)
    require_prepared(replace(run, declaration=replace(run.declaration, data_format=None)), session)


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_prepared_data_are_of_the_format_that_the_workload_declares(workload, data_of):
    run, session = configured(data_of(workload), f"benchmark={workload}", "scale=test")
    assert run.declaration.data_format == json.loads((data_of(workload) / "manifest.json").read_text())["format"]
    require_prepared(run, session)


@pytest.fixture
def references_folder(data_of, tmp_path: Path) -> Path:
    """OpenImages as the reference's script of RetinaNet leaves it: pictures and labels."""
    folder = tmp_path / "reference"
    for split in ("train", "validation"):
        for kind in ("data", "labels"):
            shutil.copytree(data_of("retinanet") / split / kind, folder / split / kind)
    return folder


def test_training_reads_the_references_folder_as_it_is(references_folder, tmp_path):
    given = ["benchmark=retinanet", "scale=test", "device=cpu", "benchmark.schedule.last_epoch=1"]
    done = suite("train", *given, f"data_dir={references_folder}", f"output_dir={tmp_path / 'run'}")
    assert done.code in (0, 10), done.errors


@pytest.mark.parametrize("lost", ["train/labels", "validation/labels", "none, but half prepared"])
def test_a_part_of_the_references_folder_is_refused_before_the_run(references_folder, lost):
    run, session = configured(references_folder, "benchmark=retinanet", "scale=test")
    require_prepared(run, session)
    if lost.endswith("labels"):
        shutil.rmtree(references_folder / lost)
    else:
        (references_folder / "train" / "boxes").mkdir()
    with pytest.raises(DataError, match=f"{references_folder}/manifest.json is missing"):
        require_prepared(run, session)


def test_other_numbers_of_pictures_in_the_references_folder_are_refused(references_folder):
    run, _ = configured(references_folder, "benchmark=retinanet", "scale=test")
    require_samples(run, references_folder, run.train_samples, run.benchmark.eval_samples, False)
    with pytest.raises(DataError, match=f"{references_folder}: holds 9 training"):
        require_samples(run, references_folder, 9, run.benchmark.eval_samples, False)


def describe(folder: Path, data_format: str, synthetic: bool, **counts: int) -> Path:
    """A folder that has a manifest and nothing else."""
    manifest.write(folder, Manifest(data_format, {}, counts, synthetic, {}))
    return folder


@pytest.mark.parametrize(
    ("train_samples", "eval_samples", "synthetic"),
    [(95, 40, True), (96, 41, True), (96, 40, False)],
    ids=["training samples", "evaluation samples", "real data"],
)
def test_a_series_opens_no_run_of_the_data_of_another_recipe(train_samples, eval_samples, synthetic, tmp_path, capsys):
    counts = {"train_samples": train_samples, "eval_samples": eval_samples}
    folder = describe(tmp_path, "imagenet-recordio/1", synthetic, **counts)
    given = ["benchmark=resnet", "scale=test", f"data_dir={folder}", f"launch.results={tmp_path}"]
    assert cli.run(["series", "begin", "--series", "s", "--", *given]) == DataError.exit_code
    message = capsys.readouterr().err
    assert f"{folder}: holds {train_samples} training and {eval_samples} evaluation samples" in message
    assert "but the recipe is for 96 and 40 of synthetic data" in message
    assert read_runs(tmp_path) == []


@pytest.mark.parametrize(("train_samples", "fits"), [(31, False), (32, True), (35, True)])
def test_an_epoch_may_leave_out_samples_of_the_folder(train_samples, fits, tmp_path):
    """RNN-T trains on whole batches of the utterances, which are 32 in its test recipe."""
    run, session = configured(tmp_path, "benchmark=rnnt", "scale=test")
    assert run.declaration.data_format is not None
    describe(tmp_path, run.declaration.data_format, True, train_samples=train_samples, eval_samples=6)
    with contextlib.nullcontext() if fits else pytest.raises(DataError, match="holds 31 training"):
        require_prepared(run, session)


def test_a_series_opens_no_run_without_data(tmp_path, capsys):
    given = ["benchmark=resnet", "scale=test", f"data_dir={tmp_path / 'none'}", f"launch.results={tmp_path}"]
    assert cli.run(["series", "begin", "--series", "s", "--", *given]) == DataError.exit_code
    assert f"data folder {tmp_path / 'none'} does not exist" in capsys.readouterr().err
    assert read_runs(tmp_path) == []
    assert not list(tmp_path.glob("*.log"))
