"""Hyperparameters that the closed division forbids are refused before a run."""

import pytest
from handwritten_logs import LARS

from common.errors import ConfigError
from common.mlperf.constraints import check_hyperparameters, missing_hyperparameters
from common.mlperf.rules import BENCHMARKS, newest_ruleset

SGD = {
    "global_batch_size": 256,
    "opt_name": "sgd",
    "gradient_accumulation_steps": 1,
    "sgd_opt_base_learning_rate": 0.128,
    "sgd_opt_end_learning_rate": 0.0001,
    "sgd_opt_learning_rate_decay_poly_power": 2,
    "sgd_opt_learning_rate_decay_steps": 100,
    "sgd_opt_weight_decay": 0.0002,
    "sgd_opt_momentum": 0.9,
    "model_bn_span": 32,
    "opt_learning_rate_warmup_epochs": 2,
}

MASKRCNN = {
    "opt_base_learning_rate": 0.12,
    "opt_learning_rate_warmup_steps": 625,
    "opt_learning_rate_warmup_factor": 0.0001,
    "num_image_candidates": 6000,
    "opt_learning_rate_decay_factor": 0.1,
    "opt_learning_rate_decay_steps": [12000, 16000],
    "min_image_size": 800,
    "max_image_size": 1333,
    "gradient_accumulation_steps": 1,
    "global_batch_size": 96,
}


@pytest.mark.parametrize("values", [LARS, SGD], ids=["lars", "sgd"])
def test_resnet_values_of_submissions_pass_and_are_complete(values):
    check_hyperparameters("resnet", "4.0.0", values)
    assert missing_hyperparameters("resnet", "4.0.0", values) == []


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (LARS, "lars_epsilon", 1e-8),
        (LARS, "lars_opt_weight_decay", 3e-5),
        (LARS, "lars_opt_weight_decay", 0.0),
        (LARS, "opt_name", "adam"),
        (LARS, "global_batch_size", 0),
        (LARS, "gradient_accumulation_steps", 0),
        (LARS, "gradient_accumulation_steps", "two"),
        (SGD, "sgd_opt_weight_decay", 3e-4),
    ],
)
def test_forbidden_resnet_value_is_named_with_its_rule(base, key, value):
    with pytest.raises(ConfigError) as caught:
        check_hyperparameters("resnet", None, {**base, key: value})
    message = str(caught.value)
    assert f"{key} = " in message
    assert str(value) in message
    assert ".yaml" in message or "rules' table" in message


def test_allowed_choices_of_resnet_pass():
    check_hyperparameters("resnet", "4.0.0", {**LARS, "lars_opt_weight_decay": 0.0002, "lars_opt_momentum": 0.9})
    check_hyperparameters("resnet", "4.0.0", {**LARS, "global_batch_size": 32768, "lars_opt_momentum": 0.94})


def test_every_broken_rule_is_listed():
    with pytest.raises(ConfigError) as caught:
        check_hyperparameters("resnet", None, {**LARS, "lars_epsilon": 1.0, "lars_opt_weight_decay": 3e-5})
    assert "lars_epsilon" in str(caught.value)
    assert "lars_opt_weight_decay" in str(caught.value)


def test_rules_that_refer_to_another_key_do_not_depend_on_the_order():
    check_hyperparameters("maskrcnn", None, MASKRCNN)
    check_hyperparameters("maskrcnn", None, {**MASKRCNN, "global_batch_size": 8, "opt_base_learning_rate": 0.01})
    with pytest.raises(ConfigError, match=r"opt_base_learning_rate = 0\.01"):
        check_hyperparameters("maskrcnn", None, {**MASKRCNN, "opt_base_learning_rate": 0.01})


@pytest.mark.parametrize(
    ("batch", "rate", "allowed"),
    [
        (1536, 2e-5, True),
        (1536, 3e-5, False),
        (3072, 2e-5, True),
        (3072, 3e-5, False),
        (3584, 2e-5, True),
        (3584, 3e-5, True),
        (4096, 2e-5, False),
        (4096, 3e-5, True),
        (8192, 2e-5, False),
    ],
)
def test_gpt3_learning_rate_depends_on_the_batch(batch, rate, allowed):
    values = {"global_batch_size": batch, "opt_base_learning_rate": rate}
    if allowed:
        check_hyperparameters("gpt3", None, values)
    else:
        with pytest.raises(ConfigError, match="opt_base_learning_rate"):
            check_hyperparameters("gpt3", None, values)


@pytest.mark.parametrize("batch", [1520, 8208])
def test_gpt3_has_no_reference_points_for_smaller_or_larger_batches(batch):
    values = {"global_batch_size": batch, "opt_base_learning_rate": 2e-5 if batch < 2048 else 3e-5}
    with pytest.raises(ConfigError, match=rf"global_batch_size = {batch} breaks the rules' table: 1,536 to 8,192"):
        check_hyperparameters("gpt3", None, values)


@pytest.mark.parametrize(
    ("epochs", "allowed"),
    [((40, 50), True), ([44, 55], True), ((68, 85), True), ((41, 50), False), ((44, 50), False), ((40, 50, 60), False)],
)
def test_ssd300s_learning_rate_falls_at_a_multiple_of_40_and_50_epochs(epochs, allowed):
    given = {"opt_learning_rate_decay_boundary_epochs": epochs}
    if allowed:
        check_hyperparameters("ssd300", "1.1.0", given)
    else:
        with pytest.raises(ConfigError, match="opt_learning_rate_decay_boundary_epochs"):
            check_hyperparameters("ssd300", "1.1.0", given)


def test_missing_keys_are_named():
    values = {key: value for key, value in LARS.items() if key not in ("lars_epsilon", "global_batch_size")}
    assert sorted(missing_hyperparameters("resnet", None, values)) == ["global_batch_size", "lars_epsilon"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_needs_hyperparameters_and_none_is_forbidden_when_none_is_given(name):
    check_hyperparameters(name, newest_ruleset(name), {})
    assert missing_hyperparameters(name, newest_ruleset(name), {})


def test_ruleset_that_does_not_accept_the_benchmark_is_an_error():
    with pytest.raises(ConfigError, match="does not accept"):
        check_hyperparameters("resnet", "5.0.0", LARS)


def test_tensors_of_another_network_are_refused_where_a_ruleset_lists_them():
    names = ["FPN_inner_block1", "FPN_layer_block1"]
    with pytest.raises(ConfigError) as caught:
        check_hyperparameters("maskrcnn", "2.1.0", MASKRCNN, tensors=names)
    message = str(caught.value)
    assert "training_2.1.0/closed_maskrcnn.yaml lists the names of the initialised tensors" in message
    assert "the next ruleset without this rule is 3.0.0: ruleset=3.0.0" in message
    check_hyperparameters("maskrcnn", "3.0.0", MASKRCNN, tensors=names)


def test_the_open_division_fixes_no_value_and_requires_the_keys_of_its_rule_files():
    # open_gpt3.yaml of v4.1 has the closed division's keys, and open_maskrcnn.yaml none of hyperparameters
    check_hyperparameters("gpt3", "4.1.0", {"opt_adam_beta_1": 0.8}, division="open")
    check_hyperparameters("maskrcnn", "3.1.0", {"min_image_size": 600}, division="open")
    assert "opt_adam_beta_1" in missing_hyperparameters("gpt3", "4.1.0", {}, "open")
    assert missing_hyperparameters("maskrcnn", "3.1.0", {}, "open") == []
