"""OpenFold as a workload: recipes and sets, updates, averages, ranks that share a sample, and what rules fix."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import Tensor

from benchmarks.openfold.sampler import passes_of
from benchmarks.openfold.workload import OpenFold
from common.data.batches import Batch, HostBatch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit
from common.mlperf.events import hyperparameters
from common.mlperf.rcp import RCP_FOLDER
from common.optim.optimizer import Optimizer
from common.step.graphs import StepRunner
from tests.benchmarks.recipes import recipes_of
from tests.gloo_ranks import on_ranks
from tests.played_graphs import PlayedGraphs

loaded, built = recipes_of("openfold", OpenFold)

PUBLISHED = {
    "2080xH100": (2048, 8, 32, 256),
    "128xH100": (128, 1, 0, 128),
    "8xH200": (8, 1, 0, 128),
    "1xH200": (1, 1, 0, 128),
    "1xGPU": (1, 1, 0, 128),
}
"""Training ranks, ranks that share a sample, evaluation ranks, and global batch of recipes."""


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_sizes_and_keeps_what_the_rules_fix(scale: str) -> None:
    ranks, sharing, evaluating, batch = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}", "assets_dir=/assets")
    admission = admit(run, session)
    assert (run.training_ranks, run.layout["cp"], run.world_size - run.training_ranks) == (ranks, sharing, evaluating)
    assert list(itertools.islice(admission.schedule.points(), 2)) == [40 * batch, 80 * batch]
    logged = admission.hyperparameters
    assert logged["gradient_accumulation_steps"] == batch * sharing // ranks
    assert (logged["opt_name"], logged["model_parameters_count"]) == ("Adam", 93_229_082)
    assert logged["initial_training_dataloader_type"] == "InitialTrainingDataloaderPQ"


def test_the_blocking_loader_is_logged_by_its_name() -> None:
    run, _ = loaded("scale=8xH200", "assets_dir=/assets", "deterministic=true")
    assert hyperparameters(run)["initial_training_dataloader_type"] == "InitialTrainingDataloaderPT"


@pytest.mark.parametrize(("scale", "batch"), [("128xH100", 128), ("2080xH100", 256)])
def test_a_recipe_has_the_hyperparameters_of_the_reference_point(scale: str, batch: int) -> None:
    points = json.loads((RCP_FOLDER / "hpc_3.0.0" / "rcps_openfold.json").read_text())
    expected = points[f"openfold_ref_{batch}"]["Hyperparams"]
    del expected["precision"]  # which the rules leave free
    run, _ = loaded(f"scale={scale}", "assets_dir=/assets", "deterministic=true")
    found = hyperparameters(run)
    assert {key: found[key] for key in expected} == expected


def steps_of(workload: OpenFold, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Train one step on each batch, which the workload prepares; return weights and averages."""
    step = workload.build_step()
    for position, tensors in enumerate(batches):
        step([workload.prepare(HostBatch(dict(tensors), 1, position, tensors["msa_feat"].shape[1]))])
    weights = {name: tensor.detach().clone() for name, tensor in workload.model.named_parameters()}
    return weights | {f"average.{name}": tensor.clone() for name, tensor in workload.weights().tensors.items()}


OPTIONS = ("precision=fp64", "micro_batch=1", "hparams.global_batch_size=1", "model.final_std=0.02")


def batches_of(workload: OpenFold, numbers: tuple[int, ...] = (0, 1, 0)) -> list[dict[str, Tensor]]:
    examples = [batch.tensors for batch in workload.example_batches()]
    return [examples[number] | {"dropout_seed": torch.tensor(step)} for step, number in enumerate(numbers)]


def test_updates_are_those_of_clipped_adam_and_the_average_starts_with_the_first_update() -> None:
    trained, other = built(*OPTIONS), built(*OPTIONS)
    found = steps_of(trained, batches_of(trained))
    named = dict(other.model.named_parameters())
    reference = torch.optim.Adam(named.values(), lr=0.01, betas=(0.9, 0.999), eps=1e-6)
    average: dict[str, Tensor] = {}
    for step, tensors in enumerate(batches_of(other)):
        other.loss(other.prepare(HostBatch(tensors, 1, step))).total.backward()
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.nn.utils.clip_grad_norm_(named.values(), 0.1)
        reference.step()
        reference.zero_grad()
        for name, parameter in named.items():
            now = parameter.detach()
            average[name] = 0.9 * average[name] + 0.1 * now if step else now.clone()
    for name, weight in named.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-5, atol=1e-7, msg=f"{name} differs")
        torch.testing.assert_close(found[f"average.{name}"], average[name], rtol=1e-5, atol=1e-7, msg=f"{name} differs")


ACCUMULATED = (*OPTIONS, "hparams.global_batch_size=2", "benchmark.facts.structure.iterations=1")
"""A step of two micro-batches, with one or two passes."""


