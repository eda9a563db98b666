"""The rules' table of hyperparameters, in every round of a benchmark: values that it fixes, and others."""

from __future__ import annotations

import math

import pytest
from handwritten_logs import POINT, Line, replaced, resnet_lines

from common.errors import ConfigError
from common.mlperf.constraints import check_hyperparameters, hyperparameter_complaints
from common.mlperf.evaluation_points import check_evaluation_points
from common.mlperf.parsed_log import read_log
from common.mlperf.rules import newest_ruleset, rules_for
from common.mlperf.run_refusals import text_rule_refusals
from common.mlperf.text_rules import TEXT_RULES
from common.mlperf.verdict import judge

LARS_RUN = {"opt_name": "lars"}
SGD_RUN = {"opt_name": "sgd"}
LLAMA_405B = {"global_batch_size": 1152}
GPT3 = {"global_batch_size": 2048}
MASK_RCNN = {"global_batch_size": 96}

ROWS: list[tuple[str, dict[str, object], str, object, object]] = [
    ("bert", {}, "opt_lamb_learning_rate_decay_poly_power", 1.0, 2.0),
    ("bert", {}, "opt_name", "lamb", "adam"),
    ("resnet", LARS_RUN, "lars_opt_end_learning_rate", 0.0001, 0.001),
    ("resnet", LARS_RUN, "lars_opt_learning_rate_decay_poly_power", 2, 1),
    ("resnet", LARS_RUN, "lars_epsilon", 0.0, 1e-8),
    ("resnet", {}, "lars_eta", 0.001, 0.01),
    ("resnet", LARS_RUN, "lars_opt_weight_decay", 0.0002, 0.0003),
    ("resnet", {"global_batch_size": 3264}, "lars_opt_momentum", 0.9, 0.94),
    ("resnet", {}, "label_smoothing", 0.1, 0.2),
    ("resnet", SGD_RUN, "sgd_opt_end_learning_rate", 0.0001, 0.0),
    ("resnet", SGD_RUN, "sgd_opt_learning_rate_decay_poly_power", 2, 1),
    ("resnet", SGD_RUN, "sgd_opt_momentum", 0.9, 0.95),
    ("resnet", SGD_RUN, "sgd_opt_base_learning_rate", 0.128, 0.1284),
    ("resnet", {}, "opt_learning_rate_warmup_epochs", 2, 2.5),
    ("maskrcnn", {}, "opt_name", "sgd_with_momentum", "adam"),
    ("maskrcnn", {}, "min_image_size", 800, 600),
    ("maskrcnn", {}, "max_image_size", 1333, 1000),
    ("maskrcnn", {}, "opt_learning_rate_decay_factor", 0.1, 0.2),
    ("maskrcnn", {}, "opt_momentum", 0.9, 0.95),
    ("maskrcnn", {}, "opt_weight_decay", 1e-4, 1e-3),
    ("maskrcnn", {}, "num_image_candidates", 6000, 1500),
    ("maskrcnn", MASK_RCNN, "opt_base_learning_rate", 0.12, 0.11),
    ("maskrcnn", MASK_RCNN, "opt_learning_rate_decay_steps", [12000, 16000], [12000, 16500]),
    ("maskrcnn", MASK_RCNN, "opt_learning_rate_decay_steps", [12000, 16000], [9000, 16000]),
    ("maskrcnn", {"global_batch_size": 256}, "opt_learning_rate_decay_steps", [5625, 7500], [5625, 7700]),
    ("maskrcnn", {"global_batch_size": 272}, "opt_learning_rate_decay_steps", [5294, 7058], [5294, 7158]),
    ("maskrcnn", {"global_batch_size": 8}, "opt_learning_rate_decay_steps", [144000, 192000], [144000, 193000]),
    ("ssd300", {}, "model_bn_span", 128, 0.5),
    ("ssd300", {}, "max_samples", 50, 10),
    ("ssd300", {}, "opt_learning_rate_warmup_factor", 0, 0.5),
    ("ssd300", {}, "opt_learning_rate_warmup_steps", 642, 0),
    ("ssd300", {}, "opt_momentum", 0.9, 0.8),
    ("ssd300", {}, "opt_learning_rate_decay_boundary_epochs", [44, 55], [40, 55]),
    ("retinanet", {}, "opt_name", "adam", "sgd"),
    ("retinanet", {}, "opt_weight_decay", 0, 1e-4),
    ("retinanet", {}, "opt_learning_rate_warmup_epochs", 1, 0.5),
    ("retinanet", {}, "opt_adam_beta_1", 0.9, 0.95),
    ("retinanet", {}, "opt_adam_beta_2", 0.999, 0.99),
    ("retinanet", {}, "opt_adam_epsilon", 1e-8, 1e-7),
    ("unet3d", {}, "opt_name", "nag", "adam"),
    ("unet3d", {}, "oversampling", 0.4, 0.5),
    ("unet3d", {}, "training_input_shape", [128, 128, 128], [64, 64, 64]),
    ("unet3d", {}, "validation_input_shape", [128, 128, 128], [128, 128]),
    ("unet3d", {}, "validation_overlap", 0.5, 0.25),
    ("rnnt", {}, "opt_name", "lamb", "adam"),
    ("rnnt", {}, "opt_lamb_epsilon", 1e-9, 1e-6),
    ("rnnt", {}, "opt_weight_decay", 1e-3, 1e-2),
    ("rnnt", {}, "opt_gradient_clip_norm", 1, 2),
    ("rnnt", {}, "opt_gradient_clip_norm", math.inf, math.nan),
    ("rnnt", {}, "opt_learning_rate_alt_decay_func", True, False),
    ("rnnt", {}, "opt_learning_rate_alt_warmup_func", True, False),
    ("rnnt", {}, "opt_lamb_learning_rate_min", 1e-5, 1e-6),
    ("rnnt", {}, "data_speed_perturbaton_min", 0.85, 0.9),
    ("rnnt", {}, "data_speed_perturbaton_max", 1.15, 1.1),
    ("rnnt", {}, "data_spec_augment_freq_n", 2, 1),
    ("rnnt", {}, "data_spec_augment_freq_min", 0, 1),
    ("rnnt", {}, "data_spec_augment_freq_max", 20, 27),
    ("rnnt", {}, "data_spec_augment_time_n", 10, 2),
    ("rnnt", {}, "data_spec_augment_time_min", 0, 0.01),
    ("rnnt", {}, "data_spec_augment_time_max", 0.03, 0.05),
    ("rnnt", {}, "eval_max_prediction_symbols", 300, 30),
    ("dlrm", {}, "sgd_opt_learning_rate_decay_poly_power", 2, 1),
    ("dlrm_dcnv2", {}, "opt_name", "adagrad", "sgd"),
    ("dlrm_dcnv2", {}, "opt_adagrad_learning_rate_decay", 0.0, 0.1),
    ("dlrm_dcnv2", {}, "opt_weight_decay", 0.0, 1e-4),
    ("dlrm_dcnv2", {}, "opt_adagrad_initial_accumulator_value", 0.0, 0.1),
    ("dlrm_dcnv2", {}, "opt_adagrad_epsilon", 1e-8, 1e-7),
    ("dlrm_dcnv2", {}, "opt_learning_rate_warmup_steps", 0, 1),
    ("dlrm_dcnv2", {}, "opt_learning_rate_decay_start_step", 0, 1),
    ("dlrm_dcnv2", {}, "opt_learning_rate_decay_steps", 0, 1),
    ("gpt3", {}, "opt_name", "adam", "adamw"),
    ("gpt3", {}, "max_sequence_length", 2048, 1024),
    ("gpt3", {}, "opt_adam_beta_1", 0.9, 0.95),
    ("gpt3", {}, "opt_adam_beta_2", 0.95, 0.999),
    ("gpt3", {}, "opt_adam_epsilon", 1e-8, 1e-5),
    ("gpt3", {}, "opt_gradient_clip_norm", 1.0, 0.3),
    ("gpt3", {}, "opt_weight_decay", 0.1, 0.01),
    ("gpt3", {}, "hidden_dropout", 0.0, 0.1),
    ("gpt3", {"opt_base_learning_rate": 2e-5, **GPT3}, "opt_end_learning_rate", 2e-6, 1e-6),
    ("gpt3", GPT3, "opt_learning_rate_warmup_steps", 199, 100),
    ("gpt3", GPT3, "opt_learning_rate_warmup_steps", 198, 202),  # 198.75, rounded down in published logs
    ("gpt3", GPT3, "opt_learning_rate_decay_steps", 81450, 81400),
    ("gpt3", {"opt_learning_rate_warmup_steps": 200, **GPT3}, "opt_learning_rate_decay_steps", 81251, 81300),
    ("gpt3", {"global_batch_size": 2304}, "init_checkpoint_step", 2667, 2666),
    ("stable_diffusion", {}, "opt_name", "adamw", "adam"),
    ("stable_diffusion", {}, "opt_adamw_beta_1", 0.9, 0.95),
    ("stable_diffusion", {}, "opt_adamw_beta_2", 0.999, 0.99),
    ("stable_diffusion", {}, "opt_adamw_epsilon", 1e-8, 1e-6),
    ("stable_diffusion", {}, "opt_adamw_weight_decay", 0.01, 0.0),
    ("llama2_70b_lora", {}, "lora_rank", 16, 8),
    ("llama2_70b_lora", {}, "lora_alpha", 32, 16),
    ("llama2_70b_lora", {}, "lora_dropout", 0.1, 0.0),
    ("llama2_70b_lora", {}, "opt_gradient_clip_norm", 0.3, 1.0),
    ("llama2_70b_lora", {}, "opt_adamw_weight_decay", 0.0001, 0.1),
    ("llama2_70b_lora", {}, "opt_adamw_beta_1", 0.9, 0.95),
    ("llama2_70b_lora", {}, "opt_adamw_beta_2", 0.999, 0.95),
    ("llama2_70b_lora", {}, "opt_adamw_epsilon", 1e-8, 1e-5),
    ("llama31_8b", {}, "opt_adamw_beta_2", 0.95, 0.999),
    ("llama31_8b", {}, "opt_adamw_epsilon", 1e-5, 1e-8),
    ("llama31_8b", {}, "opt_adamw_weight_decay", 0.1, 0.0),
    ("llama31_8b", {}, "opt_gradient_clip_norm", 1.0, 0.3),
    ("llama31_8b", {}, "max_sequence_length", 8192, 4096),
    ("llama31_8b", {"opt_base_learning_rate": 8e-4}, "opt_end_learning_rate", 8e-5, 4e-5),
    ("llama31_405b", LLAMA_405B, "opt_base_learning_rate", 8e-5, 9e-5),
    ("llama31_405b", {"global_batch_size": 960}, "opt_base_learning_rate", 6.666666666666667e-05, 8e-5),
    ("llama31_405b", LLAMA_405B, "opt_end_learning_rate", 8e-7, 8e-6),
    ("llama31_405b", LLAMA_405B, "opt_learning_rate_warmup_steps", 8000, 4000),
    (
        "llama31_405b",
        {"opt_learning_rate_warmup_steps": 8000, **LLAMA_405B},
        "opt_learning_rate_decay_steps",
        1_192_000,
        1_200_000,
    ),
    ("llama31_405b", {}, "opt_adamw_epsilon", 1e-5, 1e-8),
    ("rgat", {}, "opt_name", "adam", "adamw"),
    ("rgat", {}, "opt_adam_beta_2", 0.999, 0.99),
    ("rgat", {}, "opt_weight_decay", 0, 0.01),
    ("flux1", {}, "opt_adamw_beta_2", 0.95, 0.999),
    ("flux1", {}, "opt_adamw_epsilon", 1e-8, 1e-5),
    ("flux1", {}, "opt_adamw_weight_decay", 0.1, 0.01),
    ("flux1", {}, "opt_gradient_clip_norm", 1.0, 0.5),
    ("deepseekv3_671b", {"global_batch_size": 16384}, "opt_base_learning_rate", 2.4e-5, 3e-5),
    ("deepseekv3_671b", {}, "opt_learning_rate_warmup_steps", 4, 8),
    ("dlrmv4", {"global_batch_size": 8192}, "opt_base_learning_rate", 1e-6, 2e-6),
    ("qwen35_397b_grpo", {"global_batch_size": 256}, "opt_base_learning_rate", 1e-6, 2e-6),
    ("qwen35_397b_grpo", {"global_batch_size": 1024}, "opt_gradient_clip_norm", 0.0625, 0.125),
    ("minigo", {}, "min_selfplay_games_per_generation", 8192, 4096),
    ("cosmoflow", {}, "opt_momentum", 0.9, 0.8),
    ("cosmoflow", {}, "opt_learning_rate_decay_factor", [0.25, 0.125], [0.25, 1.5]),
    ("deepcam", {}, "opt_eps", 1e-6, 1e-8),
    ("oc20", {}, "opt_name", "AdamW", "Adam"),
    ("oc20", {}, "opt_learning_rate_decay_factor", 0.1, 1.5),
    ("oc20", {}, "opt_adamw_weight_decay", 0.01, 0.0),
    ("openfold", {}, "opt_gradient_clip_norm", 0.1, 1.0),
]
"""Benchmark, values that a rule needs, key, a value of the rules, reference or published logs, and one they forbid."""

