"""Messages between rank 0 and the scorer process, and the scorer's request loop: one answer per request, in order."""

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
class LoadScorer:
    """Request to load and warm up the scorer.

    Attributes:
        scorer: pickled separately, so that an import error becomes the answer to this request.
    """

    scorer: bytes


@dataclass(frozen=True)
class Open:
    """Request to load the ground truth."""

    root: Path


@dataclass(frozen=True)
class Judge:
    """Request to score predictions, whose file descriptor follows.

    Attributes:
        sizes: sizes of the parts (:func:`common.evaluation.hand_over.pack`).
    """

    sizes: list[int]


@dataclass(frozen=True)
class Done:
    """Answer to a successful request without a result."""


@dataclass(frozen=True)
class ScoreAnswer:
    """Answer with a score.

    Attributes:
        time_ms: time at which the score was known, milliseconds since 1970.
    """

    values: dict[str, float]
    seconds: float
    time_ms: int


@dataclass(frozen=True)
class Failed:
    """Answer to a failed request.

    Attributes:
        kind: class of the error if it is a SuiteError; None for any other error.
        text: message of a SuiteError; traceback of any other error.
    """

    kind: type[SuiteError] | None
    text: str


Request = LoadScorer | Open | Judge
Answer = Done | ScoreAnswer | Failed


def serve(connection: Connection[Any, Any], threads: int) -> None:
    """Answer requests with ``threads`` threads, until the other side closes the connection."""
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
    """Holds the scorer and handles requests."""

    def __init__(self) -> None:
        self._scorer: Scorer | None = None

    def answer(self, request: Request, descriptor: int | None) -> Answer:
        """Handle a request. ``descriptor`` is the file descriptor of the predictions; None for other requests."""
        try:
            return self._do(request, descriptor)
        except SuiteError as error:
            return Failed(type(error), str(error))
        except Exception:  # noqa: BLE001 - rank 0 raises every error
            return Failed(None, traceback.format_exc())

    def _do(self, request: Request, descriptor: int | None) -> Answer:
        if isinstance(request, LoadScorer):
            self._scorer = pickle.loads(request.scorer)
            self._scorer.warm_up()
            return Done()
        assert self._scorer is not None, "a scorer comes first"
        if isinstance(request, Open):
            self._scorer.open_data(request.root)
            return Done()
        assert descriptor is not None, "predictions come with it"
        return _judge(self._scorer, request, descriptor)


def _judge(scorer: Scorer, request: Judge, descriptor: int) -> ScoreAnswer:
    predictions: Predictions = unpack(descriptor, request.sizes)
    os.close(descriptor)
    began = time.perf_counter()
    values = scorer.score(predictions)
    return ScoreAnswer(values, time.perf_counter() - began, time.time_ns() // 1_000_000)
