"""A user's folder on ``--config-dir``: more scales, recipes and sets of hyperparameters, and the mistakes in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common import cli
from common.config.composition import compose, with_hydra
from common.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for ``--config-dir`` with the groups of recipes and sets of hyperparameters."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "hparams").mkdir()
    return tmp_path


def jobs(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What each job of a command with the user's folder composes, and composes again for its other ranks."""
    found: list[tuple[dict[str, Any], list[str]]] = []

    def job(tree: dict[str, Any], of_the_job: list[str]) -> int:
        found.append((tree, of_the_job))
        return 0

    flags = ("output_dir=out", "--config-dir", str(folder), f"hydra.sweep.dir={folder}")
    assert with_hydra([*arguments, *flags], job) == 0
    for tree, of_the_job in list(found):
        assert with_hydra(of_the_job, job) == 0
        assert found.pop()[0] == tree
    return [tree for tree, _ in found]


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of an error of ``train`` with the user's folder."""
    assert cli.run(["train", *arguments, "device=cpu", "--config-dir", str(folder)]) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("mlperf-suite: ConfigError: ")


def test_an_additional_scale_extends_one_of_the_suite(folder):
    (folder / "recipe" / "resnet.yaml").write_text("scales:\n  16xB200: {from: 8xH200, micro_batch: 50}\n")
    (tree,) = jobs(folder, "benchmark=resnet", "scale=16xB200")
    same = compose(["benchmark=resnet", "scale=8xH200", "micro_batch=50", "scale.nodes=2", "output_dir=out"])
    assert tree == {**same, "recipe": "resnet/16xB200"}


def test_a_whole_recipe_and_its_hyperparameters_may_be_the_users(folder):
    recipe = """
base: {model: {implementations: {}}, precision: fp32}
own: {reader: {threads: 3}}
scales:
  mine: {from: own, hparams_set: mine, micro_batch: 4, scale: {gpus_per_node: 2}}
  same: mine
"""
    (folder / "recipe" / "resnet.yaml").write_text(recipe)
    (folder / "hparams" / "resnet.yaml").write_text("sets: {mine: {from: digits, momentum: 0.5, source: mine}}")
    (first, second) = jobs(folder, "-m", "benchmark=resnet", "scale=mine,same")
    assert first["recipe"], second["recipe"] == ("resnet/mine", "resnet/same")
    assert {**first, "recipe": ""} == {**second, "recipe": ""}
    assert (first["model"], first["reader"]) == ({"implementations": {}}, {"threads": 3})
    assert (first["precision"], first["micro_batch"]) == ("fp32", 4)
    assert first["scale"] == {"nodes": 1, "gpus_per_node": 2}
    digits = compose(["benchmark=resnet", "scale=demo"])["hparams"]
    assert first["hparams"] == {**digits, "momentum": 0.5, "source": "mine"}


def test_a_file_with_a_single_recipe_is_read_as_hydra_reads_it(folder):
    for group, name, text in (
        ("scale", "mine", "{nodes: 1, gpus_per_node: 4}"),
        ("hparams/resnet", "mine", "# @package hparams\ndefaults: [resnet/nvidia_v4.0_3200, _self_]\nmomentum: 0.5"),
        (
            "recipe/resnet",
            "mine",
            "# @package _global_\ndefaults: [resnet/imagenet, /hparams: resnet/mine, _self_]\nmicro_batch: 100",
        ),
    ):
        (folder / group).mkdir(exist_ok=True)
        (folder / group / f"{name}.yaml").write_text(text)
    (tree,) = jobs(folder, "benchmark=resnet", "scale=mine")
    assert tree["scale"] == {"nodes": 1, "gpus_per_node": 4}
    assert (tree["precision"], tree["micro_batch"], tree["model"]["width"]) == ("fp16", 100, 64)
    assert (tree["hparams"]["global_batch_size"], tree["hparams"]["momentum"]) == (3200, 0.5)


def test_a_file_of_a_scale_counts_more_than_its_name(folder):
    (folder / "recipe" / "resnet.yaml").write_text("scales: {24xB200: 8xH200}")
    (folder / "scale").mkdir()
    (folder / "scale" / "24xB200.yaml").write_text("{nodes: 4, gpus_per_node: 4, gpu: true}")
    (tree,) = jobs(folder, "benchmark=resnet", "scale=24xB200")
    assert tree["scale"] == {"nodes": 4, "gpus_per_node": 4, "gpu": True}