EVERY = [
    pytest.param(*row, ruleset, id=f"{row[0]}-{ruleset}-{row[2]}-{number}")
    for number, row in enumerate(ROWS)
    for ruleset in rules_for(row[0], newest_ruleset(row[0])).accepted_by
]


@pytest.mark.parametrize(("benchmark", "others", "key", "allowed", "forbidden", "ruleset"), EVERY)
def test_a_value_that_the_table_forbids_is_refused_in_every_round(benchmark, others, key, allowed, forbidden, ruleset):
    check_hyperparameters(benchmark, ruleset, {**others, key: allowed})
    with pytest.raises(ConfigError, match=f"{key} = "):
        check_hyperparameters(benchmark, ruleset, {**others, key: forbidden})


@pytest.mark.parametrize(
    ("benchmark", "logged"),
    [
        # NVIDIA, rounds v3.0 and v3.1, 64 H100: the first step is 6,000 by the formula.
        ("maskrcnn", {"global_batch_size": 256, "opt_learning_rate_decay_steps": [6125, 8000]}),
        # Google, rounds v3.1 and v4.0: the share of the base rate, and steps counted from the end of the warm-up.
        (
            "gpt3",
            {
                "global_batch_size": 2048,
                "opt_base_learning_rate": 2e-5,
                "opt_end_learning_rate": 0.1,
                "opt_learning_rate_warmup_steps": 200,
                "opt_learning_rate_decay_steps": 81251,
            },
        ),
    ],
    ids=["maskrcnn", "gpt3"],
)
def test_values_of_published_results_pass_where_the_text_is_read_in_several_ways(benchmark, logged):
    assert hyperparameter_complaints(rules_for(benchmark), logged) == {}


