"""Llama 3.1 8B as a workload: published recipes, what is logged and trained, and what the rules fix."""

import json
from importlib import resources

import pytest
import torch

from benchmarks.llama31_8b.config import ModelConfig
from benchmarks.llama31_8b.workload import LlamaPretraining
from common.contract.evaluation import Predictions
from common.data.batches import Batch
from common.errors import ConfigError, UnsupportedImplementation
from common.language.pretraining import TokenMean
from common.mlperf.admission import admit, evaluation_schedule
from common.mlperf.constraints import missing_hyperparameters
from common.mlperf.events import hyperparameters
from tests.benchmarks.pretraining_checks import (
    check_ten_updates,
    check_that_every_micro_batch_counts,
    check_that_fp8_trains_as_bf16,
    check_that_graphs_train_as_eager_passes,
    evaluate_three_rows,
)
from tests.benchmarks.recipes import recipes_of
from tests.benchmarks.summed_gradients import check_that_fp32_is_closer

loaded, built = recipes_of("llama31_8b", LlamaPretraining)


SCALES = {
    "1xGPU": (1, 16, 16, 4e-4, 16),
    "1xH200": (1, 16, 16, 4e-4, 16),
    "2xH200": (2, 16, 8, 4e-4, 16),
    "4xH200": (4, 16, 4, 4e-4, 16),
    "8xH200": (8, 32, 4, 5e-4, 512),
    "64xH100": (64, 64, 1, 8e-4, 192),
}
"""Ranks, global batch, micro-batches of a step, learning rate and steps of the warm-up."""


@pytest.mark.parametrize("scale", list(SCALES))
@pytest.mark.parametrize("ruleset", ["5.1.0", "6.0.0", "6.1.0"])
def test_a_recipe_logs_what_the_rules_ask_for(scale, ruleset):
    ranks, batch, accumulated, rate, warmup = SCALES[scale]
    run, session = loaded(f"scale={scale}", f"ruleset={ruleset}")
    logged = admit(run, session).hyperparameters
    assert missing_hyperparameters("llama31_8b", ruleset, logged) == []
    assert run.world_size == ranks
    expected = {
        "global_batch_size": batch, "gradient_accumulation_steps": accumulated, "max_sequence_length": 8192,
        "opt_name": "adamw", "opt_base_learning_rate": rate, "opt_learning_rate_warmup_steps": warmup,
        "opt_learning_rate_decay_steps": 1_200_000 - warmup, "max_steps": 1_200_000,
        "opt_learning_rate_decay_schedule": "cosine with linear warmup", "opt_adamw_beta_1": 0.9,
        "opt_adamw_beta_2": 0.95, "opt_adamw_epsilon": 1e-5, "opt_adamw_weight_decay": 0.1,
        "opt_gradient_clip_norm": 1.0,
    }  # fmt: skip
    assert {key: logged[key] for key in expected} == expected
    assert logged["opt_end_learning_rate"] == pytest.approx(0.1 * rate)
    keys = list(logged)
    for first, then in (
        ("global_batch_size", "opt_base_learning_rate"),
        ("opt_learning_rate_warmup_steps", "opt_learning_rate_decay_steps"),
    ):  # the checker keeps what it has seen
        assert keys.index(first) < keys.index(then)
    if ruleset == "6.1.0":
        assert logged["lowest_numerical_precision_in_linear"] == "fp8"


def test_the_reference_points_of_mlcommons_can_be_run():
    package = resources.files("mlperf_logging.rcp_checker")
    points = json.loads((package / "training_6.1.0" / "rcps_llama31_8b.json").read_text())
    found = set()
    for point in points.values():
        run, _ = loaded("scale=1xH200", f"hparams=llama31_8b/rcp_{point['BS']}")
        own, reference = run.workload, point["Hyperparams"]
        assert hyperparameters(run)["global_batch_size"] == point["BS"]
        assert own.hparams.base_learning_rate == reference["opt_base_learning_rate"]
        assert own.hparams.warmup_steps == reference["opt_learning_rate_warmup_samples"] // point["BS"]
        found.add(point["BS"])
    assert found == {16, 32, 64, 96, 128}


def test_no_evaluation_comes_after_the_rows_of_the_order():
    """2,500,000 rows have 203 whole intervals, and a run of one step has 16 rows."""
    run, _ = loaded("scale=1xH200")
    assert list(evaluation_schedule(run).points())[-1] == 203 * 12_288
    with pytest.raises(ConfigError, match="no evaluation falls before the end: first 12288, last 16"):
        evaluation_schedule(loaded("scale=1xH200", "benchmark.facts.max_steps=17", "hparams.warmup_steps=16",
                                   "reader.index_rows=16")[0])  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("benchmark.facts.row_length", 4096), ("benchmark.facts.layers", 16), ("benchmark.facts.rope_factor", 1.5),
        ("benchmark.facts.max_grad_norm", 2.0), ("benchmark.facts.initializer_range", 0.01),
        ("benchmark.eval_samples", 512), ("model.layers", 4),
    ],
)  # fmt: skip
def test_the_closed_division_fixes_the_model_and_the_data(key, value):
    logged = {"row_length": "max_sequence_length", "max_grad_norm": "opt_gradient_clip_norm"}
    name = key.rpartition(".")[2]
    message = f"{logged[name]} = {value}" if name in logged else f"{key}={value}"
    with pytest.raises(ConfigError, match=message):
        admit(*loaded("scale=1xH200", f"{key}={value}"))
    admit(*loaded("scale=1xH200", "submission.division=open", f"{key}={value}"))


