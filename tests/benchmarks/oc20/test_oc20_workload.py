"""OpenCatalyst as a workload: recipes and sets, learning rates, the loss over any split, AdamW, and what rules fix."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import small_slabs
import torch
from torch import Tensor

from benchmarks.oc20.peer import PEERS
from benchmarks.oc20.workload import OpenCatalystForces
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit
from common.mlperf.events import hyperparameters
from common.mlperf.rcp import RCP_FOLDER
from common.optim.optimizer import Optimizer
from tests.benchmarks.oc20.small_graphs import graph_of, joined, molecule
from tests.benchmarks.recipes import recipes_of
from tests.gloo_ranks import on_ranks

loaded, built = recipes_of("oc20", OpenCatalystForces)

PUBLISHED: dict[str, tuple[int, int, int, dict[str, object]]] = {
    "640xH100": (512, 4, 128, {"global_batch_size": 2048, "opt_base_learning_rate": 0.0016}),
    "64xH100": (64, 16, 0, {"global_batch_size": 1024, "opt_base_learning_rate": 0.0012}),
    "8xH200": (8, 16, 0, {"global_batch_size": 256, "opt_base_learning_rate": 0.0004}),
    "1xH200": (1, 16, 0, {"global_batch_size": 256, "opt_base_learning_rate": 0.0004}),
    "1xGPU": (1, 1, 0, {"global_batch_size": 256, "opt_base_learning_rate": 0.0004}),  # a GPU decides the micro-batch
}
"""Training ranks, structures of a micro-batch, evaluation ranks, and logged hyperparameters of recipes."""


@pytest.mark.parametrize("scale", [*PUBLISHED, "2xH200", "4xH200", "8xH100"])
def test_every_recipe_keeps_what_the_rules_fix(scale: str) -> None:
    run, session = loaded(f"scale={scale}")
    admission = admit(run, session)
    assert admission.rules.log_name == "oc20"
    assert list(itertools.islice(admission.schedule.points(), 3)) == [1, 2, 3]
    sizes = (run.benchmark.train_samples, run.benchmark.eval_samples)
    assert (*sizes, run.benchmark.targets["force_mae"].value) == (2_000_000, 999_866, 0.036)


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_hyperparameters(scale: str) -> None:
    ranks, samples, evaluating, expected = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}")
    logged = admit(run, session).hyperparameters
    assert (run.training_ranks, run.micro_batch, run.world_size - run.training_ranks) == (ranks, samples, evaluating)
    assert {key: logged[key] for key in expected} == expected
    assert logged["opt_name"] == "AdamW"
    assert logged["gradient_accumulation_steps"] == expected["global_batch_size"] // (ranks * samples)  # type: ignore[operator]


@pytest.mark.parametrize("batch", [256, 1024, 2048])
def test_a_set_has_the_hyperparameters_of_the_reference_point(batch: int) -> None:
    points = json.loads((RCP_FOLDER / "hpc_3.0.0" / "rcps_oc20.json").read_text())
    expected = points[f"oc20_ref_{batch}"]["Hyperparams"]
    run, _ = loaded("scale=1xH200", f"hparams=oc20/rcp_{batch}")
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in hyperparameters(run).items()}
    assert {key: found[key] for key in expected} == expected


def test_learning_rates_are_those_of_the_formula() -> None:
    workload = built(
        "hparams.base_learning_rate=8", "hparams.warmup_steps=4", "hparams.warmup_factor=0.5",
        "hparams.decay_boundary_steps=[6,8]", "hparams.decay_factor=0.25",
    )  # fmt: skip
    (optimizer,) = workload.build_step().updaters
    assert isinstance(optimizer, Optimizer)
    found = [float(optimizer._schedule(torch.tensor(step))) for step in range(10)]
    # base * (0.5 (1 - a) + a) with a = step / 4 up to step 4; a factor of 0.25 from each boundary on
    assert found == pytest.approx([4, 5, 6, 7, 8, 8, 2, 2, 0.5, 0.5], rel=1e-6)


def structures(step: int) -> list[dict[str, Tensor]]:
    """Return the five structures of a global batch, which have different numbers of free atoms."""
    cell = torch.tensor([[4.6, 0.0, 0.0], [0.5, 4.4, 0.0], [0.0, 0.0, 11.0]], dtype=torch.float64)
    return [graph_of(molecule(2 + number, seed=10 * step + number), cell) for number in range(5)]


def micro_batches(step: int, split: list[int], samples: int = 8) -> list[Batch]:
    """Return the micro-batches of a global batch, with ``split`` structures each."""
    graphs, made, first = structures(step), [], 0
    free = torch.stack([graph["free"].sum() for graph in graphs]).sum()
    for count in split:
        tensors = {**joined(graphs[first : first + count]), "global_free": free}
        made.append(Batch(tensors, samples, first))
        first += count
    assert first == len(graphs)
    return made


def unzeroed(workload: OpenCatalystForces) -> OpenCatalystForces:
    """Make the last layers differ from 0, so that all parameters have gradients."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for output in workload.model.outputs:
            output.last.weight.normal_(generator=generator)
    return workload


