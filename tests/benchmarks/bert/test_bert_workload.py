"""BERT as a workload: published recipes, how its parameters are updated, what it logs, and runs on several ranks."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.bert.workload import BertPretraining
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit, evaluation_schedule
from common.mlperf.events import hyperparameters
from common.mlperf.parsed_log import read_log
from common.mlperf.verdict import judge
from tests.benchmarks.bert.small_shards import FACTS, make_packs, make_samples, write_data
from tests.benchmarks.recipes import recipes_of
from tests.conftest import checkpoint, flatten, suite

loaded, built = recipes_of("bert", BertPretraining)


# NVIDIA's configurations in the results of MLPerf Training v3.1 to v5.0: packs of a GPU and global batch; learning
# rate, training steps, betas, decay, warm-up and its start; evaluation interval; whether clipping comes before the
# reduction.
PUBLISHED = {
    "8xH200": (48, 768, 9.6e-4, 3680, 0.60466, 0.85437, 0.1, 0, 0, 150_000, True),
    "8xH100": (48, 768, 9.6e-4, 3680, 0.60466, 0.85437, 0.1, 0, 0, 150_000, True),
    "64xH100": (36, 4608, 3.01e-3, 740, 0.6, 0.7, 0.1, 200_330, -200_000, 200_000, True),
    "3472xH100": (2, 13_888, 3.6e-3, 480, 0.75, 0.9, 0.0166629, 290, -100, 300_000, False),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_hyperparameters(scale):
    packs, batch, rate, steps, beta_1, beta_2, decay, warmup, start, interval, before = PUBLISHED[scale]
    run, _ = loaded(f"scale={scale}")
    logged = hyperparameters(run)
    assert logged["global_batch_size"] == batch == run.world_size * packs * 2
    assert logged["gradient_accumulation_steps"] == 1
    assert run.micro_batch == packs * 2
    assert logged["opt_base_learning_rate"] == rate
    assert logged["opt_learning_rate_training_steps"] == steps
    assert (logged["opt_lamb_beta_1"], logged["opt_lamb_beta_2"]) == (beta_1, beta_2)
    assert logged["opt_lamb_weight_decay_rate"] == decay
    assert logged["opt_learning_rate_warmup_steps"] == logged["num_warmup_steps"] == warmup
    assert logged["start_warmup_step"] == start
    assert logged["opt_lamb_epsilon"] == logged["opt_epsilon"] == 1e-6
    assert (run.workload.hparams.clip == "before_reduction") == before
    points = list(itertools.islice(evaluation_schedule(run).points(), 2))
    assert points == [interval, 2 * interval]


def test_a_run_ends_with_the_learning_rate():
    run, _ = loaded("scale=8xH200")
    assert evaluation_schedule(run).last == 3680 * 768


def test_the_closed_division_starts_from_the_rules_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="assets_dir=null: training starts from the rules' checkpoint"):
        admit(*loaded("scale=8xH200"))
    admit(*loaded("scale=8xH200", f"assets_dir={tmp_path}"))
    admit(*loaded("scale=8xH200", "submission.division=open"))


@pytest.mark.parametrize("override", ["benchmark.facts.dropout=0.0", "benchmark.facts.layers=12"])
def test_the_closed_division_fixes_the_model(override, tmp_path):
    with pytest.raises(ConfigError, match=r"the rules fix"):
        admit(*loaded("scale=8xH200", f"assets_dir={tmp_path}", override))


def test_biases_and_norms_have_neither_decay_nor_trust_ratio():
    weights, vectors = built().parameter_groups()
    # MLPerf's reference leaves out every variable with 'LayerNorm', 'layer_norm' or 'bias' in its name.
    excluded = {name for name in (*weights.parameters, *vectors.parameters) if "norm" in name or "bias" in name}
    assert set(vectors.parameters) == excluded
    assert (weights.trust_ratio, vectors.trust_ratio) == (True, False)
    assert (weights.weight_decay, vectors.weight_decay) == (0.01, 0.0)
    assert dict(weights.parts) == {f"layers.{index}.attention.qkv.weight": 3 for index in range(2)}


def test_half_a_pack_is_refused():
    with pytest.raises(ConfigError, match="micro_batch=1: 2 samples are computed together"):
        built("micro_batch=1")


def test_more_attention_probabilities_than_dropout_can_number_are_refused():
    # 1,026 packs of 512 tokens, 16 heads: 512 * 512 * 16 * 1,026 is above 2**32
    run, _ = loaded("scale=1xH200", "micro_batch=2052", "hparams.global_batch_size=2052")
    with pytest.raises(ConfigError, match="micro_batch=2052: the attention has more"):
        BertPretraining(run, Layout(run.layout))


def test_the_example_of_48_packs_is_filled_as_the_real_set():
    run, _ = loaded("scale=8xH200", "benchmark.facts.layers=1", "scale.gpus_per_node=1", "benchmark.facts.hidden=16",
                    "hparams.global_batch_size=96")  # fmt: skip
    (batch,) = BertPretraining(run, Layout(run.layout)).example_batches()
    lengths = batch.tensors["lengths"]
    assert batch.samples == 96
    assert int((lengths > 0).sum()) == 96
    assert int(lengths.sum()) == 48 * 512
    assert int((lengths == 512).sum()) == 23
    assert batch.tensors["input_ids"].shape == (48 * 512,)


def test_example_batches_cover_each_count_of_sequences():
    workload = built("reader.graph_per_count=true", "micro_batch=4", "hparams.global_batch_size=4")
    examples = {batch.key: batch for batch in workload.example_batches()}
    assert list(examples) == [("sequences", count) for count in range(2, 7)]
    for (_, count), batch in examples.items():
        assert batch.tensors["lengths"].shape == (count,)
        assert bool((batch.tensors["lengths"] > 0).all())


def test_a_graph_for_each_count_is_refused_where_micro_batches_accumulate():
    with pytest.raises(ConfigError, match="graph_per_count=true with 4 micro-batches a step"):
        built("reader.graph_per_count=true", "micro_batch=4")


def test_losses_begin_at_those_of_guessing():
    workload = built()
    losses = workload.loss(next(iter(workload.example_batches())))
    assert float(losses.metrics["masked_lm_loss"]) == pytest.approx(math.log(1024), rel=0.02)
    assert float(losses.metrics["next_sentence_loss"]) == pytest.approx(0.693, abs=0.05)


def trained(data, output, *overrides: str, steps: int = 3) -> dict[str, torch.Tensor]:
    """Model and optimizer after ``steps`` of the ``test`` recipe in float64, dropout included."""
    done = suite(
        "train", "benchmark=bert", "scale=test", "device=cpu", "seed=1234", "precision=fp64", "checkpoint_every=1",
        "keep_checkpoints=99", f"hparams.training_steps={steps}", f"benchmark.schedule.interval={16 * steps}",
        "micro_batch=4", f"data_dir={data}", f"output_dir={output}", *overrides,
    )  # fmt: skip
    assert done.code in (0, 10), done.errors
    content = checkpoint(output, steps)
    return flatten({"model": content["model"], "updaters": content["updaters"]})


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - tensor).double().norm() / tensor.double().norm().clamp(min=1e-12))
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize(
    ("clip", "shard"),
    [
        ("before_reduction", "none"),
        ("after_reduction", "all"),
        pytest.param("before_reduction", "all", marks=pytest.mark.slow),
        pytest.param("after_reduction", "none", marks=pytest.mark.slow),
    ],
)
def test_four_ranks_equal_one_that_accumulates(clip, shard, data_of, tmp_path):
    data, order = data_of("bert"), f"hparams.clip={clip}"
    one = trained(data, tmp_path / "one", order)
    four = trained(data, tmp_path / "four", order, "scale.gpus_per_node=4", f"optimizer.shard={shard}")
    assert largest_difference(four, one) < 1e-10


SIZES_OF_A_SHARD = [1] * 20 + [3] * 12
"""Sequences of the rows of a shard: 56 in 32 rows, which are 64 nominal samples."""


def run_on_packs(folder: Path, shards: int, *overrides: str) -> Path:
    """A run of two blocks over the 64 rows in ``shards``; its output."""
    packs = make_packs(2 * SIZES_OF_A_SHARD)
    data, output = write_data(folder / "data", packs, shards, make_samples([20] * 12)), folder / "out"
    facts = [f"benchmark.facts.{name}={value}" for name, value in FACTS.items()]
    done = suite(
        "train", "benchmark=bert", "scale=test", "device=cpu", "seed=5", f"data_dir={data}", f"output_dir={output}",
        "benchmark.train_samples=112", "benchmark.eval_samples=12", *facts, *overrides,
    )  # fmt: skip
    assert done.code in (0, 10), done.errors
    assert "samples/s" in done.errors
    return output


def test_the_log_counts_real_samples_where_the_schedule_counts_two_a_row(tmp_path):
    output = run_on_packs(tmp_path, 2, "micro_batch=16")
    log = read_log(output / "mlperf.log")
    assert [event.metadata["samples_count"] for event in log.all("block_start")] == [0, 56]
    assert [event.metadata["samples_count"] for event in log.all("block_stop")] == [56, 112]
    for key in ("eval_start", "eval_accuracy", "eval_stop", "tracked_stats"):
        assert [event.metadata["epoch_num"] for event in log.all(key)] == [56, 112], key
    assert log.all("run_stop")[0].metadata["epoch_num"] == 112
    assert judge(output / "mlperf.log").kind == "format"
    steps, evaluations = (
        [json.loads(line)["samples"] for line in (output / name).read_text().splitlines()]
        for name in ("metrics_rank0.jsonl", "evaluations.jsonl")
    )
    assert (len(steps), steps[3], steps[7]) == (8, 56, 112)
    assert evaluations == [56, 112]


@pytest.mark.slow
def test_real_samples_are_those_of_all_ranks_and_micro_batches(tmp_path):
    output = run_on_packs(tmp_path, 4, "micro_batch=4", "scale.gpus_per_node=2")
    assert read_log(output / "mlperf.log").all("run_stop")[0].metadata["epoch_num"] == 112


@pytest.mark.slow
def test_a_run_goes_on_at_another_number_of_ranks(data_of, tmp_path):
    data, four = data_of("bert"), ["scale.gpus_per_node=4", "optimizer.shard=all"]
    whole = trained(data, tmp_path / "whole")
    # 5 of the embeddings, 16 a layer, 2 of the pooler, 5 and 2 of the heads
    assert (tmp_path / "whole" / "mlperf.log").read_text().count("weights_initialization") == 5 + 2 * 16 + 2 + 5 + 2
    trained(data, tmp_path / "begun", *four)
    saved = tmp_path / "begun" / "checkpoints" / "step_00000002"
    resumed = trained(data, tmp_path / "resumed", "scale.gpus_per_node=2", f"resume={saved}")
    assert largest_difference(resumed, whole) < 1e-10
