"""GPT-3 as a workload: published recipes, what is logged and trained, and what the rules fix."""

from __future__ import annotations

import json
import math
from importlib import resources

import pytest
import torch

from benchmarks.gpt3.workload import GptPretraining
from common.contract.evaluation import Predictions
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.errors import ConfigError
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

CHECKPOINT = "assets_dir=assets"
"""Where the rules' checkpoint would be; nothing is read before the workload is built."""


loaded, built = recipes_of("gpt3", GptPretraining)


SCALES = {
    "64xH100": (64, 1536, 1536, 8, 8, 265, 108_600, 4000),
    "256xH100": (256, 2048, 128, 4, 8, 199, 81_450, 3000),
    "512xH100": (512, 2048, 64, 4, 8, 199, 81_450, 3000),
    "11616xH100": (11616, 2904, 6, 4, 6, 141, 57_442, 2116),
}
"""Ranks, global batch, micro-batches of a step, tp, pp, steps of warm-up, of decay, and of the checkpoint."""


def test_the_reference_at_its_smallest_replays_graphs_of_chunks():
    run, _ = loaded("scale=64xH100", CHECKPOINT)
    assert run.cuda_graphs
    assert run.chunk_graphs
    assert not loaded("scale=512xH100", CHECKPOINT)[0].chunk_graphs


@pytest.mark.parametrize("scale", list(SCALES))
@pytest.mark.parametrize("ruleset", ["3.0.0", "4.1.0"])
def test_a_recipe_logs_what_the_rules_ask_for(scale, ruleset):
    ranks, batch, accumulated, tp, pp, warmup, decay, begins = SCALES[scale]
    run, session = loaded(f"scale={scale}", f"ruleset={ruleset}", CHECKPOINT)
    logged = admit(run, session).hyperparameters
    assert missing_hyperparameters("gpt3", ruleset, logged) == []
    assert (run.world_size, run.layout["tp"], run.layout["pp"]) == (ranks, tp, pp)
    expected = {
        "global_batch_size": batch, "gradient_accumulation_steps": accumulated, "max_sequence_length": 2048,
        "opt_name": "adam", "opt_base_learning_rate": 2e-5, "opt_learning_rate_warmup_steps": warmup,
        "opt_learning_rate_decay_steps": decay, "opt_learning_rate_decay_schedule": "cosine with linear warmup",
        "opt_adam_beta_1": 0.9, "opt_adam_beta_2": 0.95, "opt_adam_epsilon": 1e-8, "opt_weight_decay": 0.1,
        "opt_gradient_clip_norm": 1.0, "init_checkpoint_step": begins,
    }  # fmt: skip
    assert {key: logged[key] for key in expected} == expected
    assert logged["opt_end_learning_rate"] == pytest.approx(2e-6)


@pytest.mark.parametrize("scale", ["1xGPU", "1xH200", "4xH200"])
def test_a_part_of_the_network_is_no_result(scale):
    run, session = loaded(f"scale={scale}", CHECKPOINT)
    (forbidden,) = run.declaration.forbidden
    assert forbidden == f"model.layers={run.workload.model.layers}: the network has 96"
    with pytest.raises(ConfigError, match=r"the closed division .*forbids"):
        admit(run, session)


def test_training_from_random_weights_is_no_result():
    run, session = loaded("scale=512xH100")
    assert "assets_dir=null: training starts from the rules' checkpoint" in run.declaration.forbidden[0]
    with pytest.raises(ConfigError, match=r"init_checkpoint_step = 0 breaks the rules' table: .*published checkpoint"):
        admit(run, session)


@pytest.mark.parametrize("batch", [1024, 16384])
def test_a_batch_without_reference_points_is_refused(batch):
    with pytest.raises(ConfigError, match=f"global_batch_size = {batch} breaks the rules' table: 1,536 to 8,192"):
        admit(*loaded("scale=512xH100", CHECKPOINT, f"hparams.global_batch_size={batch}"))


