"""Test the whole evaluation against its definition, over ranks, and its errors."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from benchmarks.stable_diffusion.clip_score import DEVIATION, MEAN
from benchmarks.stable_diffusion.evaluate import FidAndClip, rates
from benchmarks.stable_diffusion.fid import FeatureStatistics
from benchmarks.stable_diffusion.generation import initial_noise
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.scoring_networks import ScoringNetworks, published_networks, random_tokens
from common.contract.evaluation import Predictions
from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError, DataError, UnsupportedImplementation
from tests.benchmarks.stable_diffusion.small_evaluation import (
    ARCHITECTURE,
    GUIDANCE,
    PROMPTS,
    SEED,
    TEXT,
    VISION,
    ddim,
    predicted,
    read_reference,
    small_config,
    small_evaluation,
    small_model,
    sums_of_rank,
    weights_of,
    write_assets,
    write_data,
)
from tests.capturable import Capturable
from tests.gloo_ranks import on_ranks


def both_velocities(model: UNet, captions: tuple[Tensor, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    return tuple(model(x, t, caption) for caption in captions)


@torch.no_grad()
def scores_by_definition(model: UNet, networks: ScoringNetworks, seed: int, root: Path) -> dict[str, float]:
    """Return the scores by definition: one picture at a time, and a non-symmetric product in FID."""
    features, similarities = [], []
    transform = transforms.Compose(
        [
            transforms.Resize(VISION.resolution, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(VISION.resolution),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, DEVIATION),
        ]
    )
    empty = networks.conditioning.encode(networks.tokenize([""]))
    for number, prompt in enumerate(PROMPTS):
        tokens = networks.tokenize([prompt])
        context = networks.conditioning.encode(tokens)
        shape = (ARCHITECTURE.latent_channels, *[ARCHITECTURE.latent_size] * 2)
        x = initial_noise(torch.tensor(seed), torch.tensor([number]), shape, torch.float64)
        captions = (empty, context)
        x = ddim(x, partial(both_velocities, model, captions), [751, 501, 251, 1], GUIDANCE)
        image = ((networks.vae.decode(x / 0.18215) + 1) / 2).clamp(0, 1)
        features.append(networks.inception.features(image)[0].numpy())
        as_bytes = (image[0] * 255).numpy().astype(np.uint8).transpose(1, 2, 0)
        pixels = transform(Image.fromarray(as_bytes)).double()
        a, b = networks.vision.project(pixels[None])[0], networks.text.project(tokens)[0]
        similarities.append(float(a @ b / (a.norm() * b.norm())))
    reference = read_reference(root)
    mean, covariance = np.mean(features, 0), np.cov(np.stack(features), rowvar=False)
    shared = np.sqrt(np.linalg.eigvals(reference.covariance_FF @ covariance).real.clip(0)).sum()
    traces = np.trace(reference.covariance_FF + covariance)
    distance = np.square(mean - reference.mean_F).sum() + traces - 2 * shared
    return {"FID": float(distance), "CLIP": float(np.mean(similarities))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with assets and data."""
    path = tmp_path_factory.mktemp("evaluation")
    write_assets(path)
    write_data(path, features(path))
    return path


def features(path):
    return published_networks(small_config(), path, torch.device("cpu"), torch.float64).inception.out


def test_scores_equal_their_definition(folder, capsys):
    networks = published_networks(small_config(), folder, torch.device("cpu"), torch.float64)
    seed = int(torch.randint(2**62, (), generator=Layout(seed=SEED).shared_generator("pictures")))
    expected = scores_by_definition(small_model(seed=1), networks, seed, folder)
    scorer = FidAndClip(read_reference, networks.inception.out)
    scorer = pickle.loads(pickle.dumps(scorer))  # another process may run it
    scorer.warm_up()
    scorer.open_data(folder)
    assert scorer.score(predicted(folder)) == pytest.approx({**expected, "eval_samples": 7}, rel=1e-7)
    for model, other_seed in ((small_model(seed=2), seed), (small_model(seed=1), seed + 1)):
        other = scores_by_definition(model, networks, other_seed, folder)
        assert all(other[name] != pytest.approx(expected[name], rel=1e-4) for name in expected)
    assert "7 pictures on 1 rank; pictures/s of one: latents" in capsys.readouterr().err


