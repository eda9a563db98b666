"""A checkpoint of GPT-3 is whole: every number of ranks that share rows, layers or tables, or have others, goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resharding_gpt3_ranks import ONWARDS, SAVED_AFTER, STEPS, WORLD, Trainee, place_of, run_rank
from torch import Tensor

from common.errors import CheckpointError
from tests.conftest import flatten
from tests.gloo_ranks import on_ranks

TOLERANCE = 1e-10  # of float64 sums in another order


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """Where one rank has saved in the middle and at the end, and its metrics."""
    folder = tmp_path_factory.mktemp("gpt3")
    trainee = Trainee(0)
    metrics = trainee.train(0, SAVED_AFTER)
    trainee.save(folder / "one", SAVED_AFTER)
    metrics += trainee.train(SAVED_AFTER, STEPS)
    trainee.save(folder / "one", STEPS)
    return folder, metrics


@pytest.fixture(scope="module")
def ranks(one) -> list[dict[str, Any]]:
    """What four ranks found that have gone on in every layout from every other."""
    return on_ranks(run_rank, WORLD, one[0])


def state_of(place: Path) -> dict[str, Tensor]:
    """Weights, masters and moments of all stages."""
    found: dict[str, Tensor] = {}
    for path in sorted(place.glob("rank_*.pt")):
        content = torch.load(path, weights_only=True)
        if "model" in content:
            found |= flatten({"model": content["model"], "updaters": content["updaters"]})
    return {name: tensor.double() for name, tensor in found.items()}


@pytest.mark.parametrize(("written", "name"), ONWARDS)
def test_every_layout_goes_on_as_one_rank_that_never_stopped(one, ranks, written, name):
    folder, metrics = one
    found, wanted = (state_of(place_of(folder, run, STEPS)) for run in (f"{written} to {name}", "one"))
    assert found.keys() == wanted.keys()
    assert found["model.embedding.weight"].shape == (250, 32)
    for key, tensor in wanted.items():
        assert found[key].shape == tensor.shape, key
        assert float((found[key] - tensor).norm()) <= TOLERANCE * float(tensor.norm()) + 1e-15, key
    for rank in ranks:
        (last,) = rank[f"{written} to {name}"]
        assert {kind: last[kind] for kind in ("loss", "gradient_norm")} == {
            kind: pytest.approx(metrics[STEPS - 1][kind], rel=1e-6) for kind in ("loss", "gradient_norm")
        }


@pytest.mark.parametrize("name", ["tp4", "tp2 x pp2, 2 chunks"])
def test_one_rank_goes_on_too(one, ranks, name):
    folder, metrics = one
    trainee = Trainee(0)
    trainee.load(place_of(folder, name))
    (last,) = trainee.train(SAVED_AFTER, STEPS)
    assert last["loss"] == pytest.approx(metrics[STEPS - 1]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "benchmark.facts.layers=8",
            r'another model: Missing key.*"layers\.4\.attention_norm\.weight".* and \d+ more$',
        ),
        (
            "benchmark.facts.layers=2",
            r'another model: Unexpected key.*"layers\.2\.attention_norm\.weight".* and \d+ more$',
        ),
        (
            "benchmark.facts.vocabulary=251",
            r"another model: embedding\.weight has the shape \(250, 32\), \(251, 32\) are",
        ),
    ],
)
def test_a_checkpoint_of_another_network_is_one_error(one, override, words):
    with pytest.raises(CheckpointError, match=words):
        Trainee(0, override).load(place_of(one[0], "one"))


def test_stages_that_lack_nothing_refuse_another_depth_too(ranks):
    errors = {rank["deeper"] for rank in ranks}
    assert errors == {
        "the checkpoint is of another model: it lacks layers.4.attention_norm.bias and 47 more of its tensors"
    }
