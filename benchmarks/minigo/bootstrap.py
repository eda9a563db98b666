"""Bootstrap of MiniGo: the models and games that a run begins with, as raw and as prepared data.

MLPerf's starting checkpoint, with its games, and its target model are no longer published and cannot be rebuilt. Ours
are made with our own components, so results are not comparable with those of MLPerf.

Raw data are two models, in files as :mod:`benchmarks.minigo.models` writes them: ``start.safetensors`` plays the
bootstrap games, and ``target.safetensors`` is the opponent in evaluation. Synthetic raw data are untrained models of
any size; the marker of their folder has the :class:`BootstrapOptions`. All other raw data have the sizes of the rules.

Prepared data are the target, and ``games`` with a folder for each generation (:mod:`benchmarks.minigo.records`). The
start is in the assets folder, because training may read it before ``run_start``.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

from benchmarks.minigo.config import Facts
from benchmarks.minigo.data import START
from benchmarks.minigo.evaluate import TARGET
from benchmarks.minigo.model import MiniGo, MiniGoArchitecture
from benchmarks.minigo.models import write_model
from benchmarks.minigo.search import SearchSettings
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError, DataError
from common.mlperf.fixed import fixed_facts

READOUTS = 80
"""Visits of a search in bootstrap games, by the rules."""
RESIGN_HIGH = -0.99
"""Highest threshold of resignation in bootstrap games; the lowest is -1."""


@dataclass(frozen=True)
class BootstrapOptions(Options):
    """Options of ``generate``: sizes of the network and of the bootstrap games."""

    board: Annotated[int, Option("lines of the board", least=3, most=19)] = 5
    blocks: Annotated[int, Option("residual blocks of the network", least=1)] = 2
    width: Annotated[int, Option("channels of the network", least=1)] = 16
    value_hidden: Annotated[int, Option("outputs of the hidden layer of the value head", least=1)] = 16
    generations: Annotated[int, Option("generations of bootstrap games", least=1)] = 5
    games: Annotated[int, Option("games of a generation", least=1)] = 80
    readouts: Annotated[int, Option("visits of a search", least=2)] = 8
    virtual_losses: Annotated[int, Option("leaves of a game that are evaluated together", least=1)] = 2
    noise_alpha: Annotated[float, Option("parameter of the Dirichlet noise", least=1e-6)] = 0.3
    komi: Annotated[float, Option("points for white")] = 7.5
    seed: Annotated[int, Option(least=0)] = 0

    def architecture(self) -> MiniGoArchitecture:
        """Return the sizes of the network."""
        return MiniGoArchitecture(self.board, self.blocks, self.width, self.value_hidden)

    def settings(self) -> SearchSettings:
        """Return how bootstrap games are played: all moves are full, and nobody passes while there is another move."""
        return replace(
            fixed_facts(Facts, "minigo").search,
            board=self.board,
            komi=self.komi,
            readouts=self.readouts,
            fast_probability=0.0,
            virtual_losses=self.virtual_losses,
            noise_alpha=self.noise_alpha,
            resign_high=RESIGN_HIGH,
            target_pruning=False,
            allow_pass=False,
        )


def of_rules() -> BootstrapOptions:
    """Return the sizes of the rules."""
    facts = fixed_facts(Facts, "minigo")
    return BootstrapOptions(
        board=facts.search.board,
        blocks=facts.blocks,
        width=facts.width,
        value_hidden=facts.value_hidden,
        generations=facts.window,
        games=facts.games,
        readouts=READOUTS,
        virtual_losses=facts.search.virtual_losses,
        noise_alpha=facts.search.noise_alpha,
        komi=facts.search.komi,
    )


def untrained(options: BootstrapOptions) -> dict[str, torch.Tensor]:
    """Return the tensors of a network with initial weights, which the seed determines."""
    return MiniGo(options.architecture(), generator=torch.Generator().manual_seed(options.seed)).state_dict()


def generate(raw_dir: Path, options: BootstrapOptions = BootstrapOptions()) -> str:
    """Write an untrained network as start and target to ``raw_dir``, an empty or new folder, and mark it as synthetic.

    Returns:
        A summary for the user.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    with synthetic.generated_folders(raw_dir, "untrained networks", options, ()) as folder:
        write_model(folder / START, untrained(options), 0)
        shutil.copyfile(folder / START, folder / TARGET)
    return (
        f"an untrained network of {options.blocks} blocks and {options.width} channels for a "
        f"{options.board}x{options.board} board, as start and target"
    )


def options_of(description: dict[str, object]) -> BootstrapOptions:
    """Return the options in the marker of synthetic raw data.

    Raises:
        DataError: an option is missing or wrong.
    """
    values = {name: value for name, value in description.items() if name != "kind"}
    try:
        options = BootstrapOptions(**values)  # type: ignore[arg-type]
    except (ConfigError, TypeError) as error:
        raise DataError(f"{synthetic.MARKER} is damaged ({error}); generate the data again") from error
    if values != asdict(options):
        raise DataError(f"{synthetic.MARKER} lacks options; generate the data again")
    return options
