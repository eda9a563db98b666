"""CosmoFlow as a workload: published recipes and sets, the update of Keras, the metric, and what the rules fix."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import Tensor

from benchmarks.cosmoflow.evaluate import SCORER
from benchmarks.cosmoflow.peer import PEERS
from benchmarks.cosmoflow.workload import CosmoFlowRegression
from common.contract.evaluation import Predictions
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit
from common.mlperf.events import hyperparameters
from common.mlperf.rcp import RCP_FOLDER
from common.optim.optimizer import Optimizer
from tests.benchmarks.recipes import recipes_of

loaded, built = recipes_of("cosmoflow", CosmoFlowRegression)

# NVIDIA's submissions to MLPerf HPC v3.0: ranks, samples on each, peak rate, warm-up, boundaries, factors, weight
# decay, dropout.
THROUGHPUT = (0.004, 2, [4, 6], [0.25, 0.0625], 0.0, 0.5)
PUBLISHED = {
    "512xH100": (512, 1, 0.024, 6, [20, 22, 23, 24], [0.5, 0.25, 0.125, 0.0625], 0.02, 0.0),
    "32xH100": (32, 1, *THROUGHPUT),
    "8xH200": (8, 4, *THROUGHPUT),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_hyperparameters_and_is_admitted(scale: str) -> None:
    ranks, samples, rate, warmup, boundaries, factors, decay, dropout = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}")
    logged = admit(run, session).hyperparameters
    assert (run.world_size, run.micro_batch, run.precision) == (ranks, samples, "bf16")
    assert (logged["global_batch_size"], logged["gradient_accumulation_steps"]) == (ranks * samples, 1)
    assert (logged["opt_name"], logged["opt_momentum"]) == ("sgd", 0.9)
    assert logged["opt_base_learning_rate"] == rate
    assert (logged["opt_learning_rate_warmup_epochs"], logged["opt_learning_rate_warmup_factor"]) == (warmup, 4)
    assert list(logged["opt_learning_rate_decay_boundary_epochs"]) == boundaries
    assert list(logged["opt_learning_rate_decay_factor"]) == factors
    assert (logged["opt_weight_decay"], logged["dropout"]) == (decay, dropout)


@pytest.mark.parametrize("scale", [*PUBLISHED, "1xGPU", "1xH200", "2xH200", "4xH200", "8xH100"])
def test_every_recipe_keeps_what_the_rules_fix(scale: str) -> None:
    run, session = loaded(f"scale={scale}")
    admission = admit(run, session)
    assert admission.rules.log_name == "cosmoflow"
    assert list(itertools.islice(admission.schedule.points(), 3)) == [1, 2, 3]
    sizes = (run.benchmark.train_samples, run.benchmark.eval_samples)
    assert (*sizes, run.benchmark.targets["mean_absolute_error"].value) == (524_288, 65_536, 0.124)


@pytest.mark.parametrize("batch", [32, 64, 128, 512, 1024])
def test_a_set_has_the_hyperparameters_of_the_reference_point(batch: int) -> None:
    points = json.loads((RCP_FOLDER / "hpc_3.0.0" / "rcps_cosmoflow.json").read_text())
    expected = points[f"cosmoflow_ref_{batch}"]["Hyperparams"]
    run, _ = loaded("scale=1xH200", f"hparams=cosmoflow/rcp_{batch}", "micro_batch=8")
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in hyperparameters(run).items()}
    if batch in (32, 512):  # the base rate of these points is the initial one
        expected["opt_base_learning_rate"] *= expected["opt_learning_rate_warmup_factor"]
    if isinstance(expected["opt_learning_rate_decay_factor"], float):  # the first of two
        found["opt_learning_rate_decay_factor"] = found["opt_learning_rate_decay_factor"][0]
    expected["opt_name"] = expected["opt_name"].lower()
    assert {key: found[key] for key in expected} == expected


def rates(*overrides: str) -> list[float]:
    """Return the learning rates of epochs 0 to 25 of the 512-GPU recipe, in its first and its last step."""
    run, _ = loaded("scale=512xH100", "scale.nodes=1", "scale.gpus_per_node=1", "scale.gpu=false", "precision=fp32",
                    "micro_batch=512", "benchmark.facts.size=32", "benchmark.facts.filters=[2,2]",
                    *overrides)  # fmt: skip
    (optimizer,) = CosmoFlowRegression(run, Layout(run.layout)).build_step().updaters
    assert isinstance(optimizer, Optimizer)
    steps = [(1024 * epoch, 1024 * epoch + 1023) for epoch in range(26)]
    found = [[float(optimizer._schedule(torch.tensor(step))) for step in pair] for pair in steps]
    assert all(first == last for first, last in found)
    return [first for first, _ in found]


def test_nvidias_set_and_the_references_have_the_same_learning_rates() -> None:
    warmup = [0.006, 0.009, 0.012, 0.015, 0.018, 0.021]
    expected = [*warmup, *[0.024] * 14, 0.012, 0.012, 0.006, 0.003, 0.0015, 0.0015]
    assert rates() == pytest.approx(expected, rel=1e-6)
    assert rates("hparams=cosmoflow/rcp_512") == pytest.approx(expected, rel=1e-6)


def test_both_sets_of_512_decay_the_same_kernels_equally() -> None:
    for name in ("nvidia_v3.0_512", "rcp_512"):
        groups = built(f"hparams=cosmoflow/{name}", "hparams.global_batch_size=8").parameter_groups()
        assert [(set(group.parameters), group.weight_decay) for group in groups[:1]] == [
            ({"dense1.weight", "dense2.weight"}, 0.02)
        ]
        assert groups[1].weight_decay == 0
        assert {"conv1.weight", "dense1.bias", "output.weight"} <= set(groups[1].parameters)


def micro_batches(workload: CosmoFlowRegression, steps: int) -> list[Batch]:
    """Return one micro-batch for each step."""
    (example,) = workload.example_batches()
    generator = torch.Generator().manual_seed(9)
    made = []
    for seed in range(steps):
        y = torch.rand(example.tensors["y"].shape, generator=generator)
        made.append(Batch({**example.tensors, "y": y, "seed": torch.tensor(seed)}, example.samples))
    return made


def test_updates_are_those_of_keras_while_the_rate_changes_and_not_those_of_pytorch() -> None:
    """Keras: v <- 0.9 v + lr g; w <- w - v, with 2 * l2 * w in the gradient of the dense kernels."""
    epochs = ("benchmark.train_samples=8", "hparams.warmup_epochs=2", "hparams.decay_boundary_epochs=[2,3]")
    options = ("precision=fp64", "hparams.variant=reference", "hparams.weight_decay=0.5", "micro_batch=8", *epochs)
    trained, keras, pytorch = built(*options), built(*options), built(*options)
    step = trained.build_step()
    named = dict(keras.model.named_parameters())
    velocity = {name: torch.zeros_like(weight) for name, weight in named.items()}
    optimizer = torch.optim.SGD(pytorch.model.parameters(), lr=1.0, momentum=0.9)
    # rates by hand: peak 0.02 from 0.005 in two epochs; a boundary of the reference holds from the next epoch on
    for batch, rate in zip(micro_batches(trained, 5), (0.005, 0.0125, 0.02, 0.005, 0.00125), strict=True):
        step([batch])
        loss = objective(keras, batch)
        gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        for name, weight in named.items():
            velocity[name] = 0.9 * velocity[name] + rate * gradients[name]
            weight.data -= velocity[name]
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        objective(pytorch, batch).backward()
        optimizer.step()
    for name, weight in trained.model.named_parameters():
        torch.testing.assert_close(weight, named[name], rtol=1e-6, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")
    others = dict(pytorch.model.named_parameters())
    apart = [(others[name] - weight).abs().max().item() for name, weight in named.items()]
    assert max(apart) > 1e-4


def objective(workload: CosmoFlowRegression, batch: Batch) -> Tensor:
    """Return the loss of the reference: the mean squared error and Keras's penalty with l2 = 0.5."""
    squares = [workload.model.get_submodule(name).weight.square().sum() for name in ("dense1", "dense2")]
    return workload.loss(batch).total + 0.5 * sum(squares)


