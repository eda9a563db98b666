"""Test FLUX.1's loss, step, learning rate, memory, and rules of the closed division."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from benchmarks.flux1.config import Facts
from benchmarks.flux1.flow import LatentScale, noised
from benchmarks.flux1.memory import FluxMemory
from benchmarks.flux1.model import parameter_count
from benchmarks.flux1.workload import FluxTraining
from common.config.schema import RunConfig
from common.data.batches import HostBatch
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.errors import ConfigError
from common.mlperf.admission import admit
from common.mlperf.fixed import fixed_facts
from common.optim.memory_plan import KEPT, STATE, plan, trained_weights
from tests.benchmarks.flux1.flux_ranks import SHARDS, batch_of, loaded, run_rank, train
from tests.benchmarks.flux1.public_names import diffusers_network, positions, to_diffusers
from tests.capturable import Capturable
from tests.conftest import ROOT
from tests.gloo_ranks import on_ranks


def built(*overrides: str, zero_std: float = 0.1, seed: int = 3) -> FluxTraining:
    """Return the workload of the ``test`` recipe on one rank."""
    run, _ = loaded("scale=test", f"model.zero_std={zero_std}", *overrides)
    return FluxTraining(run, Layout(run.layout, seed=seed))


def test_all_parameters_have_weight_decay():
    workload = built()
    (group,) = workload.parameter_groups()
    assert set(group.parameters) == {name for name, _ in workload.model.named_parameters()}
    assert group.weight_decay == 0.1


def test_the_initial_loss_is_the_mean_square_of_noise_minus_latent():
    workload = built("micro_batch=4", zero_std=0.0)
    batch = batch_of(workload, [5, 6, 7, 9])
    mean, logvar = batch.tensors["mean"].double(), batch.tensors["logvar"].double()
    ids, seed = batch.tensors["sample_ids"], torch.tensor(3)
    ends = [torch.full((4,), t, dtype=torch.float64) for t in (0.0, 1.0)]
    z, eps = (noised(mean, logvar, seed, ids, LatentScale(0.1159, 0.3611), 2, mean.dtype, t).x_t_NLP for t in ends)
    assert float(workload.loss(batch).total.detach()) == pytest.approx(float((eps - z).square().mean()), rel=1e-6)


def test_the_initial_loss_of_latents_with_unit_variance_is_two():
    run, _ = loaded("scale=test", "micro_batch=512", "hparams.global_batch_size=512")
    workload = FluxTraining(run, Layout(run.layout, seed=1))
    (example,) = workload.example_batches()
    assert float(workload.loss(example).total.detach()) == pytest.approx(2.0, abs=0.03)


def test_the_loss_depends_on_sample_ids_and_not_on_batches():
    workload = built("precision=fp64")
    with torch.no_grad():
        whole = workload.loss(batch_of(workload, [11, 5, 7, 2])).total
        parts = [workload.loss(batch_of(workload, ids)).total for ids in ([7, 2], [5, 11])]
    torch.testing.assert_close(whole, (parts[0] + parts[1]) / 2, rtol=1e-12, atol=0)


def test_the_loss_at_given_times_reads_them():
    workload = built("precision=fp64")
    batch, seed = batch_of(workload, [4, 8]), torch.tensor(1)
    times = torch.tensor([0.25, 0.5], dtype=torch.float64)
    with torch.no_grad():
        both = workload.sample_losses(batch.tensors, seed, times)
        first = workload.sample_losses({name: x[:1] for name, x in batch.tensors.items()}, seed, times[:1])
        others = workload.sample_losses(batch.tensors, seed, times.flip(0))
    torch.testing.assert_close(both[:1], first, rtol=1e-12, atol=0)
    assert not (both == others).any()


def flow_loss(network: nn.Module, ids: tuple[Tensor, Tensor], tensors: dict[str, Tensor]) -> Tensor:
    """Return the loss of diffusers' network by the definition of the rectified flow."""
    given = (tensors["mean"], tensors["logvar"], torch.tensor(3), tensors["sample_ids"], LatentScale(0.1159, 0.3611), 2)
    t_N = noised(*given, torch.float32).t_N
    z, eps = (noised(*given, torch.float32, torch.full_like(t_N, end)).x_t_NLP for end in (0.0, 1.0))
    share = t_N.view(-1, 1, 1)
    velocity = network(
        hidden_states=(1 - share) * z + share * eps, encoder_hidden_states=tensors["t5"], txt_ids=ids[0],
        pooled_projections=tensors["clip"], timestep=t_N, img_ids=ids[1],
    ).sample  # fmt: skip
    return ((eps - z) - velocity).square().mean()


