"""Queue of checkpoints that wait for offline scoring, and their scores, in a folder that outlives the run.

``checkpoints.jsonl`` has one line for each complete checkpoint, and one for the end of training. ``scores.jsonl`` has
one line for each score. ``run.json`` describes the run, so that another process can score. Lines are on disk when the
call that writes them returns. Nothing deletes checkpoints: the disk must hold one per evaluation point.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.contract.evaluation import Point
from common.distributed.environment import node_name
from common.errors import CheckpointError, ConfigError, DataError
from common.untrusted.regular_file import read_bytes
from common.untrusted.strict_json import parse_object

FOLDER = "offline"
CHECKPOINTS, SCORES, RUN = "checkpoints.jsonl", "scores.jsonl", "run.json"
_ENDED = {"training": "ended"}


@dataclass(frozen=True)
class Checkpoint:
    """Weights that are completely on disk.

    Attributes:
        point: evaluation point; its time is that of the last update of these weights. If self-play makes the data, it
            is the time after the model was saved.
        file: file name in the queue's folder.
    """

    point: Point
    file: str

    @classmethod
    def of(cls, point: Point) -> Checkpoint:
        """Return the checkpoint of a point. Its file name contains time, step and real training samples."""
        name = f"weights--timestamp={point.time_ms}-step={point.step}-consumed_samples={point.counted}.safetensors"
        return cls(point, name)

    def require(self, folder: Path) -> Path:
        """Return the path of the file in ``folder``. Raise CheckpointError if the file is missing."""
        path = folder / self.file
        if not path.is_file():
            raise CheckpointError(
                f"{path} is gone, and was not scored: the run cannot be judged without the checkpoint of step "
                f"{self.point.step}"
            )
        return path

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> Checkpoint:
        """Create a checkpoint from the JSON form of ``asdict``."""
        return cls(Point(**record["point"]), record["file"])


@dataclass(frozen=True)
class CheckpointScore:
    """Score of one checkpoint.

    Attributes:
        began_ms, ended_ms: start and end of scoring, milliseconds since 1970.
    """

    file: str
    values: dict[str, float]
    began_ms: int
    ended_ms: int
    seconds: float


def next_to_score(known: Collection[int], passed: Mapping[int, bool], first: int, complete: bool) -> int | None:
    """Return the number of the checkpoint to score next, by the rules for Stable Diffusion.

    Checkpoints are scored in ascending order from ``first`` on, until one passes. Then the unscored ones between
    ``first`` and the passing one follow, and in any case the one just before it. If that one passes too, the rule
    applies again. With fewer than ``first`` checkpoints, the last two are scored, because the rules require two.

    Args:
        passed: number of each scored checkpoint -> whether it met the targets.
        complete: whether training has ended.

    Returns:
        None if nothing can be scored now: scoring is finished, or the next checkpoint does not exist yet.
    """
    passing = min((number for number, met in passed.items() if met), default=None)
    if passing is not None:
        left = [number for number in known if number < passing and number not in passed]
        before = max((number for number in known if number < passing), default=None)
        return min((number for number in left if number >= first or number == before), default=None)
    if complete and known and max(known) < first:
        first = max(known) - 1
    return min((number for number in known if number >= first and number not in passed), default=None)


class CheckpointQueue:
    """Checkpoints and scores of a run, in the memory of one process and in the run's folder.

    Only one process may write at a time. Others may read with :meth:`open`, which ignores incomplete lines.

    Args:
        folder: folder of the run; the queue uses a subfolder.
        reached: returns whether the metrics of a checkpoint meet the targets.

    Attributes:
        folder: subfolder of the queue.
        checkpoints: number, from 1, to checkpoint.
        complete: whether training has ended, so that no more checkpoints follow.
    """

    def __init__(self, folder: Path, reached: Callable[[Mapping[str, float]], bool], first: int) -> None:
        self.folder = folder / FOLDER
        self._reached, self._first = reached, first
        self.checkpoints: dict[int, Checkpoint] = {}
        self.scores: dict[int, CheckpointScore] = {}
        self.complete = False

    def begin(self, resumed_step: int | None, run: Mapping[str, Any]) -> None:
        """Begin the queue of a new run, or continue the queue of a resumed run.

        Checkpoints after ``resumed_step`` are deleted with their scores, because the resumed run writes them again.

        Args:
            resumed_step: step from which the run continues; None for a new run.
            run: JSON values that :meth:`described` returns.

        Raises:
            ConfigError: a new run finds the queue of another run.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if resumed_step is None:
            if (self.folder / CHECKPOINTS).exists():
                raise ConfigError(f"{self.folder} has the checkpoints of another run: choose another output_dir")
        else:
            self.open()
            for number, checkpoint in list(self.checkpoints.items()):
                if checkpoint.point.step > resumed_step:
                    (self.folder / checkpoint.file).unlink(missing_ok=True)
                    del self.checkpoints[number]
                    self.scores.pop(number, None)
            for left in self.folder.glob(".weights_*.partial"):
                left.unlink()
        self.complete = False
        _rewrite(self.folder / RUN, [dict(run)])
        _rewrite(self.folder / CHECKPOINTS, [asdict(checkpoint) for checkpoint in self.checkpoints.values()])
        _rewrite(self.folder / SCORES, [{"number": n, **asdict(score)} for n, score in self.scores.items()])

    def open(self) -> None:
        """Read the folder, which may be missing. Raise CheckpointError if a file cannot be read."""
        for record in _read(self.folder / CHECKPOINTS):
            if record == _ENDED:
                self.complete = True
            else:
                checkpoint = Checkpoint.decode(record)
                self.checkpoints[checkpoint.point.number] = checkpoint
        for record in _read(self.folder / SCORES):
            number, score = record.pop("number"), CheckpointScore(**record)
            if number in self.checkpoints and self.checkpoints[number].file == score.file:
                self.scores[number] = score

    def take_over(self) -> None:
        """Read the folder in order to continue its scores. An incomplete line of a killed process is removed."""
        self.open()
        _rewrite(self.folder / SCORES, [{"number": n, **asdict(score)} for n, score in self.scores.items()])

    def described(self) -> dict[str, Any]:
        """Return the description of the run.

        Raises:
            CheckpointError: the folder does not belong to a run with offline scoring.
        """
        found = _read(self.folder / RUN)
        if not found:
            raise CheckpointError(
                f"{self.folder.parent}: no run whose checkpoints are scored offline ({FOLDER}/{RUN} is missing on "
                f"{node_name(os.environ)}: evaluation.scoring=offline writes it, and all machines that score share it)"
            )
        return found[0]

    def add(self, checkpoint: Checkpoint, partial: Path) -> None:
        """Rename the complete file ``partial`` to its final name and add its checkpoint to the queue."""
        partial.replace(self.folder / checkpoint.file)
        self.checkpoints[checkpoint.point.number] = checkpoint
        _append(self.folder / CHECKPOINTS, asdict(checkpoint))

    def end(self) -> None:
        """Record that training has ended."""
        if not self.complete:
            self.complete = True
            _append(self.folder / CHECKPOINTS, _ENDED)

    def note(self, number: int, score: CheckpointScore) -> None:
        """Add the score of a checkpoint."""
        self.scores[number] = score
        _append(self.folder / SCORES, {"number": number, **asdict(score)})

    def next(self) -> Checkpoint | None:
        """Return the checkpoint to score next; None if there is none now (:func:`next_to_score`).

        Raises:
            CheckpointError: its file is missing.
        """
        passed = {number: self._reached(score.values) for number, score in self.scores.items()}
        number = next_to_score(self.checkpoints, passed, self._first, self.complete)
        if number is None:
            return None
        self.checkpoints[number].require(self.folder)
        return self.checkpoints[number]

    def passed(self) -> int | None:
        """Return the number of the first scored checkpoint that meets the targets; None if there is none."""
        return min((n for n, score in self.scores.items() if self._reached(score.values)), default=None)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with open(path, "ab") as file:
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _rewrite(path: Path, records: Collection[Mapping[str, Any]]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(partial, "wb") as file:
        file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, without an incomplete last line; empty if there is no file."""
    if not path.is_file():
        return []
    try:
        content = read_bytes(path)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    try:
        return [parse_object(line.decode()) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    except (DataError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