def test_ten_updates_are_those_of_torch():
    """AdamW with epsilon 1e-5 and decay, the warm-up's rates, and gradients clipped to a norm of 1."""
    given = ("precision=fp64", "hparams.global_batch_size=2", "hparams.warmup_steps=4")
    ours, theirs = built(*given), built(*given, "model.blocks=autograd")
    matrices = [p for p in theirs.model.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.model.parameters() if p.ndim == 1]
    rate = ours.own.hparams.base_learning_rate
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=rate, betas=(0.9, 0.95), eps=1e-5,
    )  # fmt: skip
    check_ten_updates(ours, theirs, adamw, lambda number: rate * min(1.0, (number + 1) / 5))


def test_log_perplexity_is_the_mean_over_the_tokens_and_not_over_the_rows():
    workload = built("precision=fp64")
    tokens, predictions, found = evaluate_three_rows(workload, last_label=True)
    with torch.no_grad():
        sums = [workload.stage.scored(0, None, Batch({"tokens": row[None]}, 1))[0].sum() for row in tokens]
    labels = 2 * workload.own.facts.row_length + 4
    assert found["log_perplexity"] == pytest.approx(float(sum(sums)) / labels, rel=1e-12)
    assert found["eval_samples"] == 3
    assert predictions.values["tokens"] == labels


def test_an_evaluation_of_a_part_of_the_set_does_not_count():
    with pytest.raises(RuntimeError, match="7 of 8 rows"):
        TokenMean("rows").score(Predictions({"rows": 7, "tokens": 70, "loss": 7.0, "expected": 8}))


def test_a_row_costs_what_the_rules_network_costs():
    """The published constant of 421.59 TFLOP counts the causal half of the attention."""
    run, _ = loaded("scale=1xH200")
    workload = object.__new__(LlamaPretraining)
    workload.own, workload.architecture = run.workload, run.workload.facts
    assert workload.sample_flops() == pytest.approx(421.6e12, rel=2e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"linear": "fp8"}, "linear=fp8"),
        ({"recomputed_gate_up": 1}, "recomputed_gate_up=1"),
    ],
)
def test_autograd_does_nothing_by_halves(given, message):
    values = {"layers": 0, "linear": "torch", "head_chunk": 16, "loss_scale": 1.0, **given}
    with pytest.raises(ConfigError, match=f"{message}.*model.blocks=handwritten"):
        ModelConfig(blocks="autograd", **values)


@pytest.mark.slow
def test_gradients_in_fp32_are_closer_to_float64_than_those_that_are_rounded_each_time():
    """Three steps of 48 micro-batches: what is left is what bf16 costs within a micro-batch."""
    check_that_fp32_is_closer(built)


def test_rows_that_fp8_cannot_multiply_are_refused_before_anything_is_built():
    with pytest.raises(UnsupportedImplementation, match=r"model\.linear=fp8.*multiple of 16"):
        built("precision=bf16", "model.linear=fp8", "benchmark.facts.row_length=20", "micro_batch=1")
    with pytest.raises(UnsupportedImplementation, match=r"model\.linear=fp8.*float32"):
        built("model.linear=fp8")


def test_more_layers_than_the_network_has_are_refused():
    with pytest.raises(ConfigError, match=r"model\.layers=3: the network has 2"):
        built("model.layers=3")


def test_frequencies_that_overlap_are_refused():
    with pytest.raises(ConfigError, match=r"rope_slow_turns=4\.0"):
        loaded("scale=test", "benchmark.facts.rope_slow_turns=4.0")


def test_fp8_trains_as_bf16_does():
    check_that_fp8_trains_as_bf16(built)


def test_the_first_micro_batch_is_not_the_only_one_that_counts():
    check_that_every_micro_batch_counts(built)


@pytest.mark.parametrize(
    ("given", "casts"), [(("precision=fp64",), 0), (("precision=bf16", "model.linear=fp8"), 8)], ids=["fp64", "fp8"]
)
def test_graphs_of_both_passes_train_as_eager_ones_bit_for_bit(given, casts):
    check_that_graphs_train_as_eager_passes(built, given, casts)


@pytest.mark.parametrize("blocks", ["handwritten", "autograd"])
def test_prepare_waits_for_the_weights_of_all_readers(blocks):
    workload = built(f"model.blocks={blocks}")
    readers = dict(workload.stage.readers)
    waited = []
    for name, reader in readers.items():
        reader.register_forward_pre_hook(lambda *_, name=name: waited.append(name))
    workload.stage.prepare()
    assert waited == list(readers)
    read = {id(parameter) for reader in readers.values() for parameter in reader.parameters()}
    others = {name for name, parameter in workload.model.named_parameters() if id(parameter) not in read}
    assert others == (set() if blocks == "handwritten" else {"norm.weight", "head.weight"})