def test_the_probe_of_the_micro_batch_has_larger_structures() -> None:
    run, _ = loaded("scale=demo")
    probe = OpenCatalystForces.probe(run, Layout(run.layout))
    (batch,) = probe.example_batches()
    assert batch.key == (176, 1360)  # 8 structures of 20 atoms and 169 edges, and padding to a multiple of 16


def test_the_loss_is_weight_times_the_mean_l1_norm_of_normalised_errors_of_free_atoms() -> None:
    workload = built(
        "precision=fp64", "micro_batch=8", "benchmark.facts.force_std=1.7", "benchmark.facts.force_weight=9"
    )
    (batch,) = micro_batches(1, [5])
    found = workload.loss(batch)  # the first forces are 0
    norms = [
        sum(abs(component) for component in force)
        for force, free in zip(batch.tensors["force"].tolist(), batch.tensors["free"].tolist(), strict=True)
        if free
    ]
    assert found.total.item() == pytest.approx(9 * sum(norms) / len(norms) / 1.7)
    assert found.metrics["loss"].item() == pytest.approx(found.total.item())


def test_figures_have_the_mean_sizes_of_the_example_and_then_of_the_data(tmp_path: Path) -> None:
    workload = built("reader.typical=[20,100]")
    (batch,) = workload.example_batches()
    source_E, target_E = (batch.tensors[f"edge_{name}"].long() for name in ("source", "target"))
    triplets = int(target_E.bincount(minlength=len(batch.tensors["position"]))[source_E].sum())
    assert workload.sample_sizes() == pytest.approx({"atoms": 20, "edges": 100, "triplets": triplets / 4}, rel=0.3)
    root = small_slabs.prepared(tmp_path / "data")
    workload.open_data(root).close()
    counts_S4 = np.load(root / "train" / "data.0000.npy")
    expected = dict(zip(("atoms", "edges", "triplets"), counts_S4.mean(0).tolist(), strict=False))
    assert workload.sample_sizes() == pytest.approx(expected)


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("number", [0, 2])
def test_a_step_of_the_peer_trains_on_the_example_batch(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled peer is traced with its derivatives, and then runs eagerly."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode, dynamic: compile(function, backend="aot_eager"))
    workload = built("hparams.base_learning_rate=0.01", "hparams.global_batch_size=4")
    (batch,) = workload.example_batches()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        step = PEERS[number].start(workload.cfg, batch, workload.layout.device)
    losses = [float(step()) for _ in range(20)]
    assert losses[0] == pytest.approx(workload.loss(batch).total.item(), rel=1e-5), "the first forces are 0"
    assert losses[-1] < 0.8 * losses[0]


def gradients(workload: OpenCatalystForces, batches: list[Batch]) -> tuple[float, list[Tensor]]:
    """Return the mean loss over micro-batches, and the gradients that a step divides by their number."""
    losses = [workload.loss(batch).total for batch in batches]
    summed = torch.autograd.grad(sum(losses), list(workload.model.parameters()))  # type: ignore[arg-type]
    return sum(loss.item() for loss in losses) / len(losses), [gradient / len(losses) for gradient in summed]


@pytest.mark.parametrize("split", [[3, 2], [1, 4], [1, 1, 1, 2]])
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(split: list[int]) -> None:
    whole = unzeroed(built("precision=fp64", "micro_batch=8"))
    expected, expected_gradients = gradients(whole, micro_batches(1, [5]))
    parts = unzeroed(built("precision=fp64", f"micro_batch={8 // len(split)}"))
    found, found_gradients = gradients(parts, micro_batches(1, split))
    assert found == pytest.approx(expected)
    for gradient, other in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other)