def test_the_reference_points_of_mlcommons_can_be_run():
    package = resources.files("mlperf_logging.rcp_checker")
    points = json.loads((package / "training_4.1.0" / "rcps_gpt3.json").read_text())
    found = set()
    for point in points.values():
        run, session = loaded("scale=512xH100", f"hparams=gpt3/rcp_{point['BS']}", CHECKPOINT)
        admit(run, session)
        logged, reference = hyperparameters(run), point["Hyperparams"]
        assert logged["global_batch_size"] == point["BS"]
        assert logged["opt_base_learning_rate"] == reference["opt_base_learning_rate"]
        found.add(point["BS"])
    assert found == {1536, 2048, 3072, 4096, 6144, 8192}


@pytest.mark.parametrize(("batch", "begins"), [(1536, 4000), (2048, 3000), (2304, 2667), (4096, 1500)])
def test_the_training_goes_on_behind_the_rows_of_the_checkpoint(batch, begins):
    run, _ = loaded("scale=64xH100", CHECKPOINT, f"hparams.global_batch_size={batch}")
    assert hyperparameters(run)["init_checkpoint_step"] == begins
    assert run.workload.facts.consumed(batch) == begins * batch
    assert list(evaluation_schedule(run).points())[-1] <= 20_000_000 - begins * batch


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("benchmark.facts.positions", 1024), ("benchmark.facts.layers", 48), ("benchmark.facts.warmup_samples", 0),
        ("benchmark.facts.max_grad_norm", 2.0), ("benchmark.facts.initializer_range", 0.02),
        ("benchmark.eval_samples", 512), ("benchmark.facts.checkpoint_steps", 3000), ("model.layers", 48),
    ],
)  # fmt: skip
def test_the_closed_division_fixes_the_model_and_the_data(key, value):
    logged = {"positions": "max_sequence_length", "max_grad_norm": "opt_gradient_clip_norm"}
    name = key.rpartition(".")[2]
    message = f"{logged[name]} = {value}" if name in logged else f"{key}={value}"
    with pytest.raises(ConfigError, match=message):
        admit(*loaded("scale=512xH100", CHECKPOINT, f"{key}={value}"))
    admit(*loaded("scale=512xH100", CHECKPOINT, "submission.division=open", f"{key}={value}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scale=512xH100", "hparams.global_batch_size=1568"],
         r"layout\.pp=8 does not divide the 49 micro-batches of a step, as 6 chunks"),
        (["scale=512xH100", "model.chunks=5"], r"96 layers are not divided by layout\.pp=8 times 5 chunks"),
        (["scale=64xH100", "model.layers=60"], r"60 layers are not divided by layout\.pp=8"),
        (["scale=test", "model.chunks=2"], r"layout\.pp=1 with 2 chunks"),
        (["scale=test", "model.layers=5"], r"model\.layers=5: the network has 4"),
        (["scale=test", "benchmark.facts.warmup_samples=400"], r"warmup_samples=400: not before decay_samples=400"),
        (["scale=test", "benchmark.facts.checkpoint_samples=0"], r"checkpoint_steps=4000 .* checkpoint_samples=0"),
    ],
)  # fmt: skip
def test_sizes_that_the_layout_does_not_divide_are_refused_before_the_network_is_built(overrides, message):
    with pytest.raises(ConfigError, match=message):
        loaded(*overrides)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["model.blocks=autograd", "model.linear=fp8"], r"linear=fp8: .* give model\.blocks=handwritten"),
        (
            ["model.blocks=autograd", "model.token_products=collective"],
            r"token_products=.* model\.blocks=handwritten",
        ),
        (["model.blocks=autograd", "model.put_off_head=2"], r"put_off_head=2: .* give model\.blocks=handwritten"),
        (["model.implementations.accumulation=reference"], r"accumulation=reference: .* set model\.linear=fp8"),
        (["model.put_off_head=2", "cuda_graphs=chunks"], r"put_off_head=2: cuda_graphs=chunks has no buffers"),
    ],
)
def test_options_of_other_ways_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        loaded("scale=test", *given)


