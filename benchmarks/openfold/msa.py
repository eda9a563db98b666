"""Features of a multiple sequence alignment: clusters, masked tokens, and extra rows.

For each pass, random rows are the centres of clusters, the first one being the query. All other rows belong to the
centre with which they agree in most positions. Some tokens of the centres are replaced, and the network predicts the
original ones. (Source: supplement of AlphaFold 2, section 1.2.)

Tokens are the indices of :data:`benchmarks.openfold.residues.RESTYPES`, then X, gap and mask.

Axes: R rows of the alignment; L residues of the chain; N residues of the crop; S clusters; E extra rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.openfold.residues import GAP, MASK, RESTYPES, UNKNOWN
from common.formats.alignments import Alignment

TOKENS = 23
"""Residue types: 20, unknown, gap and mask."""
FEATURES = 2 * TOKENS + 3
"""Channels of a cluster: token, has deletion, deletion value, profile, mean deletion value."""
MASKED = 0.15
"""Share of the centres' tokens that are replaced or predicted."""
UNIFORM, PROFILE, SAME = 0.1, 0.1, 0.1
"""Shares of these tokens that become a uniform amino acid, a token of the profile, or stay; the rest is masked."""
_PARENTS = {"B": "D", "J": "X", "O": "X", "U": "C", "Z": "E"}
"""Letters that stand for one of several amino acids, or for a rare one."""
_TINY = 1e-6
_BLOCK = 2048
"""Rows that are compared at a time, so that their bits fit into a cache."""


def _token_table() -> NDArray[np.uint8]:
    table = np.full(256, UNKNOWN, np.uint8)
    for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
        table[ord(letter)] = f"{RESTYPES}X".index(_PARENTS.get(letter, letter))
    table[ord("-")] = GAP
    return table


_TOKENS = _token_table()


def tokens_of(sequence: str) -> NDArray[np.uint8]:
    """Return the tokens of a sequence of one-letter codes."""
    return _TOKENS[np.frombuffer(sequence.encode("ascii"), np.uint8)]


@dataclass(frozen=True)
class Msa:
    """An alignment of a chain.

    Attributes:
        token_RL: uint8; the first row is the query.
        deletion_RL: int32, residues that are left out before each position.
        profile_LT: (L, 22) float32, share of each token in a column.
    """

    token_RL: NDArray[np.uint8]
    deletion_RL: NDArray[np.int32]
    profile_LT: NDArray[np.float32]


def join(alignments: Mapping[str, Alignment], sequence: str) -> Msa:
    """Return all rows of a chain's alignments in order, without copies of earlier rows; empty alignments are left out.

    Without any row, the chain itself is the only one.

    Args:
        alignments: by the names of their files.

    Raises:
        ValueError: an alignment has another number of columns than the chain has residues.
    """
    seen: set[bytes] = set()
    letters, deletions = [], []
    for name, alignment in alignments.items():
        if not len(alignment.letters):
            continue
        if alignment.letters.shape[1] != len(sequence):
            raise ValueError(
                f"{name} has {alignment.letters.shape[1]} columns, and its chain has {len(sequence)} residues"
            )
        kept = []
        for number, row in enumerate(alignment.letters):
            if (key := row.tobytes()) not in seen:
                seen.add(key)
                kept.append(number)
        letters.append(alignment.letters[kept])
        deletions.append(alignment.deletions[kept])
    if not letters:
        letters, deletions = (
            [np.frombuffer(sequence.encode("ascii"), np.uint8)[None]],
            [np.zeros((1, len(sequence)), np.int32)],
        )
    token_RL = _TOKENS[np.concatenate(letters)]
    rows, length = token_RL.shape
    flat = np.arange(length, dtype=np.int32) * (GAP + 1) + token_RL
    counts_LT = np.bincount(flat.ravel(), minlength=length * (GAP + 1)).reshape(length, GAP + 1)
    return Msa(token_RL, np.concatenate(deletions), (counts_LT / rows).astype(np.float32))