@pytest.mark.parametrize(("ruleset", "allowed"), [("6.0.0", True), ("6.1.0", False)])
def test_a_row_holds_in_its_rounds_only(ruleset, allowed):
    # training_rules: in v6.0 alone GPT-OSS may end at 4e-5
    logged = {"opt_base_learning_rate": 8e-4, "opt_end_learning_rate": 4e-5}
    complaints = hyperparameter_complaints(rules_for("gpt_oss_20b", ruleset), logged)
    assert set(complaints) == (set() if allowed else {"opt_end_learning_rate"})
    assert all("(training_rules, v6.1)" in text for text in complaints.values())


@pytest.mark.parametrize("name", TEXT_RULES)
def test_rows_name_rounds_of_their_benchmark_and_values_of_another_type_break_them(name):
    rules = rules_for(name)
    for rule in TEXT_RULES[name]:
        assert rule.rounds(rules)
        for strange in (None, "many", {}, [None, None], True):
            logged = {"global_batch_size": 1, "opt_base_learning_rate": 1.0, rule.key: strange}
            assert rule.key in hyperparameter_complaints(rules, logged) or rules.ruleset not in rule.rounds(rules)


@pytest.mark.parametrize("batch", [None, "64", 0, math.inf], ids=str)
def test_a_formula_names_a_missing_value(batch):
    logged = {"global_batch_size": batch, "opt_learning_rate_decay_steps": [12000, 16000]}
    complaint = hyperparameter_complaints(rules_for("maskrcnn"), logged)["opt_learning_rate_decay_steps"]
    assert "global_batch_size must be" in complaint