def test_rows_are_not_shared():
    run, _ = loaded("scale=test", "scale.gpus_per_node=2", "layout.cp=2")
    with pytest.raises(ConfigError, match=r"layout\.cp=2: GPT-3's ranks have other rows or share layers"):
        GptPretraining(run, Layout(run.layout, seed=3))


def test_ten_updates_are_those_of_torch():
    """AdamW with decay of all, the rates by samples, and gradients clipped to a norm of 1."""
    given = ("precision=fp64", "hparams.global_batch_size=2")
    ours, theirs = built(*given), built(*given, "model.blocks=autograd")
    adamw = torch.optim.AdamW(theirs.model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def rate_of(number: int) -> float:
        samples = 2 * number  # 8 are the warm-up's, the cosine ends at 400
        if samples <= 8:
            return 0.008 * samples / 8
        return 0.0008 + 0.5 * 0.0072 * (1 + math.cos(math.pi * (samples - 8) / 392))

    check_ten_updates(ours, theirs, adamw, rate_of)


def test_the_first_micro_batch_is_not_the_only_one_that_counts():
    check_that_every_micro_batch_counts(built)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(("precision=fp64",), id="handwritten"),
        pytest.param(("precision=fp64", "model.blocks=autograd"), id="autograd"),
        pytest.param(("precision=bf16", "model.linear=fp8", "benchmark.facts.layers=1"), id="fp8"),
    ],
)
def test_graphs_of_chunks_train_as_eager_passes_bit_for_bit(given):
    casts = 4 if "model.linear=fp8" in given else 0
    check_that_graphs_train_as_eager_passes(built, (*given, "hparams.global_batch_size=6"), casts)


def test_weights_on_their_way_are_waited_for_before_a_chunks_first_graph():
    workload, called = built(), []
    (part,) = workload.stage.parts
    part.register_forward_pre_hook(lambda module, _: called.append(module))  # as the optimizer's gathers do
    workload.stage.chunk(0).prepare()
    assert called == [part]


def test_log_perplexity_is_the_mean_over_the_labels_and_not_over_the_rows():
    workload = built("precision=fp64", "reader.eval_rows=1", "reader.eval_micro_batches=2")
    tokens, predictions, found = evaluate_three_rows(workload, last_label=False)
    length = workload.own.facts.row_length
    labels = (length - 1, 4, length - 1)
    # the loss that is trained is by the labels of a whole row
    sums = [workload.loss(Batch({"tokens": row[None]}, 1)).total.detach() * (length - 1) for row in tokens]
    expected = float(sum(sums)) / sum(labels)
    assert found["log_perplexity"] == pytest.approx(expected, rel=1e-12)
    assert found["eval_samples"] == predictions.values["tokens"] == sum(labels)


def test_fp8_trains_as_bf16_does():
    check_that_fp8_trains_as_bf16(built)


@pytest.mark.slow
def test_gradients_in_fp32_are_closer_to_float64_than_those_that_are_rounded_each_time():
    """Three steps of 48 micro-batches: what is left is what bf16 costs within a micro-batch."""
    check_that_fp32_is_closer(built)


def test_an_evaluation_of_a_part_of_the_set_does_not_count():
    with pytest.raises(RuntimeError, match="7 of 8 rows"):
        TokenMean("tokens").score(Predictions({"rows": 7, "tokens": 70, "loss": 7.0, "expected": 8}))


def test_a_row_costs_what_the_rules_network_costs():
    """2,175 TFLOP with the causal half of the attention, as NVIDIA's figures are counted with all of it: 2,205."""
    run, _ = loaded("scale=512xH100", CHECKPOINT)
    workload = object.__new__(GptPretraining)
    workload.own, workload.architecture = run.workload, run.workload.facts
    assert workload.sample_flops() == pytest.approx(2174.9e12, rel=1e-3)
