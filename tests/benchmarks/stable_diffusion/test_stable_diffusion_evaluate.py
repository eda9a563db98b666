"""The evaluation as a whole: against the chain written out, over ranks, and what it refuses."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from benchmarks.stable_diffusion.evaluate import FidAndClip, rates
from benchmarks.stable_diffusion.fid import FeatureStatistics
from benchmarks.stable_diffusion.scoring_networks import published_networks, random_tokens
from common.contract.evaluation import Predictions
from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError, DataError, UnsupportedImplementation
from tests.benchmarks.stable_diffusion.evaluation_by_hand import scores_by_hand
from tests.benchmarks.stable_diffusion.small_evaluation import (
    PROMPTS,
    SEED,
    TEXT,
    predicted,
    read_reference,
    run_rank,
    small_config,
    small_evaluation,
    small_model,
    weights_of,
    write_assets,
    write_data,
)
from tests.capturable import Capturable


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Assets and data."""
    path = tmp_path_factory.mktemp("evaluation")
    write_assets(path)
    write_data(path, features(path))
    return path


def features(path):
    return published_networks(small_config(), path, torch.device("cpu"), torch.float64).inception.out


def test_scores_are_those_of_the_chain_picture_by_picture(folder, capsys):
    networks = published_networks(small_config(), folder, torch.device("cpu"), torch.float64)
    seed = int(torch.randint(2**62, (), generator=Layout(seed=SEED).shared_generator("pictures")))
    expected = scores_by_hand(small_model(seed=1), networks, seed, folder)
    scorer = FidAndClip(read_reference, networks.inception.out)
    scorer = pickle.loads(pickle.dumps(scorer))  # it may work in another process
    scorer.warm_up()
    scorer.open_data(folder)
    assert scorer.score(predicted(folder)) == pytest.approx({**expected, "eval_samples": 7}, rel=1e-7)
    for model, other_seed in ((small_model(seed=2), seed), (small_model(seed=1), seed + 1)):
        other = scores_by_hand(model, networks, other_seed, folder)
        assert all(other[name] != pytest.approx(expected[name], rel=1e-4) for name in expected)
    assert "7 pictures on 1 rank; pictures/s of one: latents" in capsys.readouterr().err


def test_a_second_evaluation_of_the_same_weights_gives_the_same_bits(folder):
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
def test_ranks_share_the_captions_exactly(ranks, folder):
    """7 captions: batches of 3 and 1 beside one of 3; two and one on four ranks."""
    alone = predicted(folder).values
    mp.start_processes(run_rank, args=(ranks, folder), nprocs=ranks, start_method="forkserver")
    shared = torch.load(folder / f"sums{ranks}.pt", weights_only=False)
    assert shared["pictures"] == alone["pictures"] == len(PROMPTS)
    for name in ("cosine", "feature_sums", "product_sums"):
        np.testing.assert_allclose(shared[name], alone[name], rtol=1e-12, atol=1e-12)


def test_more_ranks_than_captions(folder, monkeypatch):
    """A rank without captions has nothing to make, and adds nothing."""
    monkeypatch.setattr(Layout, "group", lambda self, *axes: None)
    evaluation = small_evaluation(folder, small_model(), Layout({"dp": 8}, 7, seed=SEED))
    evaluation.open_data(folder)
    assert evaluation.predict(weights_of(small_model())) is None
    assert not evaluation._sums.flat.any()


def test_nothing_waits_for_the_device_while_pictures_are_made(folder):
    model = small_model()
    evaluation = small_evaluation(folder, model)
    evaluation.warm_up()
    evaluation.open_data(folder)
    tokens, embeddings = evaluation._tokens_NT[:3], evaluation._embeddings_NE[:3]
    with evaluation._generator.sampler.evaluating(weights_of(model)), Capturable():
        evaluation._generator.begin()
        evaluation._add(evaluation._prompts_N[:3], tokens, embeddings, 2)


@pytest.mark.parametrize("prompts", [PROMPTS[:-1], [*PROMPTS, "one more"]])
def test_another_number_of_captions_is_an_error(folder, prompts):
    evaluation = small_evaluation(folder, small_model())
    with pytest.raises(DataError, match=f"{len(prompts)} captions to evaluate, where there must be 7"):
        evaluation.caption(prompts)


def test_statistics_of_another_network_are_an_error(folder, tmp_path):
    write_data(tmp_path, features=5)
    scorer = FidAndClip(read_reference, features(folder))
    with pytest.raises(DataError, match=f"statistics of 5 features in {tmp_path}, where .* has {features(folder)}"):
        scorer.open_data(tmp_path)


def reference_of_two(root):
    return FeatureStatistics(np.zeros(2), np.eye(2))


def sums(**changed):
    made = {"pictures": 3, "expected": 3, "cosine": 0.6, "feature_sums": np.ones(2), "product_sums": np.eye(2)}
    return Predictions(made | changed)


def test_bad_sums_are_errors(tmp_path):
    scorer = FidAndClip(reference_of_two, 2)
    scorer.open_data(tmp_path)
    assert scorer.score(sums())["CLIP"] == pytest.approx(0.2)
    with pytest.raises(RuntimeError, match="2 of 3 captions were evaluated"):
        scorer.score(sums(pictures=2))
    with pytest.raises(DataError, match="diverged"):
        scorer.score(sums(cosine=float("nan")))
    with pytest.raises(DataError, match="diverged"):
        scorer.score(sums(feature_sums=np.array([1.0, float("nan")])))


def test_networks_come_from_files_that_must_be_there(folder, tmp_path):
    own, cpu = small_config(), torch.device("cpu")
    with pytest.raises(ConfigError, match=r"assets_dir=null.*sd.ckpt, clip.bin and inception.pth"):
        published_networks(own, None, cpu, torch.float32)
    (tmp_path / own.assets.vocabulary).write_bytes((folder / own.assets.vocabulary).read_bytes())
    with pytest.raises(CheckpointError, match=r"sd\.ckpt"):
        published_networks(own, tmp_path, cpu, torch.float32)


def test_half_precision_makes_pictures_and_fp32_judges_them(folder):
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


def test_the_configuration_says_how_the_autoencoder_runs(folder):
    own, cpu = small_config(), torch.device("cpu")
    for asked, chosen in (("auto", "transposed_library"), ("reference", "reference")):
        model = replace(own.model, implementations={"upsampling": asked})
        networks = published_networks(replace(own, model=model), folder, cpu, torch.float32)
        assert f"implementation={chosen})" in repr(networks.vae)
    model = replace(own.model, implementations={"group_norm": "triton"})
    with pytest.raises(UnsupportedImplementation, match=r"model\.implementations\.group_norm=triton"):
        published_networks(replace(own, model=model), folder, cpu, torch.float32)


def test_rates_are_those_of_one_rank():
    assert rates(30000, {"latents": 6000.0, "CLIP": 60.0}, 8) == (
        "30,000 pictures on 8 ranks; pictures/s of one: latents 5.0, CLIP 500.0"
    )


def test_random_captions_differ_and_have_one_end():
    tokens = random_tokens(TEXT, ["", ""])
    assert (tokens == TEXT.vocabulary - 1).sum(1).tolist() == [1, 1]
    assert not torch.equal(tokens[0], tokens[1])