def test_twenty_steps_equal_a_loop_with_diffusers_and_pytorchs_adamw():
    rate, warmup, most = 1e-3, 8, 0.1
    workload = built(
        "micro_batch=2", "benchmark.facts.feed_forward=64", "benchmark.facts.time_features=256",
        f"hparams.base_learning_rate={rate}", f"hparams.warmup_steps={warmup}", f"benchmark.facts.max_grad_norm={most}",
    )  # fmt: skip
    shape, theirs = workload.architecture, diffusers_network(workload.architecture)
    theirs.load_state_dict(to_diffusers(dict(workload.model.named_parameters()), shape))
    optimizer = torch.optim.AdamW(theirs.parameters(), rate, (0.9, 0.95), 1e-8, weight_decay=0.1)
    step, ids, norms = workload.build_step(), positions(shape), []
    for number in range(20):
        micro_batches = [batch_of(workload, [4 * number + i, 4 * number + i + 1], 2) for i in (0, 2)]
        result = step(micro_batches)
        found = step.read(result.names, result.values.tolist()).metrics["loss"]
        optimizer.zero_grad()
        losses = [flow_loss(theirs, ids, batch.tensors) for batch in micro_batches]
        (sum(losses) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(theirs.parameters(), most)))
        for group in optimizer.param_groups:
            group["lr"] = rate * min((number + 1) / warmup, 1.0)
        optimizer.step()
        assert found == pytest.approx(float(sum(losses).detach()) / 2, rel=2e-4), number
    assert max(norms) > most
    weights = to_diffusers({n: p for n, p in workload.weights().tensors.items() if n != "updates"}, shape)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(weights[name], parameter, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize(("step", "share"), [(0, 1 / 1600), (799, 0.5), (1599, 1.0), (9999, 1.0)])
def test_the_warm_up_is_the_references(step, share):
    run, _ = loaded("scale=8xH200")
    schedule = FluxTraining.learning_rate(_OfRecipe(run))  # type: ignore[arg-type]
    assert float(schedule(torch.tensor(step))) == pytest.approx(2e-4 * share, rel=1e-6)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_prepared_batches_have_the_dtypes_of_examples(precision, dtype):
    workload = built(f"precision={precision}")
    (example,) = workload.example_batches()
    host = {name: x if name == "sample_ids" else x.to(torch.bfloat16) for name, x in example.tensors.items()}
    batch = workload.prepare(HostBatch(host, 2, 0))
    wanted = {"t5": dtype, "clip": dtype, "mean": torch.bfloat16, "logvar": torch.bfloat16}
    for found in (example.tensors, batch.tensors):
        assert {name: x.dtype for name, x in found.items()} == {**wanted, "sample_ids": torch.int64}
    assert {name: x.shape for name, x in batch.tensors.items()} == {n: x.shape for n, x in example.tensors.items()}


def test_the_plan_has_the_batches_of_three_steps():
    workload = built("precision=bf16")
    (example,) = workload.example_batches()
    step = 2 * sum(x.nbytes for x in example.tensors.values())
    assert workload.memory_sizes().parts(0, 0)["batches"] == 3 * step


@pytest.mark.parametrize(("blocks", "operations"), [(0, 0), (1, 1)])
def test_a_step_can_be_captured(blocks, operations):
    workload = built(f"model.recomputed_blocks={blocks}", f"model.recomputed_operations={operations}")
    step, (example,) = workload.build_step(), workload.example_batches()
    with Capturable():
        step([example, example])


def test_a_part_of_the_network_has_fewer_blocks_and_flops():
    run, _ = loaded("scale=1xH200")
    assert (run.workload.model.double_blocks, run.workload.model.single_blocks) == (8, 16)
    facts = run.workload.facts
    part = dataclasses.replace(facts, double_blocks=8, single_blocks=16)
    assert part.training_flops() / facts.training_flops() == pytest.approx(8 / 19, rel=0.01)
    workload = built("benchmark.facts.double_blocks=3", "benchmark.facts.single_blocks=4", "model.single_blocks=2")
    assert (len(workload.model.double_blocks), len(workload.model.single_blocks)) == (3, 2)
    assert workload.sample_flops() == workload.architecture.training_flops()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.zero_std=0.02", "modulations and output start from zero"),
        ("model.double_blocks=8", "model.double_blocks=8: the network has 19"),
        ("model.single_blocks=16", "model.single_blocks=16: the network has 38"),
        ("benchmark.facts.text_dropout=0.2", "the rules fix 0.1"),
        ("benchmark.facts.latent_shift=0.0", "the rules fix 0.1159"),
    ],
)
def test_the_closed_division_refuses(override, message):
    run, session = loaded("scale=8xH200", override)
    with pytest.raises(ConfigError, match=message):
        admit(run, session)


