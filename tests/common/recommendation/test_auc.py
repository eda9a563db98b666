"""The area under the ROC curve against scikit-learn and hand-worked pairs."""

import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import roc_auc_score

from common.errors import DataError, SuiteError
from common.recommendation import auc
from common.recommendation.auc import PADDING, Ranking, gather_keys, rank, ranking_keys
from tests.capturable import Capturable
from tests.gloo_ranks import on_ranks

KINDS = ["random", "tied", "two_values", "all_equal", "perfect", "reversed", "saturated"]


def predictions(kind: str, count: int = 3000) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels."""
    generator = torch.Generator().manual_seed(len(kind))
    label_N = (torch.rand(count, generator=generator) < 0.2).float()
    noise_N = torch.randn(count, generator=generator)
    logit_N = {
        "random": noise_N + label_N,
        "tied": (2 * (noise_N + label_N)).round() / 2,
        "two_values": (noise_N + label_N > 0).float(),
        "all_equal": torch.full((count,), -1.25),
        "perfect": label_N + 0.1 * noise_N.sigmoid(),
        "reversed": -label_N,
        "saturated": 40.0 * noise_N + 40.0 * label_N,  # sigmoids of exactly 1 and near 0
    }[kind]
    return logit_N, label_N


def expected(logit_N: torch.Tensor, label_N: torch.Tensor) -> float:
    return float(roc_auc_score(label_N.numpy(), torch.sigmoid(logit_N).numpy()))


@pytest.mark.parametrize("chunk", [auc.CHUNK, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_the_area_is_that_of_scikit_learn(kind, chunk, monkeypatch):
    monkeypatch.setattr(auc, "CHUNK", chunk)
    logit_N, label_N = predictions(kind)
    assert rank(ranking_keys(logit_N, label_N)).area == pytest.approx(expected(logit_N, label_N), rel=0, abs=1e-14)


def test_pairs_are_counted_by_hand():
    # positives at 1 and 0, negatives at 0, -1: in order 1>0, 1>-1, 0>-1; tied 0=0
    keys = ranking_keys(torch.tensor([1.0, 0.0, 0.0, -1.0]), torch.tensor([1, 1, 0, 0]))
    assert rank(keys) == Ranking(2, 2, 2 * 3 + 1)
    assert rank(keys).area == 7 / 8


def test_pairs_are_counted_beyond_what_float32_and_int32_hold():
    count = 1 << 18
    label_N = torch.arange(count) % 2
    keys = ranking_keys(torch.zeros(count), label_N)
    assert rank(keys) == Ranking(count // 2, count // 2, (count // 2) ** 2)
    assert rank(ranking_keys(label_N.float(), label_N)).doubled_wins == 2 * (count // 2) ** 2


def test_order_of_samples_and_padding_change_nothing():
    logit_N, label_N = predictions("tied", 500)
    whole = rank(ranking_keys(logit_N, label_N))
    shuffled = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    garbage = torch.full((12,), float("nan"))
    padded = ranking_keys(torch.cat([logit_N[shuffled], garbage]), torch.cat([label_N[shuffled], garbage]), 500)
    assert padded[500:].tolist() == [PADDING] * 12
    assert rank(padded) == whole
    assert torch.equal(ranking_keys(logit_N, label_N, torch.tensor(499))[:499], ranking_keys(logit_N, label_N)[:499])


def test_half_predictions_are_widened_before_the_sigmoid():
    logit_N, label_N = predictions("random", 800)
    half_N = logit_N.half()
    assert rank(ranking_keys(half_N, label_N)).area == pytest.approx(expected(half_N.float(), label_N), abs=1e-14)


@pytest.mark.parametrize("value", [float("nan"), -float("nan")])
def test_a_prediction_that_is_no_number_is_an_error(value):
    logit_N, label_N = predictions("random", 100)
    logit_N[[3, 40]] = value
    with pytest.raises(SuiteError, match="2 of 100 predictions are not numbers"):
        rank(ranking_keys(logit_N, label_N))


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_label_alone_has_no_curve(label):
    with pytest.raises(DataError, match="no ROC curve"):
        _ = rank(ranking_keys(torch.randn(10), torch.full((10,), label))).area
    with pytest.raises(DataError, match="no ROC curve"):
        _ = rank(torch.full((4,), PADDING, dtype=torch.int32)).area


def test_keys_can_be_recorded_in_a_graph():
    logit_B, label_B, real = torch.randn(8), torch.ones(8), torch.tensor(5)
    with Capturable():
        ranking_keys(logit_B, label_B, real)


def gathered(number: int, world: int, folder: str) -> None:
    logit_N, label_N = predictions("tied", 1001)
    keys_N = torch.full((600,), PADDING, dtype=torch.int32)  # 501 samples on one rank, 500 on the other
    mine = slice(number, None, 2)
    keys_N[: len(logit_N[mine])] = ranking_keys(logit_N[mine], label_N[mine])
    every = gather_keys(keys_N, dist.group.WORLD)
    assert (every is None) == (number == 1)
    if every is not None:
        assert rank(every) == rank(ranking_keys(logit_N, label_N))
        assert rank(every).area == pytest.approx(expected(logit_N, label_N), rel=0, abs=1e-14)


def test_two_ranks_have_the_area_of_one(tmp_path):
    on_ranks(gathered, 2, tmp_path)
