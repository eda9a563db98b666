"""On real data, the closed division keeps what the rules fix of a benchmark."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from common import cli
from common.config.composition import compose
from common.config.schema import BenchmarkConfig
from common.distributed.rank_info import RankInfo
from common.errors import ConfigError
from common.mlperf.admission import admit
from common.mlperf.fixed import check_fixed
from common.run.trainer import Trainer
from tests.conftest import suite


def composed(*overrides: str) -> BenchmarkConfig:
    """The benchmark's section under ``overrides``."""
    return cli.load(compose(["benchmark=resnet", *overrides]))[0].benchmark


@pytest.mark.parametrize(
    "override",
    [
        "benchmark.targets.accuracy.value=0.7",
        "benchmark.targets.accuracy.direction=lower",
        "benchmark.train_samples=1281166",
        "benchmark.eval_samples=49999",
        "benchmark.facts.image_size=192",
        "benchmark.facts.crop_area=[0.08,1.0]",
        "benchmark.facts.bn_momentum=0.2",
        "benchmark.schedule.interval=5",
    ],
)
def test_a_changed_value_is_named_with_the_one_that_the_rules_fix(override):
    # training_rules, tables of quality targets, data sets and evaluation frequency
    key, value = override.split("=")
    with pytest.raises(ConfigError) as caught:
        check_fixed(composed("scale=8xH200", override), ())
    assert f"{key}=" in str(caught.value)
    assert value.strip("[]").split(",")[0] in str(caught.value)
    assert "configs/benchmark/resnet.yaml" in str(caught.value)


def test_every_broken_rule_is_listed():
    with pytest.raises(ConfigError) as caught:
        check_fixed(composed("scale=8xH200", "benchmark.targets.accuracy.value=0.7"), ["model.width=32: too narrow"])
    assert "benchmark.targets.accuracy.value=0.7" in str(caught.value)
    assert "model.width=32: too narrow" in str(caught.value)


def test_a_target_more_is_refused():
    override = "+benchmark.targets.loss={value:1.5,direction:lower}"
    with pytest.raises(ConfigError, match=r"benchmark\.targets\.loss\.value=1\.5: the rules fix null"):
        check_fixed(composed("scale=8xH200", override), ())


def test_a_missing_entry_is_a_changed_one():
    benchmark = dataclasses.replace(composed("scale=8xH200"), schedule={"first_epoch": 3})
    with pytest.raises(ConfigError, match=r"benchmark\.schedule\.interval=null"):
        check_fixed(benchmark, ())


@pytest.mark.parametrize("override", ["benchmark.schedule.first_epoch=1", "benchmark.schedule.last_epoch=99"])
def test_values_that_a_recipe_may_choose_pass(override):
    check_fixed(composed("scale=8xH200", override), ())


def test_synthetic_data_have_their_own_values():
    check_fixed(composed("scale=demo", "benchmark.targets.accuracy.value=0.5"), ["model.width=16: too narrow"])


def test_synthetic_data_called_real_are_refused():
    with pytest.raises(ConfigError, match=r"benchmark\.targets\.accuracy\.value=0\.95"):
        check_fixed(composed("scale=demo", "benchmark.data_set=imagenet-1k"), ())


def test_a_run_in_the_closed_division_is_refused_before_it_starts(tmp_path):
    overrides = [
        "benchmark.targets.accuracy.value=0.7",
        "hparams.label_smoothing=0.2",
        "device=cpu",
        f"output_dir={tmp_path / 'out'}",
    ]
    done = suite("train", "benchmark=resnet", "scale=1xH200", *overrides)
    assert done.code == ConfigError.exit_code
    assert "Traceback" not in done.errors
    assert "benchmark.targets.accuracy.value=0.7: the rules fix 0.759" in done.errors
    assert "label_smoothing = 0.2 breaks the rules' table: 0 or 0.1" in done.errors
    assert not (tmp_path / "out").exists()


def test_rnnts_longest_utterance_and_so_the_number_of_samples_are_free():
    # training_rules, RNN-T: data_train_max_duration and train_samples are unconstrained, eval_samples is 2703
    overrides = ["benchmark=rnnt", "scale=8xH200", "benchmark.train_samples=262144", "hparams.max_duration=15"]
    run, session = cli.load(compose(overrides))
    assert admit(run, session).hyperparameters["data_train_max_duration"] == 15
    with pytest.raises(ConfigError, match=r"benchmark\.eval_samples=2000: the rules fix 2703"):
        admit(*cli.load(compose([*overrides, "benchmark.eval_samples=2000"])))


def test_the_open_division_skips_these_rules():
    overrides = [
        "benchmark.targets.accuracy.value=0.7",
        "hparams.label_smoothing=0.2",
        "submission.division=open",
        "device=cpu",
    ]
    run, session = cli.load(compose(["benchmark=resnet", "scale=1xH200", *overrides]))
    trainer = Trainer(
        cli.workload_class("resnet"), run, session, RankInfo(0, 1, 0, 1, 0, "single"), torch.device("cpu")
    )
    assert trainer.run.benchmark.targets["accuracy"].value == 0.7
