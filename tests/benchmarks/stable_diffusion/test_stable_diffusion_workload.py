"""Test Stable Diffusion's recipes, learning rates, loss, step over ranks, and rules of the closed division."""

from __future__ import annotations

import functools
import gzip
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.stable_diffusion.frozen.clip import TextTower
from benchmarks.stable_diffusion.frozen.published import save_stable_diffusion
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.workload import StableDiffusion
from common.config import loading
from common.config.composition import compose
from common.config.schema import RunConfig, SessionConfig
from common.data.batches import Batch, Block, HostBatch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit, evaluation_schedule
from common.mlperf.events import hyperparameters
from tests.benchmarks.stable_diffusion.small_prepared import write_prepared
from tests.benchmarks.stable_diffusion.unet_ranks import SHARDS, run_rank, train
from tests.capturable import Capturable
from tests.gloo_ranks import on_ranks


@functools.cache
def loaded(*overrides: str) -> tuple[RunConfig, SessionConfig]:
    return loading.load(compose(["benchmark=stable_diffusion", "device=cpu", *overrides]), lambda _: StableDiffusion)


def built(*overrides: str, seed: int = 3) -> StableDiffusion:
    """Return the workload of the ``test`` recipe on one rank, in which no parameter is zero."""
    run, _ = loaded("scale=test", "model.zero_std=0.1", *overrides)
    return StableDiffusion(run, Layout(run.layout, seed=seed))


def batch_of(workload: StableDiffusion, ids: Sequence[int]) -> Batch:
    """Return a batch of samples whose moments and captions depend only on their ids."""
    made: dict[str, list[torch.Tensor]] = {"moments": [], "context": []}
    facts = workload.own.facts
    for sample in ids:
        generator, size = torch.Generator().manual_seed(sample), facts.latent_size
        made["moments"].append(torch.randn((2 * facts.latent_channels, size, size), generator=generator))
        made["context"].append(torch.randn((facts.context_length, facts.context_width), generator=generator))
    tensors = {name: torch.stack(each) for name, each in made.items()}
    return workload.prepare(HostBatch({**tensors, "sample_ids": torch.tensor(ids)}, len(ids), 0))


# NVIDIA's results of v4.0 and v4.1: GPUs, micro-batch, learning rate per picture, steps of warm-up.
PUBLISHED = {
    "8xH200": (8, 32, 1.8e-7, 1000),
    "8xH100": (8, 32, 1.8e-7, 1000),
    "64xH100": (64, 16, 1.1e-7, 500),
    "512xH100": (512, 4, 1.0e-7, 750),
    "1024xH100": (1024, 2, 0.8e-7, 1000),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_hyperparameters(scale):
    gpus, pictures, rate, warmup = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}")
    assert (run.training_ranks, run.micro_batch, run.grad_accumulation_steps) == (gpus, pictures, 1)
    assert admit(run, session).hyperparameters == {
        "global_batch_size": gpus * pictures,
        "gradient_accumulation_steps": 1,
        "opt_name": "adamw",
        "opt_base_learning_rate": pytest.approx(rate * gpus * pictures, rel=1e-12),
        "opt_learning_rate_warmup_steps": warmup,
        "opt_adamw_beta_1": 0.9,
        "opt_adamw_beta_2": 0.999,
        "opt_adamw_epsilon": 1e-8,
        "opt_adamw_weight_decay": 0.01,
    }


