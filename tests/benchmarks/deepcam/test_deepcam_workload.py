"""DeepCAM as a workload: recipes and sets, learning rates, the update of LAMB, group batch norm, and what rules fix."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import Tensor

from benchmarks.deepcam.peer import PEERS
from benchmarks.deepcam.workload import DeepCamSegmentation
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit
from common.mlperf.constraints import missing_hyperparameters
from common.mlperf.events import hyperparameters
from common.mlperf.rcp import RCP_FOLDER
from common.optim.optimizer import Optimizer
from tests.benchmarks.recipes import recipes_of
from tests.gloo_ranks import on_ranks

loaded, built = recipes_of("deepcam", DeepCamSegmentation)

COSINE = {"scheduler_type": "cosine_annealing", "scheduler_t_max": 9000, "scheduler_eta_min": 0, "opt_lr": 0.00155}
PUBLISHED: dict[str, tuple[int, int, int, dict[str, object]]] = {
    "2048xH100": (2048, 1, 2, {"scheduler_type": "multistep", "scheduler_milestones": (800,), "opt_lr": 0.0055}),
    "16xH100": (16, 8, 1, COSINE),
    "8xH200": (8, 8, 1, COSINE),
    "1xH200": (1, 8, 1, COSINE),
    "1xGPU": (1, 1, 1, COSINE),  # a micro-batch that is found on a GPU
}
"""Ranks, samples of a micro-batch and ranks of a batch-norm group in recipes, and logged hyperparameters."""


@pytest.mark.parametrize("scale", [*PUBLISHED, "2xH200", "4xH200", "8xH100"])
def test_every_recipe_keeps_what_the_rules_fix(scale):
    run, session = loaded(f"scale={scale}")
    admission = admit(run, session)
    assert admission.rules.log_name == "deepcam"
    assert list(itertools.islice(admission.schedule.points(), 3)) == [1, 2, 3]
    sizes = (run.benchmark.train_samples, run.benchmark.eval_samples)
    assert (*sizes, run.benchmark.targets["mean_iou"].value) == (121_266, 15_158, 0.82)


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_hyperparameters(scale):
    ranks, samples, group, expected = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}")
    logged = admit(run, session).hyperparameters
    batch = 2048 if ranks == 2048 else 128
    assert (run.world_size, run.micro_batch, run.precision) == (ranks, samples, "bf16")
    assert (logged["global_batch_size"], logged["batchnorm_group_size"]) == (batch, group)
    assert logged["gradient_accumulation_frequency"] == batch // (ranks * samples)
    assert {key: logged[key] for key in expected} == expected


@pytest.mark.parametrize("batch", [128, 256, 512, 1024, 2048])
def test_a_set_has_the_hyperparameters_of_the_reference_point(batch):
    points = json.loads((RCP_FOLDER / "hpc_3.0.0" / "rcps_deepcam.json").read_text())
    expected = points[f"deepcam_ref_{batch}"]["Hyperparams"]
    run, _ = loaded("scale=1xH200", f"hparams=deepcam/rcp_{batch}", f"micro_batch={batch}")
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in hyperparameters(run).items()}
    assert found["batchnorm_group_size"] == expected.pop("batchnorm_groupsize")
    expected.pop("num_workers", None)
    unused = ("decay_rate", "milestones") if found["scheduler_type"] == "cosine_annealing" else ("t_max", "eta_min")
    for name in unused:
        expected.pop(f"scheduler_{name}", None)
    for name in ("t_max", "eta_min", "decay_rate"):  # some of them are text
        if (key := f"scheduler_{name}") in expected:
            expected[key] = float(expected[key])
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("scale", ["16xH100", "2048xH100"])
@pytest.mark.parametrize("ruleset", ["1.0.0", "2.0.0", "3.0.0"])
def test_the_log_has_every_hyperparameter_of_the_rule_files(ruleset, scale):
    run, _ = loaded(f"scale={scale}", f"ruleset={ruleset}")
    assert missing_hyperparameters("deepcam", ruleset, hyperparameters(run)) == []


def rates(steps: int, *overrides: str) -> list[float]:
    """Return the learning rates of the first updates."""
    (optimizer,) = built("hparams.base_learning_rate=8", *overrides).build_step().updaters
    assert isinstance(optimizer, Optimizer)
    return [float(optimizer._schedule(torch.tensor(step))) for step in range(steps)]


MULTISTEP = ("hparams.scheduler=multistep", "hparams.milestones=[3,5]", "hparams.decay_rate=0.5")
ANNEALED = ("hparams.scheduler=cosine_annealing", "hparams.t_max=4", "hparams.eta_min=2")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # The counter is 1 at the first update. Milestone m holds from update m - 1 on without warm-up, else from m + W.
        ((*MULTISTEP, "hparams.warmup_steps=0"), [8, 8, 4, 4, 2, 2]),
        ((*MULTISTEP, "hparams.warmup_steps=4"), [2, 4, 6, 8, 8, 8, 8, 4, 4, 2, 2]),
        ((*MULTISTEP, "hparams.warmup_steps=4", "hparams.warmup_factor=3"), [12, 16, 20, 24, 24, 24, 24, 12, 12, 6]),
        ((*ANNEALED, "hparams.warmup_steps=0"), [7.1213203, 5, 2.8786797, 2, 2, 2]),
        ((*ANNEALED, "hparams.warmup_steps=2"), [4, 8, 7.1213203, 5, 2.8786797, 2, 2]),
    ],
)
def test_learning_rates_are_those_of_the_formula(overrides, expected):
    assert rates(len(expected), *overrides) == pytest.approx(expected, rel=1e-6)


def micro_batches(workload: DeepCamSegmentation, count: int, first: int = 0, samples: int = 4) -> list[Batch]:
    """Return a random micro-batch of each global batch of four: ``samples`` samples from number ``first`` on."""
    (example,) = workload.example_batches()
    made = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, *example.tensors["x"].shape[1:], generator=generator)
        y = (x[..., 0] > 0.5).to(torch.uint8) + (x[..., 1] > 0.5).to(torch.uint8)
        shift, scale = torch.randn(16, generator=generator), torch.rand(16, generator=generator) + 0.5
        mine = slice(first, first + samples)
        made.append(Batch({"x": x[mine], "y": y[mine], "shift": shift, "scale": scale}, example.samples))
    return made


def test_updates_are_those_of_apexs_lamb():
    """The gradient is clipped by its global norm; weight decay and trust ratio are for every tensor."""
    options = ("precision=fp64", "micro_batch=4", "hparams.scheduler=multistep", "hparams.warmup_steps=2")
    options += ("hparams.weight_decay=0.3", "benchmark.facts.max_grad_norm=0.05")
    trained, other = built(*options), built(*options)
    step, named = trained.build_step(), dict(other.model.named_parameters())
    first = {name: torch.zeros_like(weight) for name, weight in named.items()}
    second = {name: torch.zeros_like(weight) for name, weight in named.items()}
    for number, (batch, rate) in enumerate(zip(micro_batches(trained, 3), (0.01, 0.02, 0.02), strict=True), 1):
        step([batch])
        gradients = dict(zip(named, torch.autograd.grad(other.loss(batch).total, list(named.values())), strict=True))
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
        assert norm > 0.05, "nothing is clipped"
        for name, weight in named.items():
            gradient = gradients[name] * 0.05 / norm
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient.square()
            unbiased = first[name] / (1 - 0.9**number), second[name] / (1 - 0.999**number)
            update = unbiased[0] / (unbiased[1].sqrt() + 1e-6) + 0.3 * weight.data
            norms = weight.data.norm(), update.norm()
            ratio = norms[0] / norms[1] if min(norms) > 0 else 1.0
            weight.data -= rate * ratio * update
    for name, weight in trained.model.named_parameters():
        torch.testing.assert_close(weight, named[name], rtol=1e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")


def test_a_step_of_the_peer_trains_on_the_example_batch():
    workload = built("hparams.base_learning_rate=0.01")
    (batch,) = micro_batches(workload, 1)
    eager, _ = PEERS
    with torch.random.fork_rng():
        torch.manual_seed(1)
        step = eager.start(workload.cfg, batch, workload.layout.device)
    losses = [float(step()) for _ in range(40)]
    assert losses[-1] < 0.9 * losses[0]


def trained_on_ranks(rank: int, world: int, _folder: str) -> dict[int, dict[str, dict[str, Tensor]]]:
    """Train two steps on two ranks; return state and weights to evaluate, by the size of the batch-norm group."""
    found = {}
    for group in (1, 2):
        run, _ = loaded(
            "scale=test", "precision=fp64", f"scale.gpus_per_node={world}", "micro_batch=2", f"hparams.bn_group={group}"
        )
        workload = DeepCamSegmentation(run, Layout(run.layout, seed=3))
        step = workload.build_step()
        for batch in micro_batches(workload, 2, first=2 * rank, samples=2):
            step([batch])
        weights = workload.weights().tensors
        state = {name: tensor.clone() for name, tensor in workload.model.state_dict().items()}
        found[group] = {"state": state, "weights": {name: tensor.clone() for name, tensor in weights.items()}}
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[str, dict[str, Tensor]]]]:
    return on_ranks(trained_on_ranks, 2, tmp_path_factory.mktemp("ranks"))


def test_batch_norms_of_a_group_of_two_ranks_are_those_of_the_joint_batch(two_ranks):
    joint = built("precision=fp64", "micro_batch=4")
    step = joint.build_step()
    for batch in micro_batches(joint, 2):
        step([batch])
    for rank in range(2):
        for name, tensor in joint.model.state_dict().items():
            found = two_ranks[rank][2]["state"][name]
            torch.testing.assert_close(found, tensor, rtol=1e-6, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")
    alone = two_ranks[0][1]["state"]["stem.0.1.running_mean"]
    assert not torch.allclose(alone, joint.model.state_dict()["stem.0.1.running_mean"], rtol=1e-3)


def test_an_evaluation_gets_the_mean_of_the_ranks_running_statistics(two_ranks):
    one, two = (result[1] for result in two_ranks)
    means = {name: (one["state"][name] + two["state"][name]) / 2 for name in one["state"]}
    for result in (one, two):
        assert result["weights"].keys() == means.keys()
        for name, mean in means.items():
            torch.testing.assert_close(result["weights"][name], mean, rtol=1e-6, atol=1e-12)
    assert not torch.equal(one["state"]["stem.0.1.running_var"], two["state"]["stem.0.1.running_var"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("benchmark.facts.middle_blocks=8", "the rules fix 16"),
        ("benchmark.facts.class_weight_exponent=-0.5", r"the rules fix -0\.125"),
        ("benchmark.targets.mean_iou.value=0.7", r"the rules fix 0\.82"),
        ("hparams.epsilon=1e-8", "opt_eps"),
        ("benchmark.facts.max_grad_norm=2.0", r"the rules fix 1\.0"),
    ],
)
def test_the_closed_division_alone_fixes_what_the_rules_fix(override, message):
    with pytest.raises(ConfigError, match=message):
        admit(*loaded("scale=8xH200", override))
    admit(*loaded("scale=8xH200", override, "submission.division=open"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hparams.t_max=0", "t_max=0: at least 1 with scheduler=cosine_annealing"),
        ("hparams.warmup_factor=0.5", "at least 1"),
        ("hparams.scheduler=poly", "scheduler"),
        ("hparams.decay_rate=1.5", "a probability"),
    ],
)
def test_impossible_settings_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        loaded("scale=8xH200", override)