def test_the_last_set_of_hyperparameters_counts(folder):
    (folder / "recipe" / "resnet.yaml").write_text("scales: {mine: {from: 8xH200, hparams_set: nvidia_v4.0_57344}}")
    arguments = ("benchmark=resnet", "scale=mine")
    assert jobs(folder, *arguments)[0]["hparams"]["global_batch_size"] == 57344
    assert jobs(folder, *arguments, "hparams=resnet/digits")[0]["hparams"]["global_batch_size"] == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scales: {mine: 8xH20}", r"mine\.from=8xH20: unknown; the entries are mine, .*; did you mean 8xH200\?"),
        ("scales: {mine: {from: 8}}", "mine.from=8: unknown; the entries are mine, "),
        ("scales: {mine: other, other: mine}", "other.from=mine: mine starts from other"),
        ("scales: {mine: mine}", "mine.from=mine: mine starts from mine"),
        ("scales: {mine: 3}", "mine=3: expected settings, or the name of an entry with the same ones"),
        ("scales: {mine: test}\nbase: fp32\nscales: {}", ".* line 3: is no valid YAML: found duplicate key scales"),
        ("scales: mine", "scales=mine: expected a mapping of names to settings"),
    ],
    ids=["unknown", "no text", "circle", "itself", "number", "twice", "no mapping"],
)
def test_a_mistake_in_the_form_of_a_file_is_named_with_the_file(folder, capsys, text, message):
    file = folder / "recipe" / "resnet.yaml"
    file.write_text(text)
    (folder / "scale").mkdir()
    (folder / "scale" / "mine.yaml").write_text("{nodes: 1, gpus_per_node: 1}")
    line = refusal(folder, capsys, "benchmark=resnet", "scale=mine")
    assert line.startswith(str(file))
    assert re.search(message, line)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("modle: {width: 3}", "modle: unknown configuration key; did you mean model?; {file} sets modle"),
        ("model: {widht: 3}", "model.widht: unknown key; .*; did you mean model.width?; {file} sets model.widht"),
        ("hparams: {momentum: -1.0}", "hparams.momentum=-1.0: at least 0 and below 1; {file} sets hparams.momentum"),
    ],
)
def test_a_wrong_setting_is_named_with_the_file_that_sets_it(folder, capsys, settings, message):
    file = folder / "recipe" / "resnet.yaml"
    file.write_text(f"scales:\n  mine: other\n  other: {{from: test, {settings}}}\n")
    line = refusal(folder, capsys, "benchmark=resnet", "scale=mine")
    beginning, _, end = message.format(file=file).partition(".*")
    assert line.startswith(beginning)
    assert line.endswith(end)


def test_a_wrong_hyperparameter_is_named_with_the_file_of_its_set(folder, capsys):
    file = folder / "hparams" / "resnet.yaml"
    file.write_text("sets: {mine: {from: digits, momentum: -1.0}}")
    line = refusal(folder, capsys, "benchmark=resnet", "scale=test", "hparams=resnet/mine")
    assert line == f"hparams.momentum=-1.0: at least 0 and below 1; {file} sets hparams.momentum"


def test_an_error_of_a_recipe_without_hyperparameters_is_shown(folder, capsys):
    (folder / "recipe" / "resnet.yaml").write_text("scales: {mine: {precision: fp32, micro_batch: 8}}")
    assert refusal(folder, capsys, "benchmark=resnet", "scale=mine").startswith("hparams: expected a section of keys")


def test_of_a_setting_on_the_command_line_no_file_is_named(folder, capsys):
    line = refusal(folder, capsys, "benchmark=resnet", "scale=test", "hparams.momentum=-1.0")
    assert line == "hparams.momentum=-1.0: at least 0 and below 1"


def test_an_unknown_set_of_a_recipe_is_named_with_the_recipe(folder, capsys):
    (folder / "recipe" / "resnet.yaml").write_text("scales: {mine: {from: test, hparams_set: digit}}")
    line = refusal(folder, capsys, "benchmark=resnet", "scale=mine")
    assert line.startswith("recipe/resnet.yaml: mine.hparams_set=resnet/digit: unknown; resnet has resnet/digits, ")
    assert line.endswith("; did you mean resnet/digits?")