def masked(
    token_SL: NDArray[np.uint8], profile_LT: NDArray[np.float32], random: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return the tokens with some of them replaced, and where the network has to predict the original ones."""
    chosen_SL = random.random(token_SL.shape) < MASKED
    row, column = np.nonzero(chosen_SL)
    how = random.random(len(row))
    limits = np.cumsum([UNIFORM, PROFILE, SAME])
    cumulative_LT = np.cumsum(profile_LT, 1, dtype=np.float64)
    drawn = random.random(len(row)) * cumulative_LT[column, -1]
    of_profile = (cumulative_LT[column] <= drawn[:, None]).sum(1)
    uniform = random.integers(len(RESTYPES), size=len(row))
    changed_SL = token_SL.copy()
    changed_SL[row, column] = np.select(
        [how < limits[0], how < limits[1], how < limits[2]], [uniform, of_profile, token_SL[row, column]], MASK
    )
    return changed_SL, chosen_SL


class Planes:
    """Bits of the tokens of rows, with 64 positions of a row in a word, to count equal tokens of many rows.

    Args:
        token_RL: uint8, below 32.
    """

    BITS = 5

    def __init__(self, token_RL: NDArray[np.uint8]) -> None:
        rows, length = token_RL.shape
        padded_RL = np.zeros((rows, -(-length // 64) * 64), np.uint8)
        padded_RL[:, :length] = token_RL
        valid_RL = np.zeros(padded_RL.shape, np.bool_)
        valid_RL[:, :length] = token_RL < GAP
        planes = [np.packbits((padded_RL >> bit) & 1, axis=1).view(np.uint64) for bit in range(self.BITS)]
        self.bits_PRW = np.stack([*planes, np.packbits(valid_RL, axis=1).view(np.uint64)])

    def nearest(self, rows: NDArray[np.integer], centres: Planes) -> NDArray[np.int64]:
        """Return the centre with most equal tokens, except gaps and masks, of each row; the first of ties."""
        blocks = [self._nearest(rows[first : first + _BLOCK], centres) for first in range(0, len(rows), _BLOCK)]
        return np.concatenate([np.zeros(0, np.int64), *blocks])

    def _nearest(self, rows: NDArray[np.integer], centres: Planes) -> NDArray[np.int64]:
        *plane_RW, valid_RW = self.bits_PRW[:, rows]
        differing_RW, other_RW = np.empty_like(valid_RW), np.empty_like(valid_RW)
        best, found = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
        for centre in range(centres.bits_PRW.shape[1]):
            differing_RW[:] = 0
            for bits_RW, bits_W in zip(plane_RW, centres.bits_PRW[:-1, centre], strict=True):
                differing_RW |= np.bitwise_xor(bits_RW, bits_W, out=other_RW)
            agreeing = _ones(~differing_RW & valid_RW).sum(1, dtype=np.int64)
            better = agreeing > best
            best[better], found[better] = agreeing[better], centre
        return found


def _ones(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the number of bits that are set in each word. (Source: H. S. Warren, Hacker's Delight, section 5-1.)"""
    pairs = words - ((words >> np.uint64(1)) & np.uint64(0x5555555555555555))
    fours = (pairs & np.uint64(0x3333333333333333)) + ((pairs >> np.uint64(2)) & np.uint64(0x3333333333333333))
    eights = (fours + (fours >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (eights * np.uint64(0x0101010101010101)) >> np.uint64(56)


def deletion_value(deletions: NDArray[np.number]) -> NDArray[np.float32]:
    """Return numbers of deletions, scaled to [0, 1)."""
    return (np.arctan(deletions / np.float32(3)) * np.float32(2 / np.pi)).astype(np.float32)


class MsaFeatures:
    """Draws the features of an alignment.

    Args:
        window: residues of the crop.
        clusters, extra: largest numbers of clusters and of extra rows.
    """

    def __init__(self, msa: Msa, window: slice, clusters: int, extra: int) -> None:
        self._msa, self._window, self._clusters, self._extra = msa, window, clusters, extra
        self._planes = Planes(msa.token_RL)

    def draw(self, random: np.random.Generator) -> dict[str, NDArray[np.float32] | NDArray[np.uint8]]:
        """Return the features of one pass, cropped and without padding: (S, N, ...) and (E, N)."""
        msa, window = self._msa, self._window
        order = np.concatenate([[0], 1 + random.permutation(len(msa.token_RL) - 1)])
        centres, rest = order[: self._clusters], order[self._clusters :]
        changed_SL, chosen_SL = masked(msa.token_RL[centres], msa.profile_LT, random)
        cluster_R = self._planes.nearest(rest, Planes(changed_SL))
        token_SN = changed_SL[:, window]
        profile_SNT, mean_SN = self._summary(token_SN, centres, rest, cluster_R)
        deletion_SN = msa.deletion_RL[centres, window]
        feature_SNF = np.empty((*token_SN.shape, FEATURES), np.float32)
        feature_SNF[..., :TOKENS] = token_SN[..., None] == np.arange(TOKENS, dtype=np.uint8)
        feature_SNF[..., TOKENS] = deletion_SN > 0
        feature_SNF[..., TOKENS + 1] = deletion_value(deletion_SN)
        feature_SNF[..., TOKENS + 2 : -1] = profile_SNT
        feature_SNF[..., -1] = deletion_value(mean_SN)
        kept = rest[random.permutation(len(rest))[: self._extra]]
        extra_EN = msa.deletion_RL[kept, window]
        return {
            "msa_feat": feature_SNF,
            "msa_mask": np.ones(token_SN.shape, np.float32),
            "true_msa": msa.token_RL[centres, window],
            "bert_mask": chosen_SL[:, window].astype(np.float32),
            "extra_msa": msa.token_RL[kept, window],
            "extra_has_deletion": (extra_EN > 0).astype(np.float32),
            "extra_deletion_value": deletion_value(extra_EN),
            "extra_msa_mask": np.ones(extra_EN.shape, np.float32),
        }

    def _summary(
        self,
        token_SN: NDArray[np.uint8],
        centres: NDArray[np.int64],
        rest: NDArray[np.int64],
        cluster_R: NDArray[np.int64],
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the shares of tokens (S, N, 23) and the mean number of deletions (S, N) in each cluster."""
        msa, (clusters, length) = self._msa, token_SN.shape
        count_S = np.bincount(cluster_R, minlength=clusters) + 1 + _TINY
        place_N = np.arange(length, dtype=np.int32)
        flat = (cluster_R.astype(np.int32)[:, None] * length + place_N) * TOKENS + msa.token_RL[rest, self._window]
        sum_SNT = np.bincount(flat.ravel(), minlength=clusters * length * TOKENS).reshape(clusters, length, TOKENS)
        sum_SNT += token_SN[..., None] == np.arange(TOKENS, dtype=np.uint8)
        deletion_RN = msa.deletion_RL[rest, self._window]
        row, place = np.nonzero(deletion_RN)
        summed = np.bincount(cluster_R[row] * length + place, deletion_RN[row, place], clusters * length)
        mean_SN = (summed.reshape(clusters, length) + msa.deletion_RL[centres, self._window]) / count_S[:, None]
        return (sum_SNT / count_S[:, None, None]).astype(np.float32), mean_SN.astype(np.float32)