def test_the_logged_learning_rate_equals_published_logs():
    assert hyperparameters(loaded("scale=8xH200")[0])["opt_base_learning_rate"] == 4.608e-05
    assert hyperparameters(loaded("scale=1xGPU")[0])["opt_base_learning_rate"] == 7.168e-05


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_fewer_gpus_accumulate_to_the_batch_of_eight(gpus):
    run, _ = loaded(f"scale={gpus}xH200")
    assert (run.micro_batch, run.grad_accumulation_steps, run.global_batch) == (32, 8 // gpus, 256)


@pytest.mark.parametrize("scale", [*PUBLISHED, "2xH200", "4xH200"])
def test_gradients_are_divided_by_the_number_of_ranks_in_fp16(scale):
    run, _ = loaded(f"scale={scale}")
    assert run.precision == "fp16"
    assert run.optimizer.grad_predivide == run.training_ranks
    assert math.log2(run.optimizer.grad_predivide).is_integer()  # exact in fp16


@pytest.mark.parametrize(("scale", "steps"), [("8xH200", 2000), ("64xH100", 500), ("512xH100", 250)])
def test_evaluation_points_are_every_512000_pictures(scale, steps):
    run, _ = loaded(f"scale={scale}")
    points = list(evaluation_schedule(run).points())
    assert points[:2] == [steps * run.global_batch, 2 * steps * run.global_batch]
    assert run.evaluation.scoring == "offline"
    assert run.evaluation.first < len(points)


@pytest.mark.parametrize(
    ("scale", "step", "share"),
    [
        ("8xH200", 0, 1 / 1001),
        ("8xH200", 99, 100 / 1001),  # as in the log of v3.1
        ("8xH200", 1000, 1.0),
        ("8xH200", 9999, 1.0),
        ("1xGPU", 0, 1e-6),
        ("1xGPU", 500, 1e-6 + (1 - 1e-6) * 0.5),
        ("1xGPU", 1000, 1.0),
        ("64xH100", 249, 250 / 501),
    ],
)
def test_the_warm_up_follows_the_variant(scale, step, share):
    run, _ = loaded(f"scale={scale}")
    schedule = StableDiffusion.learning_rate(_OfRecipe(run))  # type: ignore[arg-type]
    rate = run.workload.hparams.base_learning_rate * run.global_batch
    assert float(schedule(torch.tensor(step))) == pytest.approx(rate * share, rel=1e-6)


def test_all_parameters_have_weight_decay():
    workload = built()
    (group,) = workload.parameter_groups()
    assert set(group.parameters) == {name for name, _ in workload.model.named_parameters()}
    assert group.weight_decay == 0.01


def test_the_initial_loss_is_that_of_predicting_zero():
    """With latents of unit variance, the target has variance 1 at every time."""
    run, _ = loaded("scale=test", "micro_batch=512", "hparams.global_batch_size=512")
    workload = StableDiffusion(run, Layout(run.layout, seed=1))
    (example,) = workload.example_batches()
    assert float(workload.loss(example).total.detach()) == pytest.approx(1.0, abs=0.02)


def test_noise_depends_on_sample_ids_only():
    workload = built("precision=fp64")
    with torch.no_grad():
        whole = workload.loss(batch_of(workload, [11, 5, 7, 2])).total
        parts = [workload.loss(batch_of(workload, ids)).total for ids in ([7, 2], [5, 11])]
        again = workload.loss(batch_of(workload, [11, 5, 7, 12])).total
    torch.testing.assert_close(whole, (parts[0] + parts[1]) / 2, rtol=1e-12, atol=0)
    assert float(again) != pytest.approx(float(whole), rel=1e-3)


def test_training_on_a_few_samples_lowers_their_loss():
    workload = built("precision=fp32", "micro_batch=4", "hparams.base_learning_rate=5e-4", "hparams.warmup_steps=0")
    step, batch = workload.build_step(), batch_of(workload, [3, 1, 4, 15])
    losses = []
    for _ in range(30):
        result = step([batch])
        losses.append(step.read(result.names, result.values.tolist()).metrics["loss"])
    assert losses[-1] < 0.7 * losses[0]


def test_the_loss_scale_equals_nvidias():
    workload = built("precision=fp16")
    workload.build_step()
    assert float(workload.loss_scale) == 65536.0
    model = workload.own.model
    assert (model.loss_scale_interval, model.loss_scale_hysteresis) == (1000, 2)


def test_prepared_batches_have_the_dtypes_of_examples():
    workload = built("precision=bf16")
    (example,) = workload.example_batches()
    host = {
        "moments": example.tensors["moments"].to(torch.bfloat16),
        "context": example.tensors["context"].float(),
        "sample_ids": torch.arange(2),
    }
    batch = workload.prepare(HostBatch(host, 2, 0))
    assert {name: tensor.dtype for name, tensor in batch.tensors.items()} == {
        name: tensor.dtype for name, tensor in example.tensors.items()
    }
    assert {name: tensor.shape for name, tensor in batch.tensors.items()} == {
        name: tensor.shape for name, tensor in example.tensors.items()
    }


def test_a_step_can_be_captured():
    workload = built()
    step, (example,) = workload.build_step(), workload.example_batches()
    with Capturable():
        step([example, example])


def test_a_sample_has_the_known_flops():
    run, _ = loaded("scale=8xH200")
    assert StableDiffusion.sample_flops(_OfRecipe(run)) == pytest.approx(2.413e12, rel=1e-3)  # type: ignore[arg-type]


class _OfRecipe:
    """Settings of a recipe without its network, for methods that need no more."""

    def __init__(self, run: RunConfig) -> None:
        self.own = run.workload


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.zero_std=0.02", "starts from zero"),
        ("text.layers=12", "the frozen networks are the published ones"),
        ("assets.clip_digest=null", "the frozen networks are the published files"),
        ("assets_dir=null", "by the published networks"),
        ("benchmark.facts.norm_groups=32", "the rules fix 16"),
        ("benchmark.facts.guidance=7.5", "the rules fix 8.0"),
        ("benchmark.targets.FID.value=120", "the rules fix 90"),
        ("hparams.weight_decay=0.0", "opt_adamw_weight_decay"),
    ],
)
def test_the_closed_division_refuses(override, message):
    run, session = loaded("scale=8xH200", override)
    with pytest.raises(ConfigError, match=message):
        admit(run, session)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "benchmark.facts.image_size=32",
            "image_size=32: must equal latents times the VAE's factor, 16",
        ),
        ("benchmark.facts.context_width=8", "benchmark.facts.context_width=8: must equal text.width, 16"),
        ("vision.embedding=4", "vision.embedding=4: must equal text.embedding, 8"),
        ("benchmark.facts.sampling_steps=3", "sampling_steps=3: a divisor of times=1000"),
        ("hparams.variant=theirs", "hparams.variant=theirs"),
    ],
)
def test_inconsistent_settings_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        loaded("scale=test", override)


