"""R-GAT as a workload: published recipes, what is logged, what the closed division fixes, other data than its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.rgat.graph import BlockShape, Graph, SampledBlock
from benchmarks.rgat.ops import sample
from benchmarks.rgat.ops.sample.reference import NeighborSampler, sampler_reference
from benchmarks.rgat.workload import RgatClassification
from common.contract.evaluation import Predictions
from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import DataError, SuiteError
from common.mlperf.admission import admit, evaluation_schedule
from common.ops.operation import Implementation
from tests.benchmarks.recipes import recipes_of
from tests.capturable import Capturable

loaded, built = recipes_of("rgat", RgatClassification)


@pytest.fixture(scope="module")
def data(data_of) -> Path:
    """The prepared data of the ``test`` recipe."""
    return data_of("rgat")


# Results of MLPerf Training v4.0 and v4.1 (NVIDIA): GPUs, seeds of a step on each, learning rate, steps between two
# evaluations, where the features lie.
PUBLISHED = {
    "8xH200": (8, 2048, 0.002, 288, "peers"),
    "8xH100": (8, 2048, 0.002, 288, "host"),
    "64xH100": (64, 1024, 0.003, 72, "exchange"),
    "512xH100": (512, 512, 0.005, 18, "exchange"),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_settings(scale):
    gpus, seeds, rate, interval, features = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}")
    logged = admit(run, session).hyperparameters
    assert (run.training_ranks, run.micro_batch, run.grad_accumulation_steps) == (gpus, seeds, 1)
    assert logged == {
        "global_batch_size": gpus * seeds,
        "gradient_accumulation_steps": 1,
        "opt_name": "adam",
        "opt_base_learning_rate": rate,
        "opt_adam_beta_1": 0.9,
        "opt_adam_beta_2": 0.999,
        "opt_adam_epsilon": 1e-8,
        "opt_weight_decay": 0.0,
    }
    assert evaluation_schedule(run).first == interval * gpus * seeds
    assert run.workload.reader.features == features


@pytest.mark.parametrize("gpus", [2, 4])
def test_fewer_gpus_accumulate_to_the_batch_of_eight(gpus):
    run, _ = loaded(f"scale={gpus}xH200")
    assert (run.micro_batch, run.grad_accumulation_steps, run.global_batch) == (2048, 8 // gpus, 16384)
    assert evaluation_schedule(run) == evaluation_schedule(loaded("scale=8xH200")[0])


def test_what_one_gpu_accumulates_fits_beside_the_graph():
    run, session = loaded("scale=1xH200")
    assert (run.micro_batch, run.grad_accumulation_steps, run.global_batch) == (2048, 2, 4096)
    assert admit(run, session).hyperparameters["opt_base_learning_rate"] == 0.001
    # 1,300 nodes of a seed, 1 KB each; a step's batches thrice; 62 GB of edges; of an H200's 141 GB half of the rest is
    # for weights, activations and evaluation.
    assert 3 * run.global_batch * 1300 * 1024 < (141e9 - 62e9) / 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("benchmark.facts.fanouts=[17]", "a number from 1 to 16"),
        ("benchmark.facts.fanouts=[]", "a number from 1 to 16"),
        ("benchmark.facts.eval_share=0.5", "with train_share=0.6 more than all"),
        ("benchmark.facts.relations=[paper__cites]", "source__name__target"),
        ("benchmark.facts.relations=[paper__in__book]", "'book'"),
        ("benchmark.facts.seeds=book", "'book'"),
        ("model.implementations.projection=cublas", "model.implementations.projection=cublas"),
        ("reader.capacity_batches=1", "capacity_batches"),
        ("reader.features=disk", "features"),
    ],
)
def test_a_wrong_setting_is_one_error_that_names_it(override, message):
    with pytest.raises(SuiteError, match=message):
        built(override)


@pytest.mark.parametrize(
    "override", ["benchmark.facts.classes=4", "benchmark.facts.feature_size=8", "benchmark.facts.node_types=[paper]"]
)
def test_other_data_than_the_recipes_are_refused(override, data):
    overrides = [override]
    if "node_types" in override:
        overrides.append("benchmark.facts.relations=[paper__cites__paper]")
    workload = built(*overrides)
    with pytest.raises(DataError, match="give the data_dir that belongs to it"):
        workload.open_data(data)


def test_a_new_network_knows_nothing():
    small = ["micro_batch=8", "hparams.global_batch_size=8", "model.example_papers=200", "precision=fp32"]
    run, _ = loaded("scale=1xH200", *small)
    workload = RgatClassification(run, Layout(run.layout, seed=3))
    (example,) = workload.example_batches()
    assert float(workload.loss(example).total.detach()) == pytest.approx(math.log(2983), abs=0.1)


def test_a_step_captures_the_shape_that_nearly_all_batches_have(data):
    workload = built("reader.capacity_batches=20")
    source = workload.open_data(data)
    (example,) = workload.examples_of_data()
    batches = list(source.batches(Block(0, 1, 0, 0, 10 * 8)))
    usual = [batch for batch in batches if batch.key == example.key]
    assert len(usual) > 0.9 * len(batches)
    assert source.sampler.larger == len(batches) - len(usual)
    for batch in batches:
        assert isinstance(batch.key, BlockShape)
        assert not int(SampledBlock.of(batch.key, batch.tensors).overflow)
        if batch.key == example.key:
            assert {n: (t.shape, t.dtype) for n, t in batch.tensors.items()} == {
                n: (t.shape, t.dtype) for n, t in example.tensors.items()
            }
    workload.close()


def test_no_sampler_is_made_once_the_data_are_open(data, monkeypatch):
    made = []

    def counted(graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> NeighborSampler:
        made.append(shape)
        return sampler_reference(graph, fanouts, shape)

    monkeypatch.setitem(sample.SAMPLE.fast, "counted", Implementation(counted))
    workload = built("model.implementations.sample=counted", "reader.eval_batch=16")
    evaluation = workload.evaluation(workload.layout)
    source = workload.open_data(data)
    evaluation.open_data(data)
    before = len(made)
    shapes = {batch.key for batch in source.batches(Block(0, 1, 0, 0, 10 * 8))}
    evaluation.predict(workload.weights())
    assert source.sampler.larger > 0
    assert len(shapes) == 2, "the usual one, and the next larger"
    assert len(made) == before
    evaluation.close()
    workload.close()


def test_a_short_batch_counts_its_seeds(data):
    workload = built("micro_batch=5", "hparams.global_batch_size=20")  # a stream has 96 seeds: 19 batches and one of 1
    source = workload.open_data(data)
    batches = [workload.prepare(batch) for batch in source.batches(Block(0, 1, 0, 0, 20 * 20), 72)]
    counted = [int(workload.loss(batch).metrics["samples"]) for batch in batches]
    assert counted == [5] * 4 + [1] * 4
    loss = workload.loss(batches[-1])
    logits = workload.model.eval()(
        batches[-1].tensors["features"],
        SampledBlock.of(batches[-1].key, batches[-1].tensors),
        batches[-1].tensors["seed"],
    )
    workload.model.train()
    assert torch.isfinite(loss.total)
    assert torch.isfinite(logits).all()
    workload.close()


@pytest.mark.parametrize("batch", [5, 32])
def test_every_evaluation_seed_is_counted_once(data, batch):
    workload = built(f"reader.eval_batch={batch}")
    evaluation = workload.evaluation(workload.layout)
    evaluation.warm_up()
    evaluation.open_data(data)
    predictions = evaluation.predict(workload.weights())
    assert predictions.values["seeds"] == predictions.values["expected"] == 32
    assert 0 <= evaluation.scorer.score(predictions)["accuracy"] <= 1
    again = evaluation.predict(workload.weights())
    assert again.values == predictions.values
    with pytest.raises(RuntimeError, match="31 of 32 seeds"):
        evaluation.scorer.score(Predictions({"seeds": 31, "right": 1, "expected": 32}))
    evaluation.close()
    workload.close()


def test_the_example_of_the_data_is_given_away(data):
    workload = built()
    source = workload.open_data(data)
    (example,) = workload.examples_of_data()
    assert example.key == source.shape
    assert list(workload.examples_of_data()) == []
    workload.close()


def test_the_loss_and_its_gradients_can_be_captured():
    workload = built()
    (example,) = workload.example_batches()
    workload.loss(example).total.backward()  # tables of host numbers go to the device in the first pass
    with Capturable():
        workload.loss(example).total.backward()