def test_evaluating_the_same_weights_twice_gives_equal_sums(folder):
    model = small_model()
    evaluation = small_evaluation(folder, model)
    evaluation.warm_up()
    evaluation.open_data(folder)
    first, other, again = (evaluation.predict(weights_of(small_model(seed))).values for seed in (1, 2, 1))
    assert first["cosine"] == again["cosine"] != other["cosine"]
    assert not np.allclose(first["product_sums"], other["product_sums"])
    np.testing.assert_array_equal(first["product_sums"], again["product_sums"])
    assert all(
        torch.equal(mine, drawn) for mine, drawn in zip(model.parameters(), small_model().parameters(), strict=True)
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_give_the_sums_of_one(ranks, folder, tmp_path):
    """2 ranks have 4 and 3 of 7 captions, 4 ranks have 2, 2, 2 and 1, in batches of up to 3."""
    alone = predicted(folder).values
    shared, *others = on_ranks(partial(sums_of_rank, folder=folder), ranks, tmp_path)
    assert others == [None] * (ranks - 1)
    assert shared["pictures"] == alone["pictures"] == len(PROMPTS)
    for name in ("cosine", "feature_sums", "product_sums"):
        np.testing.assert_allclose(shared[name], alone[name], rtol=1e-12, atol=1e-12)


def test_a_rank_without_captions_adds_nothing(folder, monkeypatch):
    """A rank without captions generates no picture and adds nothing to the sums."""
    monkeypatch.setattr(Layout, "group", lambda self, *axes: None)
    evaluation = small_evaluation(folder, small_model(), Layout({"dp": 8}, 7, seed=SEED))
    evaluation.open_data(folder)
    assert evaluation.predict(weights_of(small_model())) is None
    assert not evaluation._sums.flat.any()


def test_generating_and_scoring_never_wait_for_the_device(folder):
    model = small_model()
    evaluation = small_evaluation(folder, model)
    evaluation.warm_up()
    evaluation.open_data(folder)
    tokens, embeddings = evaluation._tokens_NT[:3], evaluation._embeddings_NE[:3]
    with evaluation._generator.sampler.evaluating(weights_of(model)), Capturable():
        evaluation._generator.begin()
        evaluation._add(evaluation._prompts_N[:3], tokens, embeddings, 2)


@pytest.mark.parametrize("prompts", [PROMPTS[:-1], [*PROMPTS, "one more"]])
def test_a_wrong_number_of_captions_is_an_error(folder, prompts):
    evaluation = small_evaluation(folder, small_model())
    with pytest.raises(DataError, match=f"{len(prompts)} captions to evaluate, expected 7"):
        evaluation.caption(prompts)


def test_statistics_of_another_network_are_an_error(folder, tmp_path):
    write_data(tmp_path, features=5)
    scorer = FidAndClip(read_reference, features(folder))
    with pytest.raises(DataError, match=f"statistics of 5 features in {tmp_path}, but .* has {features(folder)}"):
        scorer.open_data(tmp_path)


def reference_of_two(root):
    return FeatureStatistics(np.zeros(2), np.eye(2))


def sums(**changed):
    made = {"pictures": 3, "expected": 3, "cosine": 0.6, "feature_sums": np.ones(2), "product_sums": np.eye(2)}
    return Predictions(made | changed)


def test_missing_pictures_and_diverged_weights_are_errors(tmp_path):
    scorer = FidAndClip(reference_of_two, 2)
    scorer.open_data(tmp_path)
    assert scorer.score(sums())["CLIP"] == pytest.approx(0.2)
    with pytest.raises(RuntimeError, match="2 of 3 captions were evaluated"):
        scorer.score(sums(pictures=2))
    with pytest.raises(DataError, match="diverged"):
        scorer.score(sums(cosine=float("nan")))
    with pytest.raises(DataError, match="diverged"):
        scorer.score(sums(feature_sums=np.array([1.0, float("nan")])))


def test_missing_assets_are_errors(folder, tmp_path):
    own, cpu = small_config(), torch.device("cpu")
    with pytest.raises(ConfigError, match=r"assets_dir=null: .*sd.ckpt, clip.bin and inception.pth"):
        published_networks(own, None, cpu, torch.float32)
    (tmp_path / own.assets.vocabulary).write_bytes((folder / own.assets.vocabulary).read_bytes())
    with pytest.raises(CheckpointError, match=r"sd\.ckpt"):
        published_networks(own, tmp_path, cpu, torch.float32)


def test_scoring_networks_run_in_fp32_at_any_precision(folder):
    state = torch.get_rng_state()
    networks = published_networks(small_config(), folder, torch.device("cpu"), torch.bfloat16)
    dtypes = {name: next(getattr(networks, name).parameters()).dtype for name in vars(networks) if name != "tokenize"}
    assert dtypes == {
        "conditioning": torch.bfloat16,
        "vae": torch.bfloat16,
        "inception": torch.float32,
        "text": torch.float32,
        "vision": torch.float32,
    }
    assert torch.equal(torch.get_rng_state(), state)


def test_the_autoencoder_has_the_configured_implementations(folder):
    own, cpu = small_config(), torch.device("cpu")
    for requested, chosen in (("auto", "transposed_library"), ("reference", "reference")):
        model = replace(own.model, implementations={"upsampling": requested})
        networks = published_networks(replace(own, model=model), folder, cpu, torch.float32)
        assert f"implementation={chosen})" in repr(networks.vae)
    model = replace(own.model, implementations={"group_norm": "triton"})
    with pytest.raises(UnsupportedImplementation, match=r"model\.implementations\.group_norm=triton"):
        published_networks(replace(own, model=model), folder, cpu, torch.float32)


def test_rates_are_per_rank():
    assert rates(30000, {"latents": 6000.0, "CLIP": 60.0}, 8) == (
        "30,000 pictures on 8 ranks; pictures/s of one: latents 5.0, CLIP 500.0"
    )


def test_random_tokens_differ_and_have_one_end():
    tokens = random_tokens(TEXT, ["", ""])
    assert (tokens == TEXT.vocabulary - 1).sum(1).tolist() == [1, 1]
    assert not torch.equal(tokens[0], tokens[1])
