"""Templates of a chain: structures of similar chains, which HHsearch found, placed at the chain's residues.

The rows of HHsearch have the sequence of a hit as its database knows it. If no sequence of the structure contains it,
where X stands for any residue, Kalign aligns it to the chain of the hit, or, without Kalign, the hit is left out.
(Source: supplement of AlphaFold 2, section 1.2.3.)

Axes: L residues of the chain; T templates.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.openfold.msa import tokens_of
from benchmarks.openfold.residues import CA, GAP
from benchmarks.openfold.samples import Structures
from benchmarks.openfold.structures import unpack_atoms
from common.errors import DataError
from common.formats.alignments import Hit

DAYS = 60
"""A template was released more than these days before the chain."""
LEAST_SHARE, COPY_SHARE, LEAST_LENGTH = 0.1, 0.95, 10
"""Least aligned share of the chain; largest length of a part of the chain, as a share; least length of a hit."""
LEAST_EQUAL = 0.9
"""Least share of equal residues when a hit is realigned to its structure."""
MOST_DISTANCE = 150.0
"""Largest distance in angstrom of the CA atoms of neighbours."""
LEAST_ATOMS = 5
BEST = 20
"""Number of hits that training shuffles."""
_KALIGN_SECONDS = 60
Aligner = Callable[[str, str], tuple[str, str]]
"""Returns the aligned rows of two sequences, or raises :class:`AlignmentError`."""


class AlignmentError(Exception):
    """Two sequences could not be aligned."""


@dataclass(frozen=True)
class Template:
    """A template at the chain's residues.

    Attributes:
        token_L: uint8, gap where nothing is aligned.
        position_L373: float32, in angstrom, relative to the mean of the known atoms of the template's chain; zero for
            unknown atoms.
        mask_L37: float32, 1 for known atoms.
    """

    token_L: NDArray[np.uint8]
    position_L373: NDArray[np.float32]
    mask_L37: NDArray[np.float32]


def admitted(
    hit: Hit, sequence: str, pdb_id: str, day: int, released: Mapping[str, int], chains: Collection[str]
) -> bool:
    """Return whether a hit can be a template.

    Args:
        sequence, pdb_id: sequence and identifier of the chain.
        day: release date of the chain, as its ordinal.
        released: release date of each known structure, as its ordinal.
        chains: names of all known chains, ``<structure>_<author chain>``.
    """
    found, _, chain = hit.name.partition("_")
    found = found.lower()
    template = hit.template.replace("-", "")
    if found == pdb_id or f"{found}_{chain}" not in chains or len(template) < LEAST_LENGTH:
        return False
    if released[found] >= day - DAYS or hit.aligned <= LEAST_SHARE * len(sequence):
        return False
    return not (template in sequence and len(template) > COPY_SHARE * len(sequence))


class TemplateSearch:
    """Makes templates of hits.

    Args:
        structures: all structures.
        released: release date of each of them, as its ordinal.
        chains: names of their chains, ``<structure>_<author chain>``.
        obsolete: successors of superseded structures.
        align: realigns hits to their structures; None leaves out hits that need it.

    Attributes:
        left_out: for each hit that could not be realigned, its name and the reason; the caller may clear the list.
    """

    def __init__(
        self,
        structures: Structures,
        released: Mapping[str, int],
        chains: Collection[str],
        obsolete: Mapping[str, str],
        align: Aligner | None,
    ) -> None:
        self._structures, self._released, self._chains = structures, released, chains
        self._obsolete, self._align = obsolete, align
        self.left_out: list[str] = []

    def find(
        self,
        hits: Sequence[Hit],
        sequence: str,
        pdb_id: str,
        day: int,
        most: int,
        random: np.random.Generator | None = None,
    ) -> list[Template]:
        """Return up to ``most`` templates of a chain.

        Args:
            random: shuffles the :data:`BEST` hits with the highest scores. All other hits come after them, in the order
                of their scores. None does not shuffle.
        """
        renamed = [self._renamed(hit) for hit in hits]
        chosen = [hit for hit in renamed if admitted(hit, sequence, pdb_id, day, self._released, self._chains)]
        chosen.sort(key=lambda hit: -hit.sum_probs)
        if random is not None:
            chosen = [chosen[index] for index in random.permutation(min(BEST, len(chosen)))] + chosen[BEST:]
        found = (template for hit in chosen if (template := self._template(hit, len(sequence))) is not None)
        return [template for template, _ in zip(found, range(most), strict=False)]

    def _renamed(self, hit: Hit) -> Hit:
        """Return a hit with the name of its structure's successor, if it is superseded."""
        pdb_id, _, chain = hit.name.partition("_")
        successor = self._obsolete.get(pdb_id.lower())
        if successor is None or pdb_id.lower() in self._released:
            return hit
        return replace(hit, name=f"{successor}_{chain}")

    def _template(self, hit: Hit, length: int) -> Template | None:
        """Return the template of a hit; None if its structure does not have the hit's residues.

        Columns beyond the chain's ``length`` are left out.
        """
        pdb_id, _, chain = hit.name.partition("_")
        entry = self._structures.find(pdb_id.lower())
        wanted = hit.template.replace("-", "")
        aligned = (hit.query_index >= 0) & (hit.query_index < length) & (hit.template_index >= 0)
        query_index = hit.query_index[aligned]
        own_index = hit.template_index[aligned] - hit.template_index[hit.template_index >= 0][0]
        try:
            place: NDArray[np.int64] | None = None
            if (found := _matched(entry["sequences"], chain, wanted)) is not None:
                author, first = found
                letters, place = wanted, np.arange(first, first + len(wanted))
            elif self._align is not None:
                author, actual = chain, entry["sequences"][chain]
                if (place := realigned(wanted, actual, self._align)) is not None:
                    letters = "".join(actual[index] for index in place)  # any letter at a gap, which is left out below
            if place is None:
                return None
            tokens = tokens_of(letters)[own_index]
            return _placed(tokens, *unpack_atoms(entry, author), query_index, place[own_index], length)
        except AlignmentError as error:
            self.left_out.append(f"{hit.name}: {error}")
            return None
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise DataError(f"structure {pdb_id}: {type(error).__name__}: {error}; prepare the data again") from error