def test_tokens_are_encoded_by_the_checkpoints_text_tower(tmp_path):
    given = [f"assets_dir={tmp_path}", "reader.captions=tokens"]
    own = loaded("scale=test")[0].workload
    torch.manual_seed(0)
    tower = TextTower(own.text)
    save_stable_diffusion(tmp_path / own.assets.checkpoint, AutoencoderKL(own.vae), tower)
    workload, tokens = built(*given), torch.tensor([[544, 5, 7, *[545] * 74], [544, 9, *[545] * 75]])
    workload.warm_up_reader()
    (example,) = workload.example_batches()
    host = {"moments": example.tensors["moments"], "tokens": tokens, "sample_ids": torch.arange(2)}
    batch = workload.prepare(HostBatch(host, 2, 0))
    assert torch.equal(batch.tensors["context"], tower.encode(tokens))
    assert set(batch.tensors) == set(example.tensors)
    assert not any("tower" in name or "text" in name for name, _ in workload.named_state())  # not saved


def test_captions_are_tokenized_with_the_merges_in_assets(tmp_path):
    own = loaded("scale=test")[0].workload
    save_stable_diffusion(tmp_path / own.assets.checkpoint, AutoencoderKL(own.vae), TextTower(own.text))
    merges = "".join(f"{a} {b}\n" for a, b in itertools.product("bcdfhij", "klmoptv") if (a, b) != ("j", "v"))
    (tmp_path / own.assets.vocabulary).write_bytes(gzip.compress(f"#version\n{merges}".encode()))
    root = write_prepared(tmp_path / "data", "npy")
    workload = built(f"assets_dir={tmp_path}", "reader.captions=tokens")
    source = workload.open_data(root)
    try:
        batches = [workload.prepare(batch) for batch in source.batches(Block(0, 1, 0, 0, 4))]
    finally:
        source.close()
    shapes = [(batch.tensors["moments"].shape, batch.tensors["context"].shape) for batch in batches]
    assert shapes == [((2, 8, 4, 4), (2, 77, 16))] * 2


def test_tokens_require_assets():
    with pytest.raises(ConfigError, match=r"assets_dir=null: reader\.captions=tokens"):
        built("reader.captions=tokens", "assets_dir=null")


TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    return train(1, 0, "none")


@pytest.mark.parametrize("world", SHARDS)
def test_several_ranks_train_like_one_rank_that_accumulates(world, alone, tmp_path):
    for found in on_ranks(run_rank, world, tmp_path):
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