def accumulated(workload: OpenFold, runner: StepRunner) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Train steps whose micro-batches have the passes that the sampler gives; return results, weights and averages."""
    examples = {batch.key: batch.tensors for batch in workload.example_batches()}
    results = []
    for step in range(4):
        passes = passes_of(step, 3, workload.own.facts.recycling_iters)
        micro_batches = []
        for number in range(2):
            tensors = dict(examples[passes])
            tensors["msa_feat"] = tensors["msa_feat"] + 0.1 * (2 * step + number)
            tensors["dropout_seed"] = torch.tensor(2 * step + number)
            micro_batches.append(Batch(tensors, 1, passes))
        results.append(runner(micro_batches).values.tolist())
    weights = {name: tensor.detach().clone() for name, tensor in workload.model.named_parameters()}
    return results, weights | {f"average.{name}": tensor.clone() for name, tensor in workload.weights().tensors.items()}


def test_accumulated_steps_replay_two_graphs_for_each_number_of_passes_and_equal_eager_steps() -> None:
    """Graphs are simulated. Four steps have each number of passes twice."""
    eager, captured = built(*ACCUMULATED), built(*ACCUMULATED, "cuda_graphs=chunks")
    graphs = PlayedGraphs(captured.model)
    runner = StepRunner(captured.build_step(), captured.model, 2, recorder=graphs)
    runner.warm_up(captured.example_batches(), iterations=1)
    assert runner.cost.graphs == 2 * 2
    before = graphs.replays
    found, weights = accumulated(captured, runner)
    assert graphs.replays - before == 4 * 2 * 2
    assert runner.uncaptured == {}
    expected, eager_weights = accumulated(eager, StepRunner(eager.build_step(), eager.model, 2))
    assert found == expected
    assert weights.keys() == eager_weights.keys()
    for name, tensor in eager_weights.items():
        assert torch.equal(weights[name], tensor), name


def test_examples_have_the_four_numbers_of_passes_that_steps_can_have() -> None:
    workload = built("benchmark.facts.recycling_iters=3")
    keys = [batch.key for batch in workload.example_batches()]
    assert keys == [4, 3, 2, 1]
    assert {passes_of(step, 3, workload.own.facts.recycling_iters) for step in range(100)} == set(keys)


@pytest.mark.parametrize("scale", ["1xGPU", "1xH200", "2xH200", "4xH200", "8xH200", "8xH100"])
def test_recipes_that_accumulate_capture_passes(scale: str) -> None:
    run, _ = loaded(f"scale={scale}", "assets_dir=/assets")
    assert run.grad_accumulation_steps > 1
    assert run.chunk_graphs


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(0, [0.5, 0.5, 0.5]), (1, [0.1, 0.5, 0.5]), (2, [0.1, 0.5, 0.5]), (5, [0.1, 0.2, 0.3, 0.4, 0.5, 0.5])],
)
def test_the_warm_up_begins_and_ends_with_the_rates_of_its_ends(steps: int, expected: list[float]) -> None:
    options = ("hparams.warmup_init=0.1", "hparams.base_learning_rate=0.5", f"hparams.warmup_steps={steps}")
    (optimizer, _) = built(*options).build_step().updaters
    assert isinstance(optimizer, Optimizer)
    found = [float(optimizer._schedule(torch.tensor(step))) for step in range(len(expected))]
    assert found == pytest.approx(expected)


def test_ranks_receive_batches_whose_tensors_have_another_order(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = on_ranks(received_by_ranks, 2, tmp_path_factory.mktemp("ranks"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name


def received_by_ranks(rank: int, world: int, _folder: str) -> dict[str, Tensor]:
    """Return the batch of a rank; the second one has zeros, and the tensors in the opposite order."""
    run, _ = loaded("scale=test", *OPTIONS, f"scale.gpus_per_node={world}", f"layout.cp={world}")
    workload = OpenFold(run, Layout(run.layout, rank, seed=3))
    (tensors, *_) = batches_of(workload)
    if rank:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in reversed(tensors.items())}
    return workload.prepare(HostBatch(tensors, 1, 0)).tensors


def shared_by_ranks(rank: int, world: int, _folder: str) -> dict[str, Tensor]:
    """Train with ranks that share each sample; only the first one has it."""
    run, _ = loaded("scale=test", *OPTIONS, f"scale.gpus_per_node={world}", f"layout.cp={world}")
    workload = OpenFold(run, Layout(run.layout, rank, seed=3))
    batches = batches_of(workload)
    if rank:
        batches = [{name: torch.zeros_like(tensor) for name, tensor in tensors.items()} for tensors in batches]
    return steps_of(workload, batches)


def test_two_ranks_that_share_samples_train_as_one_rank_with_dropout(tmp_path_factory: pytest.TempPathFactory) -> None:
    alone = built(*OPTIONS)
    assert alone.own.facts.evoformer.pair_dropout > 0
    expected = steps_of(alone, batches_of(alone))
    for found in on_ranks(shared_by_ranks, 2, tmp_path_factory.mktemp("ranks")):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-9, msg=f"{name} differs")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("benchmark.facts.crop_size=9", r"layout\.cp=2: does not divide facts\.crop_size=9"),
        ("benchmark.facts.extra_msa=5", r"does not divide facts\.extra_msa=5"),
        ("reader.eval_multiple=5", r"does not divide reader\.eval_multiple=5"),
    ],
)
def test_ranks_that_do_not_divide_a_sample_are_refused(override: str, message: str) -> None:
    run, _ = loaded("scale=test", *OPTIONS, "scale.gpus_per_node=2", "layout.cp=2", override)
    with pytest.raises(ConfigError, match=message):
        OpenFold(run, Layout({"cp": 2}))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("benchmark.facts.loss.masked_msa=1.0", "masked_msa_loss_weight"),
        ("benchmark.facts.average_decay=0.99", "swa_decay_rate"),
        ("benchmark.facts.max_grad_norm=1.0", "opt_gradient_clip_norm"),
        ("benchmark.facts.structure.iterations=4", "the rules fix .*'iterations': 8"),
        ("benchmark.targets.lddt_ca.value=0.7", r"the rules fix 0\.8"),
        ("assets_dir=null", "training continues the rules' checkpoint"),
    ],
)
def test_the_closed_division_alone_fixes_what_the_rules_fix(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        admit(*loaded("scale=8xH200", "assets_dir=/assets", override))
    admit(*loaded("scale=8xH200", "assets_dir=/assets", override, "submission.division=open"))