def _matched(sequences: Mapping[str, str], chain: str, wanted: str) -> tuple[str, int] | None:
    """Return the chain that has the residues of a hit, and the index of the first one; None if no chain has them.

    The chain that the hit names is preferred to others, and equal residues to matches of X with any residue.
    """
    for author in (chain, *sequences):
        if (first := sequences[author].find(wanted)) >= 0:
            return author, first
    pattern = re.compile("".join("." if letter == "X" else f"[{letter}X]" for letter in wanted))
    for author, sequence in sequences.items():
        if (match := pattern.search(sequence)) is not None:
            return author, match.start()
    return None


def realigned(wanted: str, actual: str, align: Aligner) -> NDArray[np.int64] | None:
    """Return the index in ``actual`` of each residue of ``wanted``, -1 for a gap; None if too few are equal."""
    rows = [np.frombuffer(row.encode("ascii"), np.uint8) for row in align(wanted, actual)]
    letter = [row != ord("-") for row in rows]
    equal = int(((rows[0] == rows[1]) & letter[0] & letter[1]).sum())
    if equal < LEAST_EQUAL * min(len(wanted), len(actual)):
        return None
    index = np.where(letter[1], np.cumsum(letter[1]) - 1, -1)
    return index[letter[0]]


def _placed(
    tokens: NDArray[np.uint8],
    position_A373: NDArray[np.float32],
    mask_A37: NDArray[np.bool_],
    query_index: NDArray[np.int64],
    own_index: NDArray[np.int64],
    length: int,
) -> Template | None:
    """Return the template whose residues ``own_index`` are at ``query_index``; None without enough atoms.

    Args:
        tokens: residue types at ``own_index``, which is -1 for missing residues.
        position_A373, mask_A37: positions and mask of the template's chain.
        length: length of the chain that the template is for.
    """
    exists = (own_index >= 0) & (query_index < length)
    tokens, query_index, own_index = tokens[exists], query_index[exists], own_index[exists]
    if mask_A37[own_index].sum() < LEAST_ATOMS:
        return None
    both = mask_A37[1:, CA] & mask_A37[:-1, CA]
    if (np.linalg.norm(np.diff(position_A373[:, CA], axis=0), axis=1)[both] > MOST_DISTANCE).any():
        return None
    centred_A373 = (position_A373 - position_A373[mask_A37].mean(0, np.float64)) * mask_A37[..., None]
    token_L = np.full(length, GAP, np.uint8)
    position_L373, mask_L37 = np.zeros((length, 37, 3), np.float32), np.zeros((length, 37), np.float32)
    token_L[query_index] = tokens
    position_L373[query_index], mask_L37[query_index] = centred_A373[own_index], mask_A37[own_index]
    return Template(token_L, position_L373, mask_L37)


def kalign(program: str) -> Aligner:
    """Return a function that aligns two sequences with Kalign 3.

    Raises:
        AlignmentError: by the function, if the program fails, or its output is no alignment of both sequences.
    """

    def align(first: str, second: str) -> tuple[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            given, made = Path(folder, "given.fasta"), Path(folder, "made.fasta")
            given.write_text(f">0\n{first}\n>1\n{second}\n", encoding="ascii")
            command = [program, "-i", str(given), "-o", str(made), "-f", "fasta"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_KALIGN_SECONDS, check=False)
                if done.returncode:
                    raise AlignmentError(f"{program} failed with the exit code {done.returncode}: {done.stderr[-500:]}")
                rows = made.read_text(encoding="ascii").split(">")[1:]
            except (OSError, UnicodeDecodeError, subprocess.TimeoutExpired) as error:
                raise AlignmentError(f"{program}: {error}") from error
        found = {row.partition("\n")[0].strip(): "".join(row.split("\n")[1:]).strip() for row in rows}
        aligned = found.get("0", ""), found.get("1", "")
        if tuple(row.replace("-", "") for row in aligned) != (first, second) or len(aligned[0]) != len(aligned[1]):
            raise AlignmentError(f"{program} did not align two sequences")
        return aligned

    return align
