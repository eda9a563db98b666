"""The area under the ROC curve on a GPU: against scikit-learn, and at the size of half a day of Criteo."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from common.recommendation.auc import CHUNK, rank, ranking_keys

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CRITEO = 89_137_319


def made_keys(samples):
    """Keys of random predictions with 3 % of positive labels, as in Criteo's data."""
    keys = torch.empty(samples, dtype=torch.int32, device="cuda")
    for part in keys.split(CHUNK):
        labels = torch.rand(len(part), device="cuda") < 0.03
        part.copy_(ranking_keys(torch.randn(len(part), device="cuda") + 1.2 * labels - 3.5, labels))
    return keys


def test_the_area_is_that_of_scikit_learn():
    keys = made_keys(3_000_000)
    found = rank(keys).area
    host = keys.cpu()
    expected = roc_auc_score((host & 1).numpy(), (host >> 1).view(torch.float32).numpy())
    assert found == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("logit", [0.0, -3.5])
def test_half_a_day_of_ties_is_counted_exactly(logit):
    labels = torch.arange(CRITEO, device="cuda") % 32 == 0
    found = rank(ranking_keys(torch.full((CRITEO,), logit, device="cuda"), labels))
    positives = -(-CRITEO // 32)
    assert (found.positives, found.negatives) == (positives, CRITEO - positives)
    assert found.doubled_wins == positives * (CRITEO - positives)


def test_the_sort_keeps_to_its_memory():
    keys = made_keys(CRITEO)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rank(keys)
    assert torch.cuda.max_memory_allocated() - before < 33 * CRITEO


def test_keys_are_recorded_in_a_graph():
    logits, labels = torch.randn(4096, device="cuda"), torch.randint(2, (4096,), device="cuda")
    count = torch.full((), 4096, dtype=torch.int64, device="cuda")
    ranking_keys(logits, labels, count)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keys = ranking_keys(logits, labels, count)
    logits.normal_()
    count.fill_(1000)
    graph.replay()
    assert torch.equal(keys, ranking_keys(logits, labels, 1000))
