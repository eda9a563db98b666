"""Features of a chain, from its prepared files: :mod:`benchmarks.openfold.features` describes them.

Processes of the reader import this module, which does not need PyTorch.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.openfold.msa import MsaFeatures, join, tokens_of
from benchmarks.openfold.samples import FILES, HITS, MSAS, Structures, read_alignments
from benchmarks.openfold.templates import Template, TemplateSearch, kalign
from common.errors import DataError
from common.formats.alignments import Hit, read_a3m, read_hhr

CLAMPED = 0.9
"""Probability of a clamped FAPE of the backbone."""
_CROP, _TEMPLATES, _HITS = 1 << 63, (1 << 63) + 1, (1 << 63) + 2
"""Second parts of the keys of generators; the first part is the seed of a sample. The MSA of pass i has the part i."""
Features = dict[str, NDArray[Any]]
Content = TypeVar("Content")
Parsed = TypeVar("Parsed")


class Made(NamedTuple):
    """A batch.

    Attributes:
        features: stacked along a new first axis.
        left_out: for each template hit that could not be realigned, its name and the reason.
    """

    features: Features
    left_out: list[str]


class Sizes(NamedTuple):
    """Sizes of the features.

    Attributes:
        residues: length to which chains are cropped or padded; None for whole chains.
        multiple: whole chains are padded to a multiple of this length.
        passes: number of passes. Each pass has other draws from the MSA.
    """

    residues: int | None
    multiple: int
    clusters: int
    extra: int
    templates: int
    passes: int


class Sample(NamedTuple):
    """A chain to make features of.

    Attributes:
        day: release date, as its ordinal.
        database, spans: number of a database, and start and size in it of each of
            :data:`benchmarks.openfold.samples.FILES`; missing files are empty.
        seed: seed of the draws, in [0, 2**63).
    """

    pdb_id: str
    author: str
    day: int
    database: int
    spans: Sequence[tuple[int, int]]
    seed: int


@dataclass
class Pipeline:
    """Makes batches of features; processes receive a copy.

    Attributes:
        training: crop, and draw from the templates and their number.
        released: release date of each structure, as its ordinal.
        chains: names of all chains, ``<structure>_<author chain>``.
        obsolete: successors of superseded structures.
        kalign: the program that realigns templates; None leaves out those that need it.
    """

    root: Path
    sizes: Sizes
    training: bool
    released: Mapping[str, int]
    chains: Collection[str]
    obsolete: Mapping[str, str]
    kalign: str | None
    _search: TemplateSearch | None = field(default=None, init=False)
    _structures: Structures | None = field(default=None, init=False)

    def __call__(self, samples: Sequence[Sample]) -> Made:
        """Return the features of the samples.

        Raises:
            DataError: a file of a chain is missing or damaged; the message has its name.
        """
        made = [self.features(sample) for sample in samples]
        assert self._search is not None
        left_out, self._search.left_out = self._search.left_out, []
        return Made({name: np.stack([features[name] for features in made]) for name in made[0]}, left_out)

    def features(self, sample: Sample) -> Features:
        """Return the features of a chain."""
        if self._structures is None:
            self._structures = Structures(self.root)
            aligner = None if self.kalign is None else kalign(self.kalign)
            self._search = TemplateSearch(self._structures, self.released, self.chains, self.obsolete, aligner)
        sequence, position_L373, mask_L37, resolution = self._structures.chain(sample.pdb_id, sample.author)
        contents = dict(zip(FILES, read_alignments(self.root, sample.database, sample.spans), strict=True))
        try:
            msa = join({name: _parsed(name, read_a3m, contents[name]) for name in MSAS}, sequence)
            hits = _parsed(HITS, read_hhr, contents[HITS].decode("ascii", "replace"))
        except ValueError as error:
            raise DataError(
                f"{self.root}: chain {sample.pdb_id}_{sample.author}: {error}; prepare the data again"
            ) from error
        length, sizes = len(sequence), self.sizes
        window = slice(0, length)
        if sizes.residues is not None and length > sizes.residues:
            first = int(_generator(sample.seed, _CROP).integers(length - sizes.residues, endpoint=True))
            window = slice(first, first + sizes.residues)
        drawn = MsaFeatures(msa, window, sizes.clusters, sizes.extra)
        passes = [drawn.draw(_generator(sample.seed, number)) for number in range(sizes.passes)]
        residues = sizes.residues or -(-length // sizes.multiple) * sizes.multiple
        rows = {"extra": sizes.extra}
        found: Features = {
            name: _padded(
                np.stack([each[name] for each in passes]), 1, rows.get(name.partition("_")[0], sizes.clusters), residues
            )
            for name in passes[0]
        }
        found |= self._templates(sample, sequence, hits, window, residues)
        aatype_L = tokens_of(sequence).astype(np.int64)
        existing = np.ones(window.stop - window.start, np.float32)
        found |= {
            "aatype": _extended(aatype_L[window], residues, 20),
            "residue_index": _extended(np.arange(length)[window], residues),
            "seq_mask": _extended(existing, residues),
            "all_atom_positions": _extended(position_L373[window], residues),
            "all_atom_mask": _extended(mask_L37[window].astype(np.float32), residues),
            "resolution": np.array(resolution or 0, np.float32),
            "use_clamped_fape": np.array(python_random.Random(sample.seed).random() < CLAMPED, np.float32),
            "seq_length": np.array(length, np.float32),
            "samples": np.array(1, np.float32),
        }
        return found

    def _templates(self, sample: Sample, sequence: str, hits: Sequence[Hit], window: slice, residues: int) -> Features:
        assert self._search is not None
        most = self.sizes.templates
        draw = _generator(sample.seed, _HITS) if self.training else None
        found: list[Template] = self._search.find(hits, sequence, sample.pdb_id, sample.day, most, draw)
        if self.training:
            random = _generator(sample.seed, _TEMPLATES)
            first = int(random.integers(len(found), endpoint=True))
            found = [found[index] for index in random.permutation(len(found))[first:]]
        token_TN = np.zeros((most, residues), np.int64)
        position_TN373, mask_TN37 = (
            np.zeros((most, residues, 37, 3), np.float32),
            np.zeros((most, residues, 37), np.float32),
        )
        previous_T373, previous_mask_T37 = np.zeros((most, 37, 3), np.float32), np.zeros((most, 37), np.float32)
        length = window.stop - window.start
        for number, template in enumerate(found):
            if window.start:
                previous_T373[number] = template.position_L373[window.start - 1]
                previous_mask_T37[number] = template.mask_L37[window.start - 1]
            token_TN[number, :length] = template.token_L[window]
            position_TN373[number, :length] = template.position_L373[window]
            mask_TN37[number, :length] = template.mask_L37[window]
        return {
            "template_aatype": token_TN,
            "template_all_atom_positions": position_TN373,
            "template_all_atom_mask": mask_TN37,
            "template_previous_positions": previous_T373,
            "template_previous_mask": previous_mask_T37,
            "template_mask": (np.arange(most) < len(found)).astype(np.float32),
        }


def _parsed(name: str, parse: Callable[[Content], Parsed], content: Content) -> Parsed:
    """Return the parsed content of a file; errors have its name."""
    try:
        return parse(content)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _generator(seed: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number])))


def _padded(array: NDArray[Any], axis: int, rows: int, residues: int) -> NDArray[Any]:
    """Return an array with ``rows`` and ``residues`` along ``axis`` and the next one, filled up with zeros."""
    shape = (*array.shape[:axis], rows, residues, *array.shape[axis + 2 :])
    padded = np.zeros(shape, array.dtype)
    padded[(slice(None),) * axis + tuple(slice(size) for size in array.shape[axis : axis + 2])] = array
    return padded


def _extended(array: NDArray[Any], residues: int, value: int = 0) -> NDArray[Any]:
    """Return an array with ``residues`` along its first axis, filled up with ``value``."""
    extended = np.full((residues, *array.shape[1:]), value, array.dtype)
    extended[: len(array)] = array
    return extended
