"""Features of alignments against plain loops, and the statistics of the draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.openfold.msa import FEATURES, TOKENS, Msa, MsaFeatures, Planes, join, masked, tokens_of
from benchmarks.openfold.residues import GAP, MASK
from common.formats.alignments import Alignment, read_a3m

ROWS, LENGTH, CLUSTERS, EXTRA = 30, 70, 7, 12
WINDOW = slice(3, 68)


@pytest.fixture(scope="module")
def msa() -> Msa:
    random = np.random.default_rng(1)
    token = random.integers(0, 4, (ROWS, LENGTH)).astype(np.uint8)
    token[random.random(token.shape) < 0.2] = GAP
    deletion = (random.integers(1, 9, token.shape) * (random.random(token.shape) < 0.1)).astype(np.int32)
    profile = np.stack([(token == kind).mean(0) for kind in range(22)], 1).astype(np.float32)
    return Msa(token, deletion, profile)


def test_letters_become_tokens() -> None:
    assert tokens_of("ARNDCQEGHILKMFPSTWYVX-").tolist() == list(range(22))
    assert tokens_of("BJOUZ").tolist() == tokens_of("DXXCE").tolist()


def test_copies_of_earlier_rows_are_dropped_over_all_files() -> None:
    first = read_a3m(b">q\nMKT\n>a\nMaK-\n>b\nMK-\n")
    second = read_a3m(b">q\nMKT\n>c\nM-T\n>d\nmMKT\n")
    found = join(
        {"1": first, "2": Alignment(np.zeros((0, 0), np.uint8), np.zeros((0, 0), np.int32)), "3": second}, "MKT"
    )
    assert found.token_RL.tolist() == [tokens_of(row).tolist() for row in ("MKT", "MK-", "M-T")]
    assert found.deletion_RL.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    share = np.zeros((3, 22))
    share[0, tokens_of("M")] = 1
    share[1, [*tokens_of("K"), GAP]] = 2 / 3, 1 / 3
    share[2, [*tokens_of("T"), GAP]] = 2 / 3, 1 / 3
    assert np.allclose(found.profile_LT, share)


def test_without_rows_the_chain_is_its_alignment() -> None:
    assert join({}, "MKX").token_RL.tolist() == [tokens_of("MKX").tolist()]


def test_an_alignment_of_another_chain_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hits\.a3m has 3 columns, and its chain has 4 residues"):
        join({"hits.a3m": read_a3m(b">q\nMKT\n")}, "MKTA")


def test_the_nearest_centre_has_most_equal_tokens(msa: Msa) -> None:
    """Gaps and masks never agree; among equals the first centre counts."""
    centres = msa.token_RL[:CLUSTERS].copy()
    centres[2, ::2] = MASK
    centres[5] = centres[4]
    rows = np.arange(CLUSTERS, ROWS)
    expected = []
    for row in msa.token_RL[rows]:
        agreeing = [sum(a == b and a < GAP for a, b in zip(row, centre, strict=True)) for centre in centres]
        expected.append(agreeing.index(max(agreeing)))
    assert Planes(msa.token_RL).nearest(rows, Planes(centres)).tolist() == expected
    assert len(set(expected)) > 3


def test_features_of_a_pass_are_those_of_loops(msa: Msa) -> None:
    found = MsaFeatures(msa, WINDOW, CLUSTERS, EXTRA).draw(np.random.default_rng(5))
    feature, true = found["msa_feat"], found["true_msa"]
    assert feature.shape == (CLUSTERS, 65, FEATURES)
    rows = [row[WINDOW].tolist() for row in msa.token_RL]
    centres = [rows.index(row.tolist()) for row in true]
    assert centres[0] == 0
    assert len(set(centres)) == CLUSTERS
    assert centres != list(range(CLUSTERS))
    # A second pass with the same draws shows the whole centres, from which the clusters are computed.
    whole = MsaFeatures(msa, slice(0, LENGTH), CLUSTERS, EXTRA).draw(np.random.default_rng(5))
    changed = whole["msa_feat"][..., :TOKENS].argmax(-1)
    members: dict[int, list[int]] = {number: [] for number in range(CLUSTERS)}
    for row in set(range(ROWS)) - set(centres):
        agreeing = [sum(a == b and a < GAP for a, b in zip(msa.token_RL[row], c, strict=True)) for c in changed]
        members[agreeing.index(max(agreeing))].append(row)
    for number, centre in enumerate(centres):
        for place in range(65):
            at = WINDOW.start + place
            tokens = [changed[number, at], *(msa.token_RL[row, at] for row in members[number])]
            deletions = [int(msa.deletion_RL[row, at]) for row in (centre, *members[number])]
            expected = [float(token == changed[number, at]) for token in range(TOKENS)]
            expected += [float(deletions[0] > 0), 2 / math.pi * math.atan(deletions[0] / 3)]
            expected += [tokens.count(token) / len(tokens) for token in range(TOKENS)]
            expected += [2 / math.pi * math.atan(sum(deletions) / len(deletions) / 3)]
            assert feature[number, place] == pytest.approx(expected, abs=2e-6)
    assert set(zip(*np.nonzero(changed[:, WINDOW] != true), strict=True)) <= set(
        zip(*np.nonzero(found["bert_mask"]), strict=True)
    )
    extra = [rows.index(row.tolist()) for row in found["extra_msa"]]
    assert len(set(extra)) == EXTRA
    assert not set(extra) & set(centres)
    for number, row in enumerate(extra):
        deletions = msa.deletion_RL[row, WINDOW]
        assert found["extra_has_deletion"][number].tolist() == (deletions > 0).tolist()
        assert found["extra_deletion_value"][number] == pytest.approx(2 / np.pi * np.arctan(deletions / 3), abs=1e-6)


def test_few_rows_leave_clusters_and_extra_rows_out(msa: Msa) -> None:
    small = Msa(msa.token_RL[:3], msa.deletion_RL[:3], msa.profile_LT)
    found = MsaFeatures(small, WINDOW, CLUSTERS, EXTRA).draw(np.random.default_rng(5))
    assert found["msa_feat"].shape == (3, 65, FEATURES)
    assert found["extra_msa"].shape == (0, 65)


def test_shares_of_masked_tokens() -> None:
    """Of 15 %: 70 % are masked, 10 % uniform, 10 % of the profile, 10 % the same; within five standard deviations."""
    tokens = np.zeros((200, 1000), np.uint8)
    profile = np.zeros((1000, 22), np.float32)
    profile[:, [5, GAP]] = 0.25, 0.75
    changed, chosen = masked(tokens, profile, np.random.default_rng(2))
    count = chosen.sum()
    assert count / tokens.size == pytest.approx(0.15, abs=0.004)
    assert not changed[~chosen].any()
    share = np.bincount(changed[chosen], minlength=TOKENS) / count
    expected = np.full(TOKENS, 0.005)
    expected[[5, GAP, MASK, 20]] = 0.005 + 0.025, 0.075, 0.7, 0
    expected[0] = 0.005 + 0.1
    assert share == pytest.approx(expected, abs=0.014)
    assert share[[1, 2, 3, 4]] == pytest.approx(0.005, abs=0.0021)
    assert share[20] == 0
