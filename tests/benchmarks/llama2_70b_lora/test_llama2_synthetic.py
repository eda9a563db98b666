"""Test the synthetic data: a language of known entropy, a tokenizer, a base that knows another language."""

import json
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.llama2_70b_lora.base import BaseWeights
from benchmarks.llama2_70b_lora.prepare import prepare
from benchmarks.llama2_70b_lora.synthetic import FAVOURITE, SyntheticReports, generate, languages, next_token_losses
from common.errors import ConfigError
from common.language.lora import LoraSettings
from common.language.network import Decoder

SMALL = SyntheticReports(
    train=60, eval=7, row_length=64, vocabulary=400, words=12, classes=4, hidden=32, heads=2, kv_heads=1,
    feed_forward=64, steps=60,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    raw = tmp_path_factory.mktemp("synthetic") / "raw"
    generate(raw, SMALL)
    return raw


def test_the_entropy_is_that_of_the_walk():
    """Against the frequencies of pairs of words in a long text: H(pair) - H(word)."""
    language, _ = languages(4, 12, np.random.default_rng(1))
    words = language.text(200_000, np.random.default_rng(2)).split()

    def entropy(counted):
        total = sum(counted.values())
        return -sum(n / total * math.log(n / total) for n in counted.values())

    measured = entropy(Counter(pairwise(words))) - entropy(Counter(words[:-1]))
    assert measured == pytest.approx(language.entropy, abs=0.01)


def test_two_languages_have_the_same_words_and_other_favourites():
    one, other = languages(4, 12, np.random.default_rng(1))

    assert one.words == other.words
    assert len(set(one.words)) == 12
    assert (one.successors != other.successors).all()
    assert sorted(one.successors) == sorted(other.successors) == [0, 1, 2, 3]
    numbers = {word: number // 3 for number, word in enumerate(one.words)}
    walked = [numbers[word] for word in one.text(20_000, np.random.default_rng(3)).split()]
    kept = np.mean([one.successors[a] == b for a, b in pairwise(walked)])
    assert kept == pytest.approx(FAVOURITE, abs=0.01)


def test_the_synthetic_data_set_has_the_requested_rows(folder, tmp_path):
    made = prepare(folder, tmp_path / "data")

    assert made.synthetic
    assert {name: made.counts[name] for name in ("train_samples", "eval_samples", "row_length", "vocabulary")} == {
        "train_samples": 60, "eval_samples": 7, "row_length": 64, "vocabulary": 400,
    }  # fmt: skip
    assert made.counts["eval_scored_rows"] == 7
    assert (tmp_path / "data-assets" / "base" / "model.safetensors").samefile(folder / "base" / "model.safetensors")


def test_adapters_of_the_base_learn_the_other_language(folder, tmp_path):
    """At least 30 % of the gap between the base's loss and the entropy, by adapters alone."""
    prepare(folder, tmp_path / "data")
    request = json.loads((folder / "SYNTHETIC").read_text())["request"]
    train, evaluation, scored = (
        torch.from_numpy(np.load(tmp_path / "data" / f"{name}.npy")).long()
        for name in ("train_tokens", "eval_tokens", "eval_scored")
    )
    model = Decoder(SMALL.architecture, lora=LoraSettings(8, 16.0, 0.0))
    base = BaseWeights(tmp_path / "data-assets" / "base", SMALL.architecture)
    model.load_state_dict({name: weight.float() for name, weight in base.tensors()}, strict=False)
    model.initialise_adapters(lambda name: torch.Generator().manual_seed(len(name)))

    def loss():
        with torch.no_grad():
            losses, marks = next_token_losses(model, evaluation), scored[:, 1:]
        return float(((losses * marks).sum(1) / marks.sum(1)).mean())

    before = loss()
    assert before == pytest.approx(request["base_loss"], abs=1e-3)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, 1e-2)
    for step in range(60):
        rows = torch.arange(4 * step, 4 * step + 4) % len(train)
        optimizer.zero_grad()
        next_token_losses(model, train[rows]).mean().backward()
        optimizer.step()
    assert loss() < before - 0.3 * (before - request["entropy"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_length": 32}, "--row-length=32: at least 64"),
        ({"heads": 3}, "--heads=3 does not divide --hidden=64"),
        ({"vocabulary": 300}, "--vocabulary=300: at least 323"),
        ({"feed_forward": 0}, "--feed-forward=0: at least 1"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"words": 30}, "--words=30 in --classes=8"),
        ({"vocabulary": 340}, "too small for a piece for each of 64 words"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        generate(tmp_path / "raw", SyntheticReports(**changes))
    assert not (tmp_path / "raw").exists()
