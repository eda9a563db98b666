"""Records of self-play: files of finished games, and the training examples of a generation.

A generation is a folder with the games that one model has played. Each file in it, a shard, holds several games as
safetensors. ``first`` (G + 1,) int64 is the first record of each game, and the number of all records. ``pi`` (R, A)
fp32, ``bits`` (R, K) uint8 and ``outcome`` (R,) int8 are the records of all games in order. ``digest`` (4,) uint8 is
the CRC-32 of these tensors, so that a damaged file is found. Files appear only when they are complete.

Training on generation n draws examples from the newest generations: a fixed number of games from each, and every record
of these with a fixed probability. The examples and their order are a function of the files, the seed and n.

Shapes: G games, R records (positions with a search of full size), K bytes of packed planes, A moves.
"""

from __future__ import annotations

import os
import resource
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.minigo.features import SYMMETRIES, feature_bytes
from common.data import manifest
from common.data.atomic import write_text, written
from common.data.order import sample_generator
from common.distributed.shared_folder import appeared
from common.errors import CheckpointError, DataError
from common.formats.safetensors_file import write_tensors
from common.untrusted.regular_file import open_file, read_text
from common.untrusted.safetensors_header import TensorLocation, read_header

SUFFIX = ".safetensors"
CLOSED = "closed.txt"
"""File in the folder of a generation with the names of the shards that training uses."""
MOST_FILES = 1 << 16
"""Open files for which a process raises its limit, if it may."""
PLAY_AGAIN = "delete the file, and its games are played again"
PREPARE_AGAIN = (
    f"delete the file and {manifest.NAME} of these data, and prepare them again, which keeps all other games"
)
"""Remedies for a damaged file of a run whose generation is not closed, and of the bootstrap."""
DTYPES = {"first": ("I64", np.int64), "pi": ("F32", np.float32), "bits": ("U8", np.uint8), "outcome": ("I8", np.int8)}
"""Names of the tensors that the digest covers, in its order, with their dtypes in the file and in NumPy.

Larger elements come first, so that all of them are aligned.
"""


class Game(Protocol):
    """A finished game.

    Attributes:
        bits: packed planes of each record, (R, K) uint8.
        pi: distribution over the moves that the search found, (R, A) fp32.
        outcome: 1 if black won, else -1.
    """

    @property
    def bits(self) -> NDArray[np.uint8]: ...

    @property
    def pi(self) -> NDArray[np.float32]: ...

    @property
    def outcome(self) -> float: ...


def write_games(path: Path, games: Sequence[Game]) -> None:
    """Write finished games as one new shard, atomically.

    Raises:
        DataError: there is a file of this name, the disk is full, or the folder cannot be written to.
    """
    counts = [len(game.bits) for game in games]
    tensors: dict[str, NDArray[Any]] = {
        "first": np.cumsum([0, *counts], dtype=np.int64),
        "pi": np.concatenate([game.pi for game in games]),
        "bits": np.concatenate([game.bits for game in games]),
        "outcome": np.repeat(np.array([game.outcome for game in games], np.int8), counts),
    }
    tensors["digest"] = _digest(tensors)
    try:
        with written(path) as partial:
            # Two processes that write the same name would exchange their bytes, and the rename would replace a shard.
            try:
                partial.touch(exist_ok=False)
            except FileExistsError as error:
                raise _used(partial) from error
            if path.exists():
                partial.unlink()
                raise _used(path)
            write_tensors(partial, {name: torch.from_numpy(array) for name, array in tensors.items()}, {})
    except OSError as error:
        raise DataError(
            f"{path}: the games cannot be written ({error.strerror}); free some space and resume"
        ) from error


def _used(path: Path) -> DataError:
    return DataError(f"{path} exists already: end other processes that play below this folder, and start again")