def test_the_loss_is_the_mean_over_samples_and_parameters_as_in_keras() -> None:
    workload = built("precision=fp64")
    (batch,) = micro_batches(workload, 1)
    estimates = workload.model(batch.tensors["x"], batch.tensors["seed"]).flatten().tolist()
    squares = [(one - other) ** 2 for one, other in zip(estimates, batch.tensors["y"].flatten().tolist(), strict=True)]
    assert workload.loss(batch).total.item() == pytest.approx(sum(squares) / len(squares), rel=1e-12)


def test_a_step_of_the_peer_trains_on_the_example_batch() -> None:
    workload = built("micro_batch=8", "hparams.dropout=0", "hparams.base_learning_rate=0.03")
    (batch,) = workload.example_batches()
    eager, _ = PEERS
    with torch.random.fork_rng():
        torch.manual_seed(1)
        step = eager.start(workload.cfg, batch, workload.layout.device)
    losses = [float(step()) for _ in range(80)]
    assert losses[-1] < 0.6 * losses[0]


def test_the_error_is_the_mean_over_cubes_and_parameters() -> None:
    found = SCORER.score(Predictions({"cubes": 5, "expected": 5, "error": 4.0}))
    assert found == {"mean_absolute_error": 0.2, "eval_samples": 5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("benchmark.facts.slope=0.01", "the rules fix 0.3"),
        ("benchmark.facts.output_scale=1.0", "the rules fix 1.2"),
        ("benchmark.facts.filters=[16,64,128,256,512]", "the rules fix"),
        ("benchmark.targets.mean_absolute_error.value=0.2", r"the rules fix 0\.124"),
        ("hparams.momentum=0.8", r"opt_momentum = 0\.8 breaks the rules' table: 0\.9, as in the reference"),
        ("hparams.decay_factors=[0.25,1.5]", "opt_learning_rate_decay_factor"),
    ],
)
def test_the_closed_division_alone_fixes_what_the_rules_fix(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        admit(*loaded("scale=8xH200", override))
    admit(*loaded("scale=8xH200", override, "submission.division=open"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hparams.decay_boundary_epochs=[6,4]", "epochs in ascending order"),
        ("hparams.decay_factors=[0.5]", r"decay_factors=\[0.5\]: one for each of decay_boundary_epochs=\[4, 6\]"),
        ("hparams.dropout=1", "a probability below 1"),
        ("hparams.warmup_factor=0.5", "at least 1"),
        ("benchmark.facts.size=100", "must be a multiple of 32"),
    ],
)
def test_impossible_settings_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded("scale=8xH200", override)
