"""A checkpoint of weights that are split over ``tp`` resumes on any number of ranks, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resharding_ranks import (
    HEADS,
    LAYOUTS,
    SAVED_AFTER,
    SHAPES,
    STEPS,
    WORDS,
    WORLD,
    Trainee,
    folder_of,
    parts,
    resumed,
    splits,
    trained,
    whole,
)
from resharding_ranks import run_rank as run
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.distributed.tensor_split import TensorSplit, without_padding
from common.errors import CheckpointError, ConfigError
from common.run import checkpoint
from common.run.checkpoint import Progress
from tests.conftest import flatten
from tests.gloo_ranks import on_ranks, results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder in which four ranks have saved and resumed in every layout."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    on_ranks(run, WORLD, folder)
    return str(folder)


def assert_equal_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("saved", LAYOUTS)
def test_only_the_first_rank_saves_model_and_optimizer(folder, saved):
    one = trained(Layout(seed=7), SAVED_AFTER)
    contents = [torch.load(folder_of(folder, saved) / f"rank_{r}.pt", weights_only=True) for r in range(WORLD)]
    wanted = {name: tensor for name, tensor in one.weights().items() if name != "base"}
    state = one.optimizer.state_dict()
    for tensors in (wanted, *(entries for entries in state.values() if isinstance(entries, dict))):
        assert tensors["words"].shape == (12, 3)
        assert torch.count_nonzero(tensors["words"][WORDS:]) == 0
        tensors["words"] = tensors["words"][:WORDS]
    assert_equal_bits(contents[0]["model"], wanted)
    assert_equal_bits(flatten(contents[0]["updaters"]), flatten([state]))
    assert [sorted(content.keys() & {"model", "updaters", "buffers"}) for content in contents[1:]] == [["buffers"]] * 3
    assert [sorted(content["buffers"]) for content in contents[1:]] == [["seen", "steps"]] * 3


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layout_resumes_as_one_uninterrupted_rank(folder, saved, name):
    uninterrupted = trained(Layout(seed=7), STEPS).weights()
    uninterrupted["words"] = uninterrupted["words"][:WORDS]
    for rank, found in enumerate(results(WORLD, Path(folder))):
        assert_equal_bits(found[f"{saved} to {name}"], parts(uninterrupted, Layout(LAYOUTS[name], rank)))


@pytest.mark.parametrize("saved", LAYOUTS)
def test_one_rank_resumes_every_layout(folder, saved):
    found = resumed(Layout(seed=7), folder_of(folder, saved))
    assert_equal_bits(found.weights(), trained(Layout(seed=7), STEPS).weights())


def test_a_tensor_of_another_shape_is_an_error(folder):
    trainee = Trainee(Layout())
    content = checkpoint.read(folder_of(folder, "tp2"), {}, Layout())
    wider = splits(Layout()) | {"output": TensorSplit.over_tp(Layout(), (5, 32), 1)}
    with pytest.raises(CheckpointError, match=r"another model: output has the shape \(5, 16\), \(5, 32\) are expected"):
        checkpoint.restore(content, trainee.model, (trainee.optimizer,), Layout(), base="digest", splits=wider)


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing", "'missing' is declared .* no such tensor"), ("norm", r"'norm' .* \(28, 6\); .* \(7,\)")],
)
def test_a_split_that_does_not_fit_the_model_is_an_error(tmp_path, name, words):
    split = TensorSplit.over_tp(Layout(), SHAPES["qkv"])
    with pytest.raises(ValueError, match=words):
        checkpoint.save(tmp_path, Progress(1), 7, {}, Trainee(Layout()).model, (), Layout(), splits={name: split})


class Shortened:
    """An updater that keeps one number of each row of a weight."""

    def materialize(self) -> None:
        """The model is always up to date."""

    def state_dict(self) -> dict:
        return {"factors": {"weight": torch.zeros(4)}}


def test_an_optimizer_state_of_another_shape_is_an_error(tmp_path):
    split = {"weight": TensorSplit.over_tp(Layout(), (4, 3))}
    model = nn.Linear(3, 4, bias=False)
    with pytest.raises(ValueError, match=r"'weight': \(4,\) where \(4, 3\) are split"):
        checkpoint.save(tmp_path, Progress(1), 7, {}, model, (Shortened(),), Layout(), splits=split)


def test_another_number_of_rows_without_padding_is_an_error(folder):
    more = splits(Layout()) | {"words": TensorSplit.over_tp(Layout(), (12, 3), kept=WORDS + 1)}
    content = checkpoint.read(folder_of(folder, "tp4"), {}, Layout())
    trainee = Trainee(Layout())
    with pytest.raises(CheckpointError, match=r"another model: words has the shape \(10, 3\), \(11, 3\) are expected"):
        checkpoint.restore(content, trainee.model, (trainee.optimizer,), Layout(), base="digest", splits=more)


@pytest.mark.parametrize("kept", [0, 5])
def test_an_impossible_number_of_kept_rows_is_an_error(kept):
    with pytest.raises(ValueError, match=f"{kept} rows of 4 cannot be kept"):
        TensorSplit.over_tp(Layout(), (4, 3), kept=kept)


def test_padding_is_added_and_removed():
    split = TensorSplit.over_tp(Layout({"tp": 2}, 1), (8, 3), kept=5)
    kept = torch.arange(1.0, 16.0).view(5, 3)
    full = split.padded(kept)
    assert torch.equal(full, torch.cat([kept, torch.zeros(3, 3)]))
    other = torch.ones(2)
    cut = without_padding({"words": full, "other": other}, {"words": split})
    assert torch.equal(cut["words"], kept)
    assert cut["other"] is other
    assert torch.equal(split.local_of(full), full[4:])


def test_each_section_is_split_over_the_ranks():
    split = TensorSplit.over_tp(Layout({"tp": 2}, 1), (28, 6), 0, HEADS)
    assert split.pieces == (((0, 8), (16, 18), (20, 24)), ((8, 16), (18, 20), (24, 28)))
    assert split.local_shape == (14, 6)
    full = whole("qkv", "any")
    assert torch.equal(split.local_of(full), full[[*range(8, 16), 18, 19, *range(24, 28)]])


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ((16, 6, 6), "layout.tp=4 does not divide 6"),
        ((16, 4, 4), "not all 28 rows"),
        ((16, 4, 4, 8), "not all 28 rows"),
    ],
)
def test_impossible_sections_are_an_error(sections, words):
    with pytest.raises((ValueError, ConfigError), match=words):
        TensorSplit.over_tp(Layout({"tp": 4}), (28, 6), 0, sections)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ((((0, 2),), ((2, 3),)), "not all 4 rows"),
        ((((0, 3),), ((2, 4),)), "not all 4 rows"),
        ((((0, 3),), ((3, 4),)), "different numbers of rows"),
    ],
)
def test_pieces_that_do_not_cover_all_rows_equally_are_an_error(pieces, words):
    with pytest.raises(ValueError, match=words):
        TensorSplit((4,), 0, pieces, 0)
