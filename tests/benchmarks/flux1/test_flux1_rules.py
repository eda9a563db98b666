"""Recipes, sets of hyperparameters and log of FLUX.1 in each round's rules."""

from __future__ import annotations

import itertools
import json
from importlib import resources

import pytest

from common import cli
from common.config.composition import compose, scales_of
from common.config.schema import RunConfig, SessionConfig
from common.errors import ConfigError
from common.mlperf.admission import admit, evaluation_schedule

RULESETS = ("5.1.0", "6.0.0", "6.1.0")

# Nodes, GPUs of a node, global batch, learning rate, warm-up, accumulated micro-batches, GPUs of a layer, precision.
SCALES = {
    "1xH200": (1, 1, 512, 2e-4, 1600, 32, 1, "bfloat16"),
    "2xH200": (1, 2, 512, 2e-4, 1600, 32, 1, "bfloat16"),
    "4xH200": (1, 4, 512, 2e-4, 1600, 8, 1, "bfloat16"),
    "8xH200": (1, 8, 512, 2e-4, 1600, 4, 1, "bfloat16"),
    "16xB200": (2, 8, 512, 2e-4, 1600, 1, 1, "fp8"),
    "32xB200": (4, 8, 1024, 1.85e-4, 0, 1, 1, "fp8"),
    "16xGB200": (4, 4, 512, 2e-4, 1600, 1, 1, "fp8"),
    "16xGB300": (4, 4, 1024, 1.85e-4, 0, 1, 1, "fp8"),
    "72xGB200": (18, 4, 2304, 1.85e-4, 0, 1, 1, "fp8"),
    "72xGB300": (18, 4, 2304, 1.85e-4, 0, 1, 1, "fp8"),
    "512xGB200": (128, 4, 2048, 1.9e-4, 0, 1, 4, "bfloat16"),
    "512xGB300": (128, 4, 2048, 1.9e-4, 0, 1, 4, "bfloat16"),
    "1152xGB200": (288, 4, 2304, 1.85e-4, 0, 1, 4, "bfloat16"),
}


def loaded(*overrides: str) -> tuple[RunConfig, SessionConfig]:
    return cli.load(compose(["benchmark=flux1", *overrides]))


def test_every_scale_of_gpus_is_in_the_table():
    assert set(scales_of("flux1")) - {"demo", "test"} == set(SCALES)


@pytest.mark.parametrize("scale", SCALES)
def test_a_recipe_has_the_published_settings(scale):
    nodes, gpus, batch, rate, warmup, accumulated, tp, precision = SCALES[scale]
    parts = ["submission.division=open"] if scale == "1xH200" else []  # fewer blocks than the rules' network has
    run, session = loaded(f"scale={scale}", *parts)
    logged = admit(run, session).hyperparameters
    assert (run.scale.nodes, run.scale.gpus_per_node) == (nodes, gpus)
    assert {
        key: logged[key]
        for key in (
            "global_batch_size", "opt_base_learning_rate", "opt_learning_rate_warmup_steps",
            "gradient_accumulation_steps", "tensor_parallelism", "lowest_numerical_precision_in_linear",
        )
    } == {
        "global_batch_size": batch, "opt_base_learning_rate": rate, "opt_learning_rate_warmup_steps": warmup,
        "gradient_accumulation_steps": accumulated, "tensor_parallelism": tp,
        "lowest_numerical_precision_in_linear": precision,
    }  # fmt: skip


@pytest.mark.parametrize("ruleset", RULESETS)
def test_the_reference_points_of_mlcommons_can_be_run(ruleset):
    package = resources.files("mlperf_logging.rcp_checker")
    points = json.loads((package / f"training_{ruleset}" / "rcps_flux1.json").read_text())
    found = set()
    for point in points.values():
        batch = point["BS"]
        changed = f"_v{ruleset[0]}.{1 if ruleset == '5.1.0' else 0}" if batch == 1024 else ""
        name = f"rcp{changed.replace('_v6.1', '_v6.0')}_{batch}"
        run, session = loaded("scale=8xH200", f"hparams=flux1/{name}", f"ruleset={ruleset}")
        logged = admit(run, session).hyperparameters
        assert {key: logged[key] for key in point["Hyperparams"]} == point["Hyperparams"]
        assert logged["global_batch_size"] == batch
        found.add(batch)
    assert found == {512, 1024, 2048, 4096}


# The rules: every ceil(262,144 / batch) steps; the checkers of v5.1 and v6.0 require 262,144 in the log of any batch.
FREQUENCIES = [
    ("5.1.0", 512, 262144, 262144),
    ("6.0.0", 512, 262144, 262144),
    ("6.1.0", 512, 262144, 262144),
    ("5.1.0", 2304, 262144, 262656),
    ("6.0.0", 2304, 262144, 262656),
    ("6.1.0", 2304, 262656, 262656),
]


@pytest.mark.parametrize(("ruleset", "batch", "logged", "points"), FREQUENCIES)
def test_the_interval_in_the_log_is_that_of_the_ruleset(ruleset, batch, logged, points):
    scale = {512: "8xH200", 2304: "72xGB200"}[batch]
    run, session = loaded(f"scale={scale}", f"ruleset={ruleset}")
    admission = admit(run, session)
    keys = list(admission.hyperparameters)
    assert admission.hyperparameters["evaluation_frequency"] == logged
    assert keys.index("global_batch_size") < keys.index("evaluation_frequency")  # the checker of v6.1 needs it
    assert list(itertools.islice(admission.schedule.points(), 2)) == [points, 2 * points]


@pytest.mark.parametrize("ruleset", RULESETS)
def test_another_interval_is_refused_in_the_closed_division(ruleset):
    with pytest.raises(ConfigError, match=r"evaluation_frequency = 1024 breaks rule(.|\n)*schedule.interval=1024"):
        admit(*loaded("scale=8xH200", "benchmark.schedule.interval=1024", f"ruleset={ruleset}"))


def test_a_run_ends_at_twice_the_slowest_reference_run():
    run, _ = loaded("scale=8xH200")
    assert list(evaluation_schedule(run).points())[-1] == 33030144 == 2 * 16515072


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("hparams.beta_1=0.8", "opt_adamw_beta_1 = 0.8 breaks rule"),
        ("hparams.beta_2=0.999", "opt_adamw_beta_2 = 0.999 breaks rule"),
        ("hparams.epsilon=1e-7", "opt_adamw_epsilon = 1e-07 breaks rule"),
        ("hparams.weight_decay=0.01", "opt_adamw_weight_decay = 0.01 breaks rule"),
        ("benchmark.facts.max_grad_norm=2.0", "opt_gradient_clip_norm = 2.0 breaks rule"),
    ],
)
@pytest.mark.parametrize("ruleset", RULESETS)
def test_the_closed_division_fixes_the_optimizer(override, complaint, ruleset):
    with pytest.raises(ConfigError, match=complaint):
        admit(*loaded("scale=8xH200", override, f"ruleset={ruleset}"))


@pytest.mark.parametrize(
    "override",
    ["benchmark.eval_samples=30000", "benchmark.train_samples=1099775", "benchmark.targets.eval_loss.value=0.6"],
)
def test_the_closed_division_fixes_data_and_target(override):
    key, _, value = override.removeprefix("benchmark.").partition("=")
    with pytest.raises(ConfigError, match=f"{key}={value}: the rules fix"):
        admit(*loaded("scale=8xH200", override))
