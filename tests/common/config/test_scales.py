"""The table of scales is Hydra's group ``scale``."""

from __future__ import annotations

import pytest
import yaml

from benchmarks import WORKLOADS
from common.config.composition import CONFIGS, compose, scales_of
from common.errors import ConfigError

TABLE = yaml.safe_load((CONFIGS / "scales.yaml").read_text())


def test_an_entry_of_the_table_is_what_is_composed_and_can_be_overridden():
    assert compose(["scale=64xH100"])["scale"] == {"nodes": 8, "gpus_per_node": 8, "gpu": True}
    assert compose(["scale=64xH100", "scale.nodes=4"])["scale"] == {"nodes": 4, "gpus_per_node": 8, "gpu": True}
    assert compose(["scale=test"])["scale"] == {"nodes": 1, "gpus_per_node": 1}


def test_a_scale_of_gpus_is_named_after_their_number():
    named = {name: int(name.partition("x")[0]) for name, entry in TABLE.items() if entry.get("gpu")}
    assert named == {name: TABLE[name]["nodes"] * TABLE[name]["gpus_per_node"] for name in named}
    assert TABLE.keys() - named.keys() == {"demo", "test"}


def test_every_scale_has_a_recipe():
    assert {scale for name in WORKLOADS for scale in scales_of(name)} == TABLE.keys()


def test_an_unknown_scale_is_named_with_the_known_ones():
    scales = ", ".join(scales_of("resnet"))  # the default benchmark
    with pytest.raises(ConfigError, match=rf"^scale=9xH100: unknown; resnet has {scales}; .*did you mean 8xH100\?$"):
        compose(["scale=9xH100"])


def test_an_unknown_scale_of_a_benchmark_is_named_with_those_that_it_has():
    scales = "112xA100, 1xH200, 8xA100, demo, test"
    with pytest.raises(ConfigError, match=rf"^scale=9xH100: unknown; dlrm has {scales}; `mlperf-suite list` has"):
        compose(["benchmark=dlrm", "scale=9xH100"])


def test_a_scale_takes_no_other_key():
    with pytest.raises(ConfigError, match=r"^scale\.gpus: unknown configuration key"):
        compose(["scale.gpus=1"])
