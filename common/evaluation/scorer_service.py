"""The two sides' messages, and the scorer's side of them: what is asked for is done in order, with one answer each."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import torch

from common.contract.evaluation import Predictions, Scorer
from common.errors import SuiteError
from common.evaluation.hand_over import unpack


@dataclass(frozen=True)
class Begin:
    """Have this scorer.

    Attributes:
        scorer: pickled apart, so that a module which cannot be imported is this request's failure.
    """

    scorer: bytes


@dataclass(frozen=True)
class Open:
    """Load the ground truth.

    Attributes:
        root: folder of the prepared data.
    """

    root: Path


@dataclass(frozen=True)
class Judge:
    """Score the predictions whose descriptor follows.

    Attributes:
        sizes: see :func:`common.evaluation.hand_over.pack`.
    """

    sizes: list[int]


@dataclass(frozen=True)
class Done:
    """That was done which has no result."""


@dataclass(frozen=True)
class Judged:
    """A score.

    Attributes:
        values: of the metrics.
        seconds: that scoring took.
        time_ms: when the score was known, milliseconds since the epoch.
    """

    values: dict[str, float]
    seconds: float
    time_ms: int


@dataclass(frozen=True)
class Failed:
    """It could not be done.

    Attributes:
        kind: of the suite's own error; None for any other.
        text: its message; of any other its traceback.
    """

    kind: type[SuiteError] | None
    text: str


Request = Begin | Open | Judge
Answer = Done | Judged | Failed


def serve(connection: Connection[Any, Any], threads: int) -> None:
    """Answer requests with so many threads, until the other side is gone."""
    torch.set_num_threads(threads)
    service = _Service()
    while True:
        try:
            request: Request = connection.recv()
            descriptor = recv_handle(connection) if isinstance(request, Judge) else None
        except (EOFError, ConnectionError):
            return
        answer = service.answer(request, descriptor)
        try:
            connection.send(answer)
        except ConnectionError:
            return


class _Service:
    """The scorer, once there is one."""

    def __init__(self) -> None:
        self._scorer: Scorer | None = None

    def answer(self, request: Request, descriptor: int | None) -> Answer:
        """Do what is asked for; ``descriptor`` is that of the predictions, if there are any."""
        try:
            return self._do(request, descriptor)
        except SuiteError as error:
            return Failed(type(error), str(error))
        except Exception:  # noqa: BLE001 - rank 0 ends with it, whatever it is
            return Failed(None, traceback.format_exc())

    def _do(self, request: Request, descriptor: int | None) -> Answer:
        if isinstance(request, Begin):
            self._scorer = pickle.loads(request.scorer)
            self._scorer.warm_up()
            return Done()
        assert self._scorer is not None, "a scorer comes first"
        if isinstance(request, Open):
            self._scorer.open_data(request.root)
            return Done()
        assert descriptor is not None, "predictions come with it"
        return _judge(self._scorer, request, descriptor)


def _judge(scorer: Scorer, request: Judge, descriptor: int) -> Judged:
    predictions: Predictions = unpack(descriptor, request.sizes)
    os.close(descriptor)
    began = time.perf_counter()
    values = scorer.score(predictions)
    return Judged(values, time.perf_counter() - began, time.time_ns() // 1_000_000)
