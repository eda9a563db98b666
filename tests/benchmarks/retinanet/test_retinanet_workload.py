"""RetinaNet as a workload: published recipes, learning rate, what is trained, and what the closed division fixes."""

import pytest
import torch

from benchmarks.retinanet.config import Facts
from benchmarks.retinanet.model import RetinaNet
from benchmarks.retinanet.peer import build, step_of
from benchmarks.retinanet.workload import RetinaNetDetection
from common.data.batches import HostBatch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit, evaluation_schedule
from common.mlperf.fixed import fixed_facts
from common.optim.buffers import FlatBuffer
from tests.benchmarks.recipes import recipes_of
from tests.capturable import Capturable

loaded, built = recipes_of("retinanet", RetinaNetDetection)


# Results of MLPerf Training v3.1 and v4.0 (NVIDIA): GPUs, pictures of a step on each, global batch, learning rate,
# epochs of warm-up.
PUBLISHED = {
    "8xH200": (8, 32, 256, 8.5e-5, 0),
    "8xH100": (8, 32, 256, 8.5e-5, 0),
    "64xH100": (64, 4, 256, 1e-4, 1),
    "2048xH100": (2048, 1, 2048, 1.35e-4, 1),
    "2528xH100": (2528, 1, 2528, 1.35e-4, 1),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_hyperparameters(scale, tmp_path):
    gpus, pictures, batch, rate, warmup = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}", f"assets_dir={tmp_path}")
    logged = admit(run, session).hyperparameters
    assert (run.training_ranks, run.micro_batch, run.grad_accumulation_steps) == (gpus, pictures, 1)
    assert logged["global_batch_size"] == batch
    assert logged["opt_name"] == "adam"
    assert (logged["opt_base_learning_rate"], logged["opt_weight_decay"]) == (rate, 0.0)
    assert logged["opt_learning_rate_warmup_epochs"] == warmup
    assert logged["opt_learning_rate_warmup_factor"] == 0.001


def test_the_heads_are_the_first_bucket_that_is_reduced():
    """Their gradients are final while the backward passes of pyramid and trunk are still to come."""
    run, _ = loaded("scale=8xH200")
    model = RetinaNet(run.workload.facts, torch.Generator()).cast(torch.float16)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    size = run.optimizer.arguments()["bucket_bytes"]
    *others, first = FlatBuffer([trained], bucket_bytes=size).buckets
    assert {segment.name for segment in first.segments} == {name for name in trained if name.startswith("head.")}
    assert len(others) >= 2


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_fewer_gpus_accumulate_to_the_batch_of_eight(gpus):
    run, _ = loaded(f"scale={gpus}xH200")
    assert (run.micro_batch, run.grad_accumulation_steps, run.global_batch) == (32, 8 // gpus, 256)


def test_an_evaluation_follows_every_epoch():
    run, _ = loaded("scale=8xH200")
    assert list(evaluation_schedule(run).points()) == list(range(1, 9))


@pytest.mark.parametrize(("step", "share"), [(0, 0.001), (2, 0.5005), (4, 1.0), (1000, 1.0)])
def test_the_learning_rate_rises_linearly_from_a_share_of_itself(step, share):
    workload = built("hparams.warmup_epochs=1")  # 16 pictures, 4 a step
    (optimizer,) = workload.build_step().updaters
    assert float(optimizer._schedule(torch.tensor(step))) == pytest.approx(2e-3 * share, rel=1e-6)


def test_without_a_warm_up_the_rate_is_there_at_once():
    (optimizer,) = built("hparams.warmup_epochs=0").build_step().updaters
    assert float(optimizer._schedule(torch.tensor(0))) == pytest.approx(2e-3, rel=1e-6)


def test_what_comes_before_the_second_stage_and_every_batch_norm_is_frozen():
    workload = built()
    trained = {name for group in workload.parameter_groups() for name in group.parameters}
    others = {name for name, _ in workload.model.named_parameters()} - trained
    body = "backbone.body."
    assert others == {name for name in others if name.startswith((f"{body}conv1", f"{body}layer1"))}
    assert others <= workload.frozen()
    assert {name for name, _ in workload.model.named_buffers()} <= workload.frozen()
    assert not trained & workload.frozen()


def test_the_digest_tells_backbones_apart():
    assert built().base_digest() == built().base_digest() != built(seed=4).base_digest()


def test_targets_are_made_of_the_boxes_that_come():
    workload = built()
    host = HostBatch(
        {
            "image": torch.zeros(2, 3, 64, 64),
            "boxes": torch.tensor([[[0.0, 0.0, 32.0, 32.0]], [[0.0, 0.0, 0.0, 0.0]]]),
            "label": torch.tensor([[2], [0]]),
            "count": torch.tensor([1, 0]),
        },
        samples=2,
        position=0,
    )
    batch = workload.prepare(host)
    assert set(batch.tensors["class"][0].tolist()) <= {2, -1, -2}
    assert (batch.tensors["class"][0] == 2).any()
    assert (batch.tensors["class"][1] == -1).all()
    losses = workload.loss(batch)
    assert losses.total.isfinite()
    assert set(losses.metrics) == {"loss", "classification_loss", "box_loss"}


def test_the_loss_at_the_start_is_that_of_guessing_the_prior():
    workload = built()
    batch = next(iter(workload.example_batches()))
    found = workload.loss(batch).metrics["classification_loss"].item()
    classes, prior, cells = batch.tensors["class"], 0.01, 3
    # Focal loss of a right class guessed at 1 %, and of the others; logits are the biases plus a little noise.
    logit = torch.logit(torch.tensor(prior, dtype=torch.float64))
    right = 0.25 * (1 - prior) ** 2 * torch.nn.functional.softplus(-logit)
    wrong = 0.75 * prior**2 * torch.nn.functional.softplus(logit)
    positive = (classes >= 0).sum(1)
    counted = cells * (classes != -2).sum(1)
    expected = ((positive * right + (counted - positive) * wrong) / positive.clamp(min=1)).mean().item()
    assert found == pytest.approx(expected, rel=0.1)


def test_several_tensor_parallel_ranks_are_refused():
    run, _ = loaded("scale=test", "layout.tp=2", "scale.gpus_per_node=2")
    with pytest.raises(ConfigError, match=r"^layout\.tp=2: RetinaNet's ranks"):
        RetinaNetDetection(run, Layout(run.layout))


def test_a_step_can_be_captured():
    workload = built()
    step, batch = workload.build_step(), next(iter(workload.example_batches()))
    step([batch] * workload.cfg.grad_accumulation_steps)  # folds what is frozen, as a warm-up does
    with Capturable():
        step([batch] * workload.cfg.grad_accumulation_steps)


def test_an_iteration_trains_as_many_parameters_as_the_rules_network_has():
    torch.manual_seed(0)
    facts, cpu = fixed_facts(Facts, "retinanet", image_size=64), torch.device("cpu")
    model = build(facts, cpu)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 36_849_004
    frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
    step = step_of(model, facts, 1, cpu)
    assert step().isfinite()
    assert all(
        torch.equal(p, was)
        for p, was in zip((p for p in model.parameters() if not p.requires_grad), frozen, strict=True)
    )
