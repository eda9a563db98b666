"""Test Hydra's features on the command line: help, the composed configuration, sweeps, tab completion; and ``list``."""

from __future__ import annotations

import re

import pytest
import yaml

from benchmarks import WORKLOADS
from common import cli
from common.config import composition
from common.config.composition import CONFIGS, scales_of
from common.config.yaml_files import entry_names
from common.errors import ConfigError
from tests import toy
from tests.command_line import training
from tests.conftest import suite


def completed(line: str) -> list[str]:
    """Return the completions that bash offers for ``line``."""
    done = suite("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)), _COMP_PROGRAM="mlperf-suite")
    assert done.code == 0, done.errors
    return done.output.split()


def test_tab_completes_the_commands():
    assert completed("mlperf-suite tr") == ["train"]
    assert {"train", "bench", "list", "prepare"} <= set(completed("mlperf-suite "))


def test_tab_completes_groups_and_values():
    assert "scale=8xH200" in completed("mlperf-suite train scale=8x")
    assert "benchmark=resnet" in completed("mlperf-suite train benchmark=")
    assert "micro_batch=" in completed("mlperf-suite train micro_b")
    assert "scale=" in completed("mlperf-suite train benchmark=bert sc")
    assert "hparams=" in completed("mlperf-suite train benchmark=bert hp")


def test_the_composed_configuration_is_printed_and_nothing_runs(tmp_path):
    done = suite("train", "benchmark=resnet", "scale=8xH200", f"output_dir={tmp_path / 'out'}", "--cfg", "job")
    assert done.code == 0, done.errors
    tree = yaml.safe_load(done.output)
    assert tree["scale"] == {"nodes": 1, "gpus_per_node": 8, "gpu": True}
    assert tree["hparams"]["global_batch_size"] == 3200
    assert not (tmp_path / "out").exists()


def test_the_info_names_the_recipe_and_its_set_of_hyperparameters():
    done = suite("train", "benchmark=bert", "scale=4xH200", "--info", "defaults-tree")
    assert done.code == 0, done.errors
    assert "recipe: bert/4xH200" in done.output
    assert "hparams: bert/nvidia_v4.1_768" in done.output


def test_a_sweep_goes_over_scales_and_sets_of_hyperparameters(tmp_path):
    found = []

    def job(tree, arguments):
        found.append((tree["recipe"], tree["scale"]["gpus_per_node"], tree["hparams"]["global_batch_size"]))
        return 0

    choices = ["scale=1xH200,8xH200", "hparams=unet3d/rcp_28,unet3d/nvidia_v4.0_56"]
    assert composition.with_hydra(["-m", "benchmark=unet3d", *choices, f"hydra.sweep.dir={tmp_path}"], job) == 0
    assert found == [
        ("unet3d/1xH200", 1, 28), ("unet3d/1xH200", 1, 56), ("unet3d/8xH200", 8, 28), ("unet3d/8xH200", 8, 56),
    ]  # fmt: skip


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_help(command):
    done = suite(command, "--help")
    assert done.code == 0, done.errors
    assert f"mlperf-suite {command}" in done.output or done.output.startswith("mlperf-suite is powered by Hydra")


def test_help_of_a_data_command_names_the_benchmarks(capsys):
    assert cli.run(["prepare", "--help"]) == 0
    assert f"NAME is one of {', '.join(sorted(WORKLOADS))}." in capsys.readouterr().out


def test_help_of_training():
    done = suite("train", "--help")
    assert done.code == 0, done.errors
    assert f"benchmark: {', '.join(sorted(WORKLOADS))}" in done.output


@pytest.mark.parametrize(
    ("flag", "at", "jobs"),
    [(["--multirun"], 0, 2), (["--multirun"], 2, 2), (["-m"], 4, 2), (["--cfg", "job"], 2, 0)],
    ids=["before", "between", "behind", "with-a-value"],
)
def test_flags_stand_anywhere_among_the_overrides(flag, at, jobs, tmp_path, capsys):
    seeds = "1,2" if jobs else "1"
    overrides = ["benchmark=resnet", "scale=test", f"hydra.sweep.dir={tmp_path}", f"seed={seeds}"]
    trees = []

    def job(tree, arguments):
        trees.append(tree["seed"])
        return 0

    code = composition.with_hydra([*overrides[:at], *flag, *overrides[at:]], job)
    assert (code, trees) == (0, [1, 2][:jobs])
    assert jobs or yaml.safe_load(capsys.readouterr().out)["seed"] == 1


def test_a_sweep_over_two_ranks_trains_once_for_each_value(data_of, tmp_path):
    options = ["micro_batch=4,8", "scale.gpus_per_node=2", "benchmark.schedule.last_epoch=1"]
    _, *overrides = training(data_of(toy.NAME), tmp_path / "${micro_batch}", *options)
    done = suite("train", "--multirun", *overrides, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert done.code in (0, 10), done.errors
    for micro_batch, accumulated in ((4, 2), (8, 1)):
        log = (tmp_path / str(micro_batch) / "mlperf.log").read_text()
        assert f'"gradient_accumulation_steps", "value": {accumulated},' in log
        assert log.count('"run_stop"') == 1


def test_jobs_of_a_sweep_write_into_folders_of_their_own(data_of, tmp_path):
    done = suite(
        "train", "--multirun", f"benchmark={toy.NAME}", "scale=test", "device=cpu", "seed=1,2",
        f"data_dir={data_of(toy.NAME)}", cwd=tmp_path,
    )  # fmt: skip
    assert done.code in (0, 10), done.errors
    logs = [path.read_text() for path in sorted((tmp_path / "runs" / toy.NAME).glob("*/mlperf.log"))]
    assert ['"seed", "value": 1,' in log for log in logs] == [True, False]
    assert ['"seed", "value": 2,' in log for log in logs] == [False, True]


@pytest.mark.parametrize("command", ["train", "bench"])
def test_help_describes_every_setting(command, capsys):
    assert cli.run([command, "--help"]) == 0
    printed = capsys.readouterr().out
    text = printed.partition("may change them:\n\n")[2].partition("\n\nSettings of")[0]
    undescribed = [line for line in text.splitlines() if re.match(r" *\w+:", line) and not re.search(r" # \w{2}", line)]
    assert not undescribed
    known = set(yaml.safe_load(text))
    assert known == set(yaml.safe_load((CONFIGS / "train.yaml").read_text())) - {"defaults", "hydra"}


def test_help_has_the_settings_of_the_benchmark(capsys):
    assert cli.run(["train", "benchmark=rnnt", "scale=test", "-h"]) == 0
    printed = capsys.readouterr().out
    assert "Settings of rnnt" in printed
    assert "\nhparams:\n" in printed


def test_the_table_of_workloads():
    done = suite("list")
    assert done.code == 0, done.errors
    assert max(map(len, done.output.splitlines())) <= 100
    # Scales that do not fit go on in the next line.
    heading, *rows = re.sub(r"\n {20,}", " ", done.output).splitlines()
    assert heading.split() == ["benchmark", "target", "runs", "last", "round", "scales"]
    assert [row.split()[0] for row in rows] == sorted(WORKLOADS)
    (row,) = [row for row in rows if row.startswith("resnet ")]
    # training_rules: 75.90 % top-1, 5 runs; ResNet-50 was last part of round v4.0.
    assert row.split()[1:6] == ["accuracy", ">=", "0.759", "5", "v4.0"]
    assert "8xH200" in row
    for row in rows:  # also of the longest names
        assert re.fullmatch(r"\w+ +\w+ [<>]= [\d.]+(, \w+ [<>]= [\d.]+)*  +\d+  +v\d\.\d  +\w.*", row)
        assert row.index(" v") + 1 == heading.index("last round")


def test_tab_completes_the_scales_and_sets_of_hyperparameters_of_the_benchmark_alone():
    assert completed("mlperf-suite train benchmark=rnnt scale=") == [f"scale={name}" for name in scales_of("rnnt")]
    assert completed("mlperf-suite generate benchmark=unet3d scale=d") == ["scale=demo"]
    assert completed("mlperf-suite train hparams=resnet/d") == ["hparams=resnet/digits"]
    assert completed("mlperf-suite train benchmark=nothing scale=") == []


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("sed=1", "seed"),
        ("hparams.global_batch_sz=3", "hparams.global_batch_size"),
        ("global_batch_size=3", "hparams.global_batch_size"),
        ("evaluation.rank=1", "evaluation.ranks"),
        ("benchmark.targets.acuracy.value=0.3", "benchmark.targets.accuracy"),
        ("launch.experimets=4", "launch.experiments"),
        ("+optimizer.buket_mb=2", "optimizer.bucket_mb"),
        ("++outputdir=out", "output_dir"),
        ("~precison", "precision"),
        ("benchmark=resnett", "resnet"),
        ("scale=dmeo", "demo"),
        ("hparams=resnet/digit", "resnet/digits"),
    ],
)
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["first", "last"])
def test_the_nearest_key_or_choice_is_suggested(wrong, meant, first, capsys):
    others = ["device=cpu", *([] if "scale=" in wrong else ["scale=test"])]
    assert cli.run(["train", *([wrong, *others] if first else [*others, wrong])]) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"; did you mean {meant}?")


def test_of_unknown_hyperparameters_the_benchmarks_own_are_listed(capsys):
    assert cli.run(["train", "benchmark=rnnt", "scale=test", "hparams=rnnt/none"]) == ConfigError.exit_code
    line = capsys.readouterr().err
    assert all(f"rnnt/{name}" in line for name in entry_names(CONFIGS / "hparams" / "rnnt.yaml", "sets"))
    assert "resnet/" not in line
