"""The checkpoints of a run that wait to be scored, and their scores: files of a folder that outlives the run.

``checkpoints.jsonl`` has a line for each checkpoint that is complete, and one that says that training has ended;
``scores.jsonl`` one for each score; ``run.json`` what the run was, so that another process can score. A line is on the
disk when the call that writes it returns. Every checkpoint stays until somebody removes it: evaluated weights times
evaluation points is what the disk must hold.
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
from common.errors import CheckpointError, ConfigError
from common.untrusted.regular_file import read_bytes
from common.untrusted.strict_json import parse_object

FOLDER = "offline"
CHECKPOINTS, SCORES, RUN = "checkpoints.jsonl", "scores.jsonl", "run.json"
_ENDED = {"training": "ended"}


@dataclass(frozen=True)
class Checkpoint:
    """Weights that are complete on the disk.

    Attributes:
        point: where training was; its time is when the last of these weights was updated.
        file: name in the folder.
    """

    point: Point
    file: str

    @classmethod
    def of(cls, point: Point) -> Checkpoint:
        """The checkpoint of a point, whose file names time, step and real training samples."""
        name = f"weights--timestamp={point.time_ms}-step={point.step}-consumed_samples={point.counted}.safetensors"
        return cls(point, name)

    def require(self, folder: Path) -> Path:
        """The file in ``folder``; CheckpointError if it is gone."""
        path = folder / self.file
        if not path.is_file():
            raise CheckpointError(
                f"{path} is gone, and was not scored: the run cannot be judged without the checkpoint of step "
                f"{self.point.step}"
            )
        return path

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> Checkpoint:
        """From JSON's values of ``asdict``."""
        return cls(Point(**record["point"]), record["file"])


@dataclass(frozen=True)
class CheckpointScore:
    """What scoring a checkpoint came to.

    Attributes:
        file: of the checkpoint.
        values: of the metrics.
        began_ms, ended_ms: of the scoring, milliseconds since the epoch.
        seconds: that it took.
    """

    file: str
    values: dict[str, float]
    began_ms: int
    ended_ms: int
    seconds: float


def next_to_score(known: Collection[int], passed: Mapping[int, bool], first: int, complete: bool) -> int | None:
    """The checkpoint that is to be scored next, by the rules of Stable Diffusion's evaluation.

    They are scored in ascending order from ``first`` on, until one passes; then what was left out of those before it,
    and at least the one before it, and should that pass too, the one before that. A run with fewer checkpoints than
    ``first`` has its last two scored, since the rules want two.

    Args:
        known: numbers of the checkpoints that there are.
        passed: number of each scored one to whether it met the targets.
        first: the first to be scored.
        complete: no more come.

    Returns:
        None for nothing now: the first passing one is known, or the next one has yet to come, or never does.
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
    """The checkpoints and scores of a run, in the memory of one process and in the run's folder.

    One process at a time adds to it. One that others read through :meth:`open` is never half a line further.

    Args:
        folder: of the run; the queue has one of its own in it.
        reached: whether the metrics of a checkpoint meet the targets.
        first: the first checkpoint to be scored, counted from 1.

    Attributes:
        folder: the queue's own.
        checkpoints: by number, counted from 1.
        scores: by number.
        complete: training has ended, no more come.
    """

    def __init__(self, folder: Path, reached: Callable[[Mapping[str, float]], bool], first: int) -> None:
        self.folder = folder / FOLDER
        self._reached, self._first = reached, first
        self.checkpoints: dict[int, Checkpoint] = {}
        self.scores: dict[int, CheckpointScore] = {}
        self.complete = False

    def begin(self, resumed_step: int | None, run: Mapping[str, Any]) -> None:
        """Begin the queue of a run, or go on with what it has up to the step that a resumed run continues from.

        What an interrupted run wrote behind that step is written anew, and so loses its score. ``run`` is what
        :meth:`described` is to return.

        Raises:
            ConfigError: a run that is not resumed finds another's queue.
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
        """Read what the folder has; nothing where there is none. Raises CheckpointError if it cannot be read."""
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
        """Read what the folder has, and go on with it: half a line that a killed process left goes away."""
        self.open()
        _rewrite(self.folder / SCORES, [{"number": n, **asdict(score)} for n, score in self.scores.items()])

    def described(self) -> dict[str, Any]:
        """What the run was.

        Raises:
            CheckpointError: the folder is of no run that is scored offline.
        """
        found = _read(self.folder / RUN)
        if not found:
            raise CheckpointError(
                f"{self.folder.parent}: no run whose checkpoints are scored offline ({FOLDER}/{RUN} is missing on "
                f"{node_name(os.environ)}: evaluation.scoring=offline writes it, and all machines that score share it)"
            )
        return found[0]

    def add(self, checkpoint: Checkpoint, partial: Path) -> None:
        """Give the complete file ``partial`` its name, and the queue one more checkpoint."""
        partial.replace(self.folder / checkpoint.file)
        self.checkpoints[checkpoint.point.number] = checkpoint
        _append(self.folder / CHECKPOINTS, asdict(checkpoint))

    def end(self) -> None:
        """Note that training has ended."""
        if not self.complete:
            self.complete = True
            _append(self.folder / CHECKPOINTS, _ENDED)

    def note(self, number: int, score: CheckpointScore) -> None:
        """Add the score of a checkpoint."""
        self.scores[number] = score
        _append(self.folder / SCORES, {"number": number, **asdict(score)})

    def next(self) -> Checkpoint | None:
        """The checkpoint that is to be scored next; None if there is none now (:func:`next_to_score`).

        Raises:
            CheckpointError: its file is gone.
        """
        passed = {number: self._reached(score.values) for number, score in self.scores.items()}
        number = next_to_score(self.checkpoints, passed, self._first, self.complete)
        if number is None:
            return None
        self.checkpoints[number].require(self.folder)
        return self.checkpoints[number]

    def passed(self) -> int | None:
        """The number of the first checkpoint that is known to meet the targets."""
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
    """The records of a file, but for half a line that a killed process left; none where there is no file."""
    if not path.is_file():
        return []
    content = read_bytes(path, error=CheckpointError)
    try:
        return [parse_object(line.decode()) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