@pytest.mark.parametrize("kind", ["double", "single"])
def test_more_blocks_than_the_network_has_are_refused(kind):
    with pytest.raises(ConfigError, match=f"model.{kind}_blocks=50: the network has"):
        loaded("scale=test", f"model.{kind}_blocks=50")


FACTS = fixed_facts(Facts, "flux1")
H200 = 150_100_000_000


def memory(double_blocks: int = 19, single_blocks: int = 38, **changes: object) -> FluxMemory:
    shape = dataclasses.replace(FACTS, double_blocks=double_blocks, single_blocks=single_blocks)
    return FluxMemory(**{
        "architecture": shape, "samples": 16, "micro_batches": 1, "eval_samples": 16,
        "parameters": parameter_count(shape), "itemsize": 2, "master_bytes": 4, "shards": 1, **changes,
    })  # fmt: skip


@pytest.mark.parametrize(("masters", "shards", "bytes_each"), [(4, 1, 16), (4, 8, 6), (2, 2, 11), (4, 2, 12)])
def test_bytes_of_a_weight_in_training(masters, shards, bytes_each):
    assert memory(master_bytes=masters, shards=shards).parts(0, 0)[STATE] == 11_891_178_560 * bytes_each
    assert memory(samples=0, shards=shards).parts(0, 0)[STATE] == 11_891_178_560 * 2


def test_bytes_that_blocks_keep():
    """Statistics are two moments per norm, and a log-sum-exp per head."""
    half, fp8, C = memory(), memory(fp8=True), 3072
    assert half.double_block() == 44 * C + 4 * (4 + 24)
    assert half.single_block() == 38 * C + 4 * (2 + 24)
    assert fp8.double_block() == 37 * C + 4 * (4 + 24)
    assert fp8.single_block() == 34 * C + 4 * (2 + 24)


def test_blocks_that_recompute_keep_their_inputs():
    """The last norm keeps its input, too."""
    tokens, C = 16 * 512, 3072
    some, last = memory(2, 3), 2 * C
    assert some.kept(0) == tokens * (2 * some.double_block() + 3 * some.single_block() + last)
    some_products = 2 * (6 * C + 4 * C)
    assert some.kept(3) == tokens * (2 * some.single_block() + 3 * some_products + last)
    assert some.kept(5) == tokens * (5 * some_products + last)
    assert some.kept(7) == tokens * (2 * 2 * C + 3 * some_products + last)
    assert some.kept(10) == tokens * (5 * 2 * C + last)
    asked = memory(2, 3, asked=(2, 1)).kept(0)
    assert asked == tokens * (2 * some.single_block() + some_products + 2 * 2 * C + last)


def test_steps_of_recomputation_begin_with_operations():
    some = memory(2, 3)
    assert some.layers == 10
    assert [some.levels(steps) for steps in (0, 2, 5, 6, 10)] == [(0, 0), (0, 2), (0, 5), (1, 4), (5, 0)]
    words = "1 blocks recompute everything; 4 blocks recompute all but matrix products"
    assert (some.recomputation(0), some.recomputation(6)) == ("", words)
    assert (memory(2, 3, asked=(2, 1)).layers, memory(2, 3, asked=(2, 1)).levels(0)) == (0, (2, 1))
    assert [memory(2, 3, asked=asked).levels(0) for asked in ((9, 2), (1, 9))] == [(5, 0), (1, 4)]


def test_blocks_that_cannot_keep_products_recompute_everything():
    some = memory(2, 3, can_keep_products=False)
    assert some.layers == 5
    assert [some.levels(steps) for steps in (0, 2, 5)] == [(0, 0), (2, 0), (5, 0)]