@pytest.mark.parametrize(
    ("benchmark", "key", "value", "refused"),
    [
        ("bert", "opt_base_learning_rate", math.nan, True),
        ("bert", "opt_lamb_beta_1", math.inf, True),
        ("ssd300", "opt_learning_rate_decay_boundary_epochs", [40, math.nan], True),
        ("rnnt", "opt_gradient_clip_norm", math.inf, False),
        ("rnnt", "opt_base_learning_rate", -math.inf, True),
        ("bert", "train_loss", math.nan, False),
    ],
)
def test_a_hyperparameter_is_a_number(benchmark, key, value, refused):
    complaints = hyperparameter_complaints(rules_for(benchmark), {key: value})
    assert list(complaints) == ([key] if refused else [])


def test_check_names_line_rule_and_source(write_log):
    lines = replaced(resnet_lines(), "lars_opt_momentum", 0.95)
    lines.insert(12, (POINT, "label_smoothing", 0.2, {}, 3))
    log = read_log(write_log(lines))
    first, second = text_rule_refusals(log, rules_for("resnet", "4.0.0"))
    assert first.startswith(
        f"line {log.all('lars_opt_momentum')[0].line}: lars_opt_momentum = 0.95 breaks the rules' table"
    )
    assert second.sentence == (
        f"line {log.all('label_smoothing')[0].line}: label_smoothing = 0.2 breaks the rules' table: 0 or 0.1 "
        "(training_rules, v0.7 to v4.0)"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_check_refuses_a_hyperparameter_that_is_no_number(value, write_log):
    verdict = judge(write_log(replaced(resnet_lines(), "lars_opt_base_learning_rate", value)))
    assert verdict.kind == "refused"
    assert any(
        "lars_opt_base_learning_rate" in reason and "neither infinite nor NaN" in reason for reason in verdict.reasons
    )


def ssd_lines(epochs: list[int]) -> list[Line]:
    """The evaluations of an SSD300 run."""
    points: list[Line] = [(POINT, "eval_accuracy", 0.1, {"epoch_num": epoch}, epoch) for epoch in epochs]
    return [(POINT, "submission_benchmark", "ssd", {}, 0), (POINT, "global_batch_size", 1024, {}, 0), *points]


@pytest.mark.parametrize(
    ("ruleset", "epochs", "placed"),
    [
        ("0.7.0", [40, 50, 55, 60, 65, 70, 75, 80], True),
        ("0.7.0", [40, 45, 50], True),
        ("0.7.0", [40, 55], False),
        ("0.7.0", [40, 50, 60], False),
        ("1.0.0", [5, 10, 15], True),
        ("1.0.0", [40, 50, 55], True),
        ("1.1.0", [5, 10, 15, 20], True),
        ("1.1.0", [30, 35, 40], True),
        ("1.1.0", [1, 2, 3], True),
        ("1.1.0", [5, 15, 20], False),
    ],
    ids=str,
)
def test_ssd300_is_evaluated_as_often_as_in_its_round(ruleset, epochs, placed, write_log):
    # training_rules of August 2020: "Fixed at epochs=40, 50, 55, 60, 65, 70, 75, 80"; of December 2021: every 5 epochs
    complaints, _ = check_evaluation_points(read_log(write_log(ssd_lines(epochs))), rules_for("ssd", ruleset))
    assert (complaints == []) == placed, complaints
