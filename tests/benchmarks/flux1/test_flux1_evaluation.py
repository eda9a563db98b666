"""The validation loss against its definition, sample by sample, and its independence of batches and ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.flux1.config import Facts
from benchmarks.flux1.evaluate import UPDATES, MeanOfTimesteps, ValidationLoss, evaluation_seed, with_updates
from benchmarks.flux1.flow import LatentScale, noised, sample_losses
from benchmarks.flux1.model import Flux
from common.contract.evaluation import Predictions, Weights
from common.data.batches import HostBatch
from common.data.order import EvalShard
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from tests.capturable import Capturable
from tests.gloo_ranks import on_ranks

SAMPLES, SEED = 19, 11
FACTS = fixed_facts(
    Facts, "flux1", hidden=16, heads=2, feed_forward=32, double_blocks=1, single_blocks=1, rope_axes=[2, 2, 4],
    time_features=8, latent_size=4, text_length=3, text_width=8, caption_width=6,
)  # fmt: skip
LATENTS = LatentScale(FACTS.latent_shift, FACTS.latent_scale)


def validation_set() -> dict[str, Tensor]:
    """Encodings of all samples in float64; three of them have the timesteps 0 to 2, two the others."""
    generator = torch.Generator().manual_seed(3)
    maps = (SAMPLES, FACTS.latent_channels, FACTS.latent_size, FACTS.latent_size)
    shapes = {
        "t5": (SAMPLES, FACTS.text_length, FACTS.text_width),
        "clip": (SAMPLES, FACTS.caption_width),
        "mean": maps,
        "logvar": maps,
    }
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {**tensors, "sample_ids": torch.arange(SAMPLES), "timesteps": torch.arange(SAMPLES) % 8}


@dataclasses.dataclass
class Rows:
    """Batches of a replica; padding repeats the first sample, which must not count."""

    shard: EvalShard

    @property
    def eval_samples(self) -> int:
        return self.shard.eval_samples

    def __len__(self) -> int:
        return self.shard.batches

    def __iter__(self) -> Iterator[HostBatch]:
        tensors, batch = validation_set(), self.shard.batch
        for position in range(len(self)):
            own = list(self.shard.samples(position))
            rows = torch.tensor(own + [0] * (batch - len(own)))
            present = torch.arange(batch) < len(own)
            yield HostBatch({**{name: x[rows] for name, x in tensors.items()}, "present": present}, batch, position)

    def close(self) -> None:
        pass


def network(dtype: torch.dtype = torch.float64) -> Flux:
    def generator(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(len(name))

    return Flux(FACTS, None, generator, dtype=dtype, zero_std=0.2)


def errors_of(model: Flux, dtype: torch.dtype, tensors: dict[str, Tensor], seed: Tensor, t_N: Tensor) -> Tensor:
    noise = noised(tensors["mean"], tensors["logvar"], seed, tensors["sample_ids"], LATENTS, FACTS.patch, dtype, t_N)
    return sample_losses(model(noise.x_t_NLP, tensors["t5"], tensors["clip"], noise.t_N), noise.v_NLP)


def evaluation_of(model: Flux, layout: Layout, batch: int, dtype: torch.dtype = torch.float64) -> ValidationLoss:
    example = {name: x[:1].expand(batch, *x.shape[1:]).clone() for name, x in validation_set().items()}
    example = {name: x.to(dtype) if x.is_floating_point() else x for name, x in example.items()}
    example["present"] = torch.ones(batch, dtype=torch.bool)
    shard = EvalShard(SAMPLES, batch, layout.size("dp"), layout.index("dp"))
    evaluation = ValidationLoss(
        model, partial(errors_of, model, dtype), example, layout, lambda root: Rows(shard), True, FACTS.eval_timesteps
    )
    evaluation.warm_up()
    evaluation.open_data(Path())
    return evaluation


def weights_of(model: Flux, updates: int) -> Weights:
    return with_updates(Weights(dict(model.named_parameters())), torch.tensor(updates))


def loss_of(layout: Layout, batch: int, updates: int = 5, dtype: torch.dtype = torch.float64) -> float:
    model = network(dtype)
    evaluation = evaluation_of(model, layout, batch, dtype)
    values = evaluation.scorer.score(evaluation.predict(weights_of(model, updates)))
    assert values["eval_samples"] == SAMPLES
    return values["eval_loss"]


def on_rank(batch: int, rank: int, world: int, folder: str) -> float:
    return loss_of(Layout({"dp": world}, rank, seed=SEED), batch)


def by_hand(updates: int) -> float:
    """The loss by its definition, one sample after another: the mean over the timesteps of the mean at each."""
    model, tensors = network(), validation_set()
    seed = evaluation_seed(torch.tensor(SEED), torch.tensor(updates))
    losses: dict[int, list[float]] = {}
    with torch.no_grad():
        for row in range(SAMPLES):
            one = {name: x[row : row + 1] for name, x in tensors.items()}
            step = int(one["timesteps"])
            t = torch.tensor([step / 8], dtype=torch.float64)
            x_t, v, _ = noised(
                one["mean"], one["logvar"], seed, one["sample_ids"], LATENTS, FACTS.patch, torch.float64, t
            )
            difference = model(x_t, one["t5"], one["clip"], t) - v
            losses.setdefault(step, []).append(float(difference.pow(2).mean()))
    assert sorted(losses) == list(range(8))
    return sum(sum(of) / len(of) for of in losses.values()) / 8


def test_the_loss_is_that_of_the_definition():
    assert loss_of(Layout(seed=SEED), 4) == pytest.approx(by_hand(5), rel=1e-12)


@pytest.mark.parametrize("batch", [1, 3, 19, 24])
def test_the_loss_does_not_depend_on_the_batch(batch):
    assert loss_of(Layout(seed=SEED), batch) == pytest.approx(by_hand(5), rel=1e-12)


def test_the_loss_of_fp32_does_not_depend_on_the_batch_except_for_rounding():
    losses = [loss_of(Layout(seed=SEED), batch, dtype=torch.float32) for batch in (1, 5, 19)]
    assert losses == pytest.approx([by_hand(5)] * 3, rel=1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_the_loss_does_not_depend_on_the_number_of_ranks(world, tmp_path):
    losses = on_ranks(partial(on_rank, 4), world, tmp_path / "ranks")
    assert losses == pytest.approx([by_hand(5)] * world, rel=1e-12)


def test_every_evaluation_and_seed_has_other_noise_and_the_same_again():
    model = network()
    evaluation = evaluation_of(model, Layout(seed=SEED), 4)
    losses = [
        evaluation.scorer.score(evaluation.predict(weights_of(model, updates)))["eval_loss"] for updates in (5, 6, 5)
    ]
    assert losses[0] == losses[2] == loss_of(Layout(seed=SEED), 4)
    assert losses[1] == pytest.approx(by_hand(6), rel=1e-12)
    assert len({*losses, loss_of(Layout(seed=SEED + 1), 4)}) == 3


def test_the_seed_of_an_evaluation_is_another_one_for_each_number_of_updates_and_seed():
    seeds = {int(evaluation_seed(torch.tensor(seed), torch.tensor(n))) for seed in (0, 1, 2**40) for n in range(500)}
    assert len(seeds) == 1500
    assert max(seeds) > 2**62
    assert min(seeds) < -(2**62)


def test_the_pass_of_an_evaluation_is_capturable_and_reads_the_updates_from_the_device():
    model = network()
    evaluation = evaluation_of(model, Layout(seed=SEED), 4)
    inputs = evaluation._forward.inputs
    seen = []
    for updates in (1, 2):
        evaluation._updates.fill_(updates)
        evaluation._counts.clear()
        with torch.no_grad(), Capturable():
            evaluation._forward()
        seen.append(evaluation._counts.totals())
    assert inputs["present"].all()
    assert seen[0] != seen[1]


def test_predicting_restores_the_network_and_takes_other_weights():
    model = network()
    evaluation = evaluation_of(model, Layout(seed=SEED), 4)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    found = evaluation.scorer.score(evaluation.predict(with_updates(Weights(zeros), torch.tensor(5))))["eval_loss"]
    # with weights of 0 the network predicts 0, so the loss is the mean of the squared velocity
    tensors = validation_set()
    seed = evaluation_seed(torch.tensor(SEED), torch.tensor(5))
    v_NLP = noised(
        tensors["mean"], tensors["logvar"], seed, tensors["sample_ids"], LATENTS, FACTS.patch, torch.float64,
        tensors["timesteps"] / 8,
    ).v_NLP  # fmt: skip
    squares_N = v_NLP.pow(2).mean((1, 2))
    expected = torch.stack([squares_N[tensors["timesteps"] == step].mean() for step in range(8)]).mean()
    assert found == pytest.approx(float(expected), rel=1e-12)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_no_parameter_has_the_name_of_the_updates():
    assert UPDATES not in dict(network().named_parameters())


def totals(samples: tuple[int, ...], errors: tuple[float, ...], expected: int) -> Predictions:
    counts = {f"samples_{step}": count for step, count in enumerate(samples)}
    return Predictions({**counts, **{f"error_{step}": x for step, x in enumerate(errors)}, "expected": expected})


def test_timesteps_weigh_the_same_however_many_samples_they_have():
    values = MeanOfTimesteps(2).score(totals((3, 1), (3.0, 2.0), 4))
    assert values == {"eval_loss": 1.5, "eval_samples": 4}


def test_a_sample_that_is_evaluated_twice_or_not_at_all_is_an_error():
    for expected in (3, 5):
        with pytest.raises(RuntimeError, match=f"4 of {expected} validation samples were evaluated"):
            MeanOfTimesteps(2).score(totals((3, 1), (3.0, 2.0), expected))
