"""Synthetic trajectories in the published layout: slabs of a metal with an adsorbate, and a pair potential.

A slab has square layers of atoms with the distance ``spacing``, shifted by half of it in every second layer, as the
(100) surface of a face-centred cubic metal has. All atoms are displaced at random; the lower half of the layers is
fixed. A pair of atoms at the distance r has Morse's energy, times a window that falls smoothly to 0 at the cutoff:

    D ((1 - exp(-A (r - R)))^2 - 1) (1 + cos(pi r / CUTOFF)) / 2

D and R of a pair are means of its two elements. So a force is a sum over the edges of a function of the distance and
the two elements. The reference energy is that of the slab without displacements.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from benchmarks.oc20.graph import CUTOFF, neighbours
from benchmarks.oc20.samples import SPLITS
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError
from common.formats import extxyz
from common.formats.extxyz import Frame
from common.formats.s2ef import COLUMNS, EXTXYZ

METALS, ADSORBATES = (13, 29, 47, 78), (1, 6, 8)
"""Atomic numbers."""
ELEMENTS = sorted((*METALS, *ADSORBATES))
DEPTHS, LENGTHS = (0.2, 0.6), (0.9, 1.1)
"""D in eV and R in spacings of the lightest and the heaviest element; both are linear in the element's rank."""
STEEPNESS = 1.2
"""A in 1 / angstrom."""
DISPLACEMENT = 0.04
"""Standard deviation of an atom's displacement along each axis, in spacings."""
VACUUM = 20.0
"""Height of the cell above the slab, in angstrom."""
FRAMES = 100
"""Structures per file."""


@dataclass(frozen=True)
class SyntheticSlabs(Options):
    """Options of ``generate``."""

    train: Annotated[int, Option("number of training structures", least=1)] = 2000
    eval: Annotated[int, Option("number of evaluation structures", least=1)] = 200
    columns: Annotated[tuple[int, int], Option("fewest and most atoms along an edge of a slab", least=1, most=8)] = 3, 6
    layers: Annotated[tuple[int, int], Option("fewest and most layers of a slab", least=1, most=8)] = 2, 5
    spacing: Annotated[float, Option("distance of neighbours in a slab in angstrom", least=2, most=5)] = 2.9
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("columns", "layers"):
            fewest, most = getattr(self, name)
            if fewest > most:
                raise ConfigError(f"--{name}={fewest} {most}: the fewest first")


def generate(raw_dir: Path, options: SyntheticSlabs = SyntheticSlabs(), workers: int = 1) -> str:
    """Write synthetic trajectories to ``raw_dir``, an empty or new folder, and mark it as synthetic.

    Returns:
        A summary for the user.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    counts = {"train": options.train, "eval": options.eval}
    plans = [(split, first, count) for split, count in counts.items() for first in range(0, count, FRAMES)]
    with synthetic.generated_folders(raw_dir, "slabs with a pair potential", options, SPLITS.values()) as folder:
        list(synthetic.drawn(functools.partial(_write, folder, options), plans, workers))
    return f"{options.train} structures to train and {options.eval} to evaluate"


def draw(options: SyntheticSlabs, random: np.random.Generator) -> tuple[Frame, NDArray[np.float64]]:
    """Return a random slab without energy and forces, and its positions (N, 3) without displacements."""
    width, depth = random.integers(*options.columns, 2, endpoint=True)
    layers = int(random.integers(*options.layers, endpoint=True))
    spacing, adsorbed = options.spacing, int(random.integers(1, 4))
    w, d, h = (axis.ravel() for axis in np.meshgrid(range(width), range(depth), range(layers), indexing="ij"))
    slab_N3 = np.stack([w + h % 2 / 2, d + h % 2 / 2, h], 1)
    above_N3 = random.uniform((0, 0, layers + 0.3), (width, depth, layers + 0.3))
    above_N3 = above_N3 + np.arange(adsorbed)[:, None] * (0.8, 0, 0.8)
    ideal_N3 = np.concatenate([slab_N3, above_N3]) * (spacing, spacing, spacing / np.sqrt(2))
    columns = {
        "species": np.append(np.full(len(h), random.choice(METALS)), random.choice(ADSORBATES, adsorbed)),
        "pos": ideal_N3 + random.normal(0, DISPLACEMENT * spacing, ideal_N3.shape),
        "move_mask": np.append(h >= layers // 2, np.full(adsorbed, True)),
        "tags": np.append(h == layers - 1, np.full(adsorbed, 2)),
    }
    cell_33 = np.diag([width * spacing, depth * spacing, ideal_N3[:, 2].max() + VACUUM])
    return Frame({"pbc": '"T T T"'}, cell_33, columns), ideal_N3


def potential(
    pos_N3: NDArray[np.float64], cell_33: NDArray[np.float64], number_N: NDArray[np.int64], spacing: float
) -> tuple[float, NDArray[np.float64]]:
    """Return the energy in eV and the forces (N, 3) in eV per angstrom, over the pairs of :func:`neighbours`."""
    (source, target), offset_E3 = neighbours(pos_N3, cell_33)
    vector_E3 = pos_N3[source] - pos_N3[target] + offset_E3 @ cell_33
    r = np.linalg.norm(vector_E3, axis=1)
    rank_N = np.searchsorted(ELEMENTS, number_N)
    depth_N, length_N = (np.linspace(*span, len(ELEMENTS))[rank_N] for span in (DEPTHS, LENGTHS))
    depth, length = ((each_N[source] + each_N[target]) / 2 for each_N in (depth_N, length_N))
    decay = np.exp(-STEEPNESS * (r - length * spacing))
    morse, slope = depth * ((1 - decay) ** 2 - 1), 2 * depth * STEEPNESS * (1 - decay) * decay
    window, fall = (1 + np.cos(np.pi * r / CUTOFF)) / 2, -np.sin(np.pi * r / CUTOFF) * np.pi / CUTOFF / 2
    pull_E3 = ((slope * window + morse * fall) / r)[:, None] * vector_E3  # a positive slope pulls the target to it
    force_N3 = np.zeros_like(pos_N3)
    np.add.at(force_N3, target, pull_E3 / 2)
    np.add.at(force_N3, source, -pull_E3 / 2)
    return float((morse * window).sum() / 2), force_N3


def _write(folder: Path, options: SyntheticSlabs, plan: tuple[str, int, int]) -> None:
    split, first, count = plan
    texts, systems = [], []
    for number in range(first, min(first + FRAMES, count)):
        frame, ideal_N3 = draw(options, np.random.default_rng((options.seed, list(SPLITS).index(split), number)))
        species = frame.columns["species"]
        energy, force_N3 = potential(frame.columns["pos"], frame.cell_33, species, options.spacing)
        reference, _ = potential(ideal_N3, frame.cell_33, species, options.spacing)
        frame.columns["forces"] = force_N3
        frame.properties["energy"] = f"{energy:.8f}"
        texts.append(extxyz.encode(frame, COLUMNS))
        systems.append(f"random{number},frame0,{reference:.8f}\n")
    name = folder / SPLITS[split] / f"{first // FRAMES:04d}"
    name.with_suffix(EXTXYZ).write_text("".join(texts), encoding="utf-8")
    name.with_suffix(".txt").write_text("".join(systems), encoding="utf-8")