@pytest.mark.parametrize(("linear", "ranks"), [("te", 1), ("reference", 2)])
def test_recomputed_operations_need_products_that_are_kept(linear, ranks, monkeypatch):
    parallel = TensorParallel(ranks, 0, object() if ranks > 1 else None)
    monkeypatch.setattr(TensorParallel, "from_layout", lambda layout: parallel)
    with pytest.raises(ConfigError, match=r"model\.recomputed_operations=1: blocks cannot keep .* layout\.tp above 1"):
        built("precision=bf16", f"model.implementations.linear={linear}", "model.recomputed_operations=1")


def test_with_shared_layers_the_plan_chooses_whole_blocks(monkeypatch):
    assert built().memory_sizes().can_keep_products
    monkeypatch.setattr(TensorParallel, "from_layout", lambda layout: TensorParallel(2, 0, object()))
    assert not built().memory_sizes().can_keep_products


def test_the_whole_network_on_two_gpus_needs_remainders_and_recomputation():
    whole = {"shards": 2, "alone": False}
    with pytest.raises(ConfigError, match=r"GB are missing; use .*optimizer\.masters=remainder"):
        plan(memory(**whole), H200, None, 0)
    found = plan(memory(master_bytes=2, **whole), H200, None, 0)
    assert 57 < found.recomputed < 2 * 57
    assert found.total <= H200
    assert (
        f"; {found.recomputed - 57} blocks recompute everything; {2 * 57 - found.recomputed} blocks recompute all but"
        in found.in_words()
    )
    before = plan(memory(master_bytes=2, **whole), H200 + 50_000_000_000, found.recomputed - 1, 0)
    assert before.total > H200


def test_eight_gpus_and_a_part_on_one_gpu_recompute_nothing():
    for sizes in (memory(shards=8, alone=False), memory(8, 16)):
        assert plan(sizes, H200, None, 0).recomputed == 0


PLANS = {
    "1xH200": (80.6, 24.2, (0, 0)),
    "2xH200": (130.8, 11.0, (15, 42)),
    "4xH200": (118.9, 22.4, (14, 43)),
    "8xH200": (95.1, 46.6, (0, 18)),
}
"""Planned GB of weights with their state and of activations, and blocks that recompute, in the table of the README."""


@pytest.mark.parametrize("scale", PLANS)
def test_a_recipe_has_the_plan_in_the_readme(scale):
    run, _ = loaded(f"scale={scale}")
    shape, ranks = run.workload.architecture, run.training_ranks
    layout = _ManyRanks(ranks)
    sizes = FluxMemory(
        architecture=shape, samples=run.micro_batch, micro_batches=run.grad_accumulation_steps,
        eval_samples=run.workload.reader.eval_batch,
        parameters=parameter_count(shape), alone=ranks == 1, **trained_weights(run, layout, torch.bfloat16),
    )  # fmt: skip
    found = plan(sizes, H200, None, 0)
    state, activations, levels = PLANS[scale]
    assert round(found.parts[STATE] / 1e9, 1) == state
    assert round(found.parts[KEPT] / 1e9, 1) == activations
    assert sizes.levels(found.recomputed) == levels
    readme = (ROOT / "benchmarks" / "flux1" / "README.md").read_text()
    assert f"| `{scale}` | {state} | {activations} | {(found.total / 1e9 - state - activations):.1f} |" in readme


def test_recipes_add_up_gradients_in_fp32_where_they_fit():
    found = {scale: loaded(f"scale={scale}")[0].optimizer.gradients for scale in ("2xH200", "4xH200", "8xH200")}
    assert found == {"2xH200": "same", "4xH200": "fp32", "8xH200": "fp32"}


class _ManyRanks:
    """The part of a layout of data-parallel training ranks that the plan reads; a real one needs process groups."""

    role = "train"

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self, *axes: str) -> int:
        return self._ranks if "dp" in axes else 1


class _OfRecipe:
    """Settings of a recipe without its network, for methods that need no more."""

    def __init__(self, run: RunConfig) -> None:
        self.own = run.workload


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    return train(1, 0, "none", "model.recomputed_blocks=1")


@pytest.mark.slow_cases("2", "8")
@pytest.mark.parametrize("world", SHARDS)
def test_sharded_ranks_train_like_one_rank_that_accumulates(world, alone, tmp_path):
    for found in on_ranks(run_rank, world, tmp_path):
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