def _digest(tensors: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Return the CRC-32 of the tensors in :data:`DTYPES` as 4 bytes, little-endian."""
    value = 0
    for name in DTYPES:
        value = zlib.crc32(np.ascontiguousarray(tensors[name]).data, value)
    return np.frombuffer(value.to_bytes(4, "little"), np.uint8).copy()


def _copy_back(generation: int) -> str:
    """Return the remedy for a damaged file of a closed generation, whose games are not played again."""
    return f"copy it back, or resume from a checkpoint before generation {generation}"


@dataclass(frozen=True)
class Shard:
    """A checked shard. Its tensors are views of one memory map of the file, which keeps one file descriptor open.

    Attributes:
        bits_RK, pi_RA, outcome_R: the records of all games.
        first_G: first record of each game, and the number of all records; G + 1 entries.
    """

    path: Path
    bits_RK: NDArray[np.uint8]
    pi_RA: NDArray[np.float32]
    outcome_R: NDArray[np.int8]
    first_G: NDArray[np.int64]

    @property
    def games(self) -> int:
        """Number of games."""
        return len(self.first_G) - 1

    @classmethod
    def checked(cls, path: Path, board: int, remedy: str = PLAY_AGAIN) -> Shard:
        """Open a shard of games on a board of ``board`` lines, and check all of its bytes.

        Args:
            remedy: advice to the user for a damaged file.

        Raises:
            DataError: the file is missing, truncated, damaged, or of another board, or cannot be opened.
        """
        try:
            with open_file(path) as file:
                content = np.memmap(file, np.uint8, "r") if os.fstat(file.fileno()).st_size else np.empty(0, np.uint8)
        except OSError as error:  # the file may be whole, as with too many open files
            raise DataError(f"{path}: the games cannot be read ({error.strerror})") from error
        try:
            header = read_header(path)
            tensors = {name: _view(content, header[name], dtype, kind) for name, (dtype, kind) in DTYPES.items()}
            digest = _view(content, header["digest"], "U8", np.uint8)
        except CheckpointError as error:
            raise DataError(f"{error}; {remedy}") from error
        except KeyError as error:
            raise DataError(f"{path} holds no games: it has no tensor {error}") from error
        if not np.array_equal(_digest(tensors), digest):
            raise DataError(f"{path} is damaged: its digest differs; {remedy}")
        first_G, pi_RA, bits_RK, outcome_R = tensors.values()
        records = len(outcome_R)
        if (bits_RK.shape, pi_RA.shape) != ((records, feature_bytes(board)), (records, board**2 + 1)):
            shapes = f"{list(bits_RK.shape)} and {list(pi_RA.shape)}"
            raise DataError(f"{path} has records of shape {shapes}, which are not of {board}x{board} games")
        ascending = first_G.ndim == 1 and len(first_G) > 0 and not np.any(np.diff(first_G) < 0)
        if not ascending or (first_G[0], first_G[-1]) != (0, records):
            raise DataError(f"{path} is damaged: its games do not add up to its {records} records; {remedy}")
        return cls(path, bits_RK, pi_RA, outcome_R, first_G)


def _view(content: NDArray[np.uint8], location: TensorLocation, dtype: str, kind: type[Any]) -> NDArray[Any]:
    if location.dtype != dtype:
        raise CheckpointError(f"{location.file} has a tensor of {location.dtype} where {dtype} is expected")
    return np.ndarray(location.shape, kind, content.data, location.start)


def generation_folder(folder: Path, generation: int) -> Path:
    """Return the folder of the games that model ``generation`` has played."""
    return folder / f"{generation:06d}"


def held_out_folder(folder: Path) -> Path:
    """Return the folder of the games that are set aside for validation, beside the ``folder`` of a run's games."""
    return folder.with_name("holdout")


class Games:
    """All games of a run, in one folder per generation. Every shard is opened and checked once.

    Args:
        folder: has the folders of the generations.
        board: lines of the board.
        bootstrap: folder of the games that were played before the run; it is not written to.
        bootstrapped: number of the first generation that is not in ``bootstrap``.
    """

    def __init__(self, folder: Path, board: int, bootstrap: Path | None = None, bootstrapped: int = 0) -> None:
        self._folder, self._board = folder, board
        self._bootstrap, self._bootstrapped = bootstrap or folder, bootstrapped
        # Every open shard has a file descriptor, and a window may have more files than the usual soft limit of 1,024.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        self._open: dict[Path, Shard] = {}
        self._closed: dict[int, list[str]] = {}

    def of(self, generation: int) -> list[Shard]:
        """Return the shards of ``generation``, ordered by name; once it is closed, only those that there were then.

        Raises:
            DataError: see :meth:`Shard.checked`; or a shard of a closed generation is missing.
        """
        prepared = generation < self._bootstrapped
        folder = generation_folder(self._bootstrap if prepared else self._folder, generation)
        if generation not in self._closed and (folder / CLOSED).exists():
            self._closed[generation] = read_text(folder / CLOSED).splitlines()
        names = self._closed.get(generation)
        paths = sorted(folder.glob(f"*{SUFFIX}")) if names is None else [folder / name for name in names]
        for path in paths:
            if path not in self._open:
                if names is not None and not appeared(path):
                    raise DataError(
                        f"{path} is missing, and training on generation {generation} has begun with its games: copy it "
                        f"back; if other machines see it, their file system shows new files too late; or delete "
                        f"{folder / CLOSED}, and resume with other games"
                    )
                again = PLAY_AGAIN if names is None else _copy_back(generation)
                self._open[path] = Shard.checked(path, self._board, PREPARE_AGAIN if prepared else again)
        return [self._open[path] for path in paths]

    def close(self, generation: int) -> list[str]:
        """Fix the games of ``generation``, so that games that end later do not change the examples.

        Return the names of their files, for :meth:`adopt` on other ranks.

        Raises:
            DataError: see :meth:`Shard.checked`; or the list of the games cannot be written.
        """
        names = [shard.path.name for shard in self.of(generation)]
        if generation >= self._bootstrapped:  # there are no more games in the bootstrap
            path = generation_folder(self._folder, generation) / CLOSED
            try:
                write_text(path, "\n".join(names))
            except OSError as error:
                raise DataError(f"{path} cannot be written ({error.strerror}); free some space and resume") from error
        return names

    def adopt(self, generation: int, names: list[str]) -> None:
        """Fix the games of ``generation`` to those that another rank has closed, whatever this machine sees now."""
        self._closed[generation] = names

    def count(self, generation: int) -> int:
        """Return the number of finished games of ``generation``.

        Raises:
            DataError: see :meth:`Shard.checked`.
        """
        return sum(shard.games for shard in self.of(generation))

    def forget_before(self, generation: int) -> None:
        """Close the shards of all generations before ``generation``."""
        self._open = {path: shard for path, shard in self._open.items() if int(path.parent.name) >= generation}


def delete_games_after(folder: Path, generation: int) -> None:
    """Delete the games below ``folder`` of all generations after ``generation``.

    Raises:
        DataError: they cannot be deleted.
    """
    for games in sorted(folder.glob("[0-9]*")):
        if int(games.name) > generation:
            try:
                shutil.rmtree(games)
            except OSError as error:
                raise DataError(f"{games}: games of lost training cannot be deleted ({error.strerror})") from error


@dataclass(frozen=True)
class Sampling:
    """How training draws its examples. The rules fix all of these.

    Attributes:
        window: generations that the examples come from, the newest ones.
        games: games from each of these generations.
        keep: probability of a record of these games.
    """

    window: int
    games: int
    keep: float

    def generations(self, newest: int) -> range:
        """Return the generations of the window that ends with ``newest``; early in a run there are fewer."""
        return range(max(0, newest - self.window + 1), newest + 1)


@dataclass(frozen=True)
class Examples:
    """Training examples, one per row.

    Attributes:
        symmetry_R: symmetry to apply to planes and distribution, uint8.
    """

    bits_RK: NDArray[np.uint8]
    pi_RA: NDArray[np.float32]
    outcome_R: NDArray[np.float32]
    symmetry_R: NDArray[np.uint8]


@dataclass(frozen=True)
class GenerationSample:
    """The training examples of one generation, in their order.

    Attributes:
        shards: the shards with the examples.
        shard_R, record_R: position of each example: index of its shard, and record in it.
        symmetry_R: a random symmetry for each example.
    """

    shards: Sequence[Shard]
    shard_R: NDArray[np.int64]
    record_R: NDArray[np.int64]
    symmetry_R: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.shard_R)

    def steps(self, batch: int) -> int:
        """Return the number of training steps: whole batches, in one pass."""
        return len(self) // batch

    def read(self, positions_R: NDArray[np.int64]) -> Examples:
        """Return the examples at ``positions_R``, which is a rank's part of one or more batches, in this order."""
        shard_R, record_R = self.shard_R[positions_R], self.record_R[positions_R]
        some, count = self.shards[0], len(positions_R)
        bits_RK = np.empty((count, some.bits_RK.shape[1]), np.uint8)
        pi_RA = np.empty((count, some.pi_RA.shape[1]), np.float32)
        outcome_R = np.empty(count, np.float32)
        order = np.lexsort((record_R, shard_R))  # the files are read from front to back
        for own in np.split(order, np.flatnonzero(np.diff(shard_R[order])) + 1):
            if len(own):
                shard, records = self.shards[shard_R[own[0]]], record_R[own]
                bits_RK[own], pi_RA[own] = shard.bits_RK[records], shard.pi_RA[records]
                outcome_R[own] = shard.outcome_R[records]
        return Examples(bits_RK, pi_RA, outcome_R, self.symmetry_R[positions_R])