def test_updates_are_those_of_adamw_with_decay_on_every_parameter() -> None:
    options = ("precision=fp64", "micro_batch=8", "hparams.weight_decay=0.3", "hparams.warmup_steps=2")
    options += ("hparams.warmup_factor=0.5", "hparams.base_learning_rate=0.01")
    trained, other = unzeroed(built(*options)), unzeroed(built(*options))
    step, named = trained.build_step(), dict(other.model.named_parameters())
    reference = torch.optim.AdamW(named.values(), lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.3)
    for number, rate in enumerate((0.005, 0.0075, 0.01)):
        step(micro_batches(number, [5]))
        other.loss(micro_batches(number, [5])[0]).total.backward()
        reference.param_groups[0]["lr"] = rate
        reference.step()
        reference.zero_grad()
    for name, weight in trained.model.named_parameters():
        torch.testing.assert_close(weight, named[name], rtol=1e-6, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")


def trained_on_ranks(rank: int, world: int, _folder: str) -> dict[str, Tensor]:
    """Train two steps on unequal shares of the global batch; return the weights."""
    run, _ = loaded("scale=test", "precision=fp64", f"scale.gpus_per_node={world}", f"micro_batch={8 // world}")
    workload = unzeroed(OpenCatalystForces(run, Layout(run.layout, seed=3)))
    step = workload.build_step()
    for number in range(2):
        step([micro_batches(number, [1, 4])[rank]])
    return {name: tensor.clone() for name, tensor in workload.model.state_dict().items()}


def test_two_ranks_with_unequal_shares_train_as_one_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = on_ranks(trained_on_ranks, 2, tmp_path_factory.mktemp("ranks"))
    alone = unzeroed(built("precision=fp64", "micro_batch=8"))
    step = alone.build_step()
    for number in range(2):
        step(micro_batches(number, [5]))
    for result in found:
        for name, tensor in alone.model.state_dict().items():
            torch.testing.assert_close(result[name], tensor, rtol=1e-6, atol=1e-9, msg=f"{name} differs")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("benchmark.facts.blocks=4", "the rules fix 3"),
        ("benchmark.facts.force_weight=100.0", r"the rules fix 50\.0"),
        ("benchmark.targets.force_mae.value=0.05", r"the rules fix 0\.036"),
        ("hparams.beta_2=0.99", "opt_adamw_beta_2"),
        ("hparams.weight_decay=0.0", "opt_adamw_weight_decay"),
    ],
)
def test_the_closed_division_alone_fixes_what_the_rules_fix(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        admit(*loaded("scale=8xH200", override))
    admit(*loaded("scale=8xH200", override, "submission.division=open"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hparams.decay_boundary_steps=[5,5]", "steps in ascending order"),
        ("hparams.warmup_factor=1.5", "a share"),
        ("hparams.optimizer=adam", "optimizer"),
        ("reader.typical=[4,9,0]", "reader.typical"),
    ],
)
def test_impossible_settings_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded("scale=8xH200", override)