def draw(games: Games, sampling: Sampling, seed: int, generation: int) -> GenerationSample:
    """Draw the examples that train the model after ``generation``, as a function of files, ``seed`` and ``generation``.

    From each generation of the window that ends with ``generation``, exactly ``sampling.games`` games are chosen. Their
    records are kept with probability ``sampling.keep`` and shuffled together.

    Raises:
        DataError: a generation has too few games, or a shard is damaged.
    """
    random = sample_generator(seed, generation)
    shards: list[Shard] = []
    shard_parts, record_parts = [], []
    for number in sampling.generations(generation):
        own = games.of(number)
        every = [(len(shards) + index, game) for index, shard in enumerate(own) for game in range(shard.games)]
        if len(every) < sampling.games:
            raise DataError(f"generation {number} has {len(every)} finished games, and training needs {sampling.games}")
        shards += own
        for chosen in np.sort(random.choice(len(every), sampling.games, replace=False)):
            index, game = every[chosen]
            start, end = shards[index].first_G[game : game + 2]
            record_parts.append(np.arange(start, end))
            shard_parts.append(np.full(end - start, index))
    shard_R, record_R = np.concatenate(shard_parts), np.concatenate(record_parts)
    kept = random.permutation(np.flatnonzero(random.random(len(shard_R)) < sampling.keep))
    symmetry_R = random.integers(SYMMETRIES, size=len(kept), dtype=np.uint8)
    return GenerationSample(shards, shard_R[kept], record_R[kept], symmetry_R)
