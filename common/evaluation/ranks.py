"""Evaluation on separate ranks, seen from the training ranks: send weights, receive scores, continue training."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from common.contract.evaluation import Point, Score, Weights, never
from common.distributed import job_store
from common.distributed.layout import Layout
from common.distributed.messages import MessageReceiver, MessageSender
from common.distributed.tensor_split import TensorSplit, gathered, without_padding
from common.distributed.weights import Template, Transfer, WeightSender


class RankedEvaluation:
    """Sends the weights of the training ranks to the job's evaluation ranks and receives the scores.

    Only training rank 0 receives scores, in the order of submission. The time of a score, which counts for
    ``run_stop``, is its arrival there. The rules allow the earlier time at the evaluation rank, but that machine has
    another clock.

    Args:
        splits: how weights are sharded over ``tp``. They are sent whole, for evaluation ranks with another ``tp``.
    """

    later = elsewhere = True
    offline = False

    def __init__(
        self, layout: Layout, senders: int, evaluation_ranks: int, splits: Mapping[str, TensorSplit] | None = None
    ) -> None:
        self._layout, self._splits, self._tp_ranks = layout, splits or {}, layout.group("tp")
        token = job_store.from_rank_0("transfer", secrets.token_hex(8))
        self._transfer = Transfer(token, senders, evaluation_ranks)
        self._sender: WeightSender | None = None
        self._score_receiver: ScoreReceiver | None = None
        self._waited: deque[tuple[int, float]] = deque()
        self._index = 0
        self.interrupted = False

    def prepare(self, weights: Callable[[], Weights]) -> None:
        """Send the names and shapes of the weights to the evaluation ranks, and connect to them."""
        tensors = self._whole(weights())
        template = Template.of(tensors, self._transfer.senders)
        job_store.from_rank_0("weights", template.encode())
        if self._layout.rank < self._transfer.senders:
            self._sender = WeightSender(self._transfer, self._layout.rank, template, self._layout.device)
        if self._layout.rank == 0:
            self._score_receiver = ScoreReceiver(self._transfer.token)

    def open_data(self, root: Path) -> None:
        """Do nothing: the evaluation ranks open the data."""

    def submit(self, weights: Weights, samples: int) -> None:
        """Send the weights. Waits only for the end of the previous transfer. Collective.

        Raises:
            RuntimeError: an evaluation rank is gone.
        """
        began = time.perf_counter()
        tensors = self._whole(weights)
        if self._sender is not None:
            self._sender.publish(self._index, samples, tensors)
        self._index += 1
        self._waited.append((samples, time.perf_counter() - began))

    def poll(self) -> list[Score]:
        """Return the scores that have arrived since the last poll; always empty on ranks other than 0.

        Raises:
            RuntimeError: an evaluation rank is gone.
        """
        if self._sender is not None:
            self._sender.check()
        messages = [] if self._score_receiver is None else self._score_receiver.collect()
        return [score for message in messages if (score := self._score(message)) is not None]

    def trained(self, point: Point) -> None:
        """Do nothing: the weights are sent without the point."""

    def finish(self, stopping: Callable[[], bool] = never) -> Iterator[Score]:
        """Yield the scores as they arrive until none is pending; nothing on ranks other than 0.

        Raises:
            RuntimeError: an evaluation rank is gone.
        """
        while self._score_receiver is not None and self._waited:
            began = time.perf_counter()
            message = self._score_receiver.next()
            samples, waited = self._waited[0]
            self._waited[0] = (samples, waited + time.perf_counter() - began)
            score = self._score(message)
            if score is not None:
                yield score

    def dismiss(self, stopped_at: int) -> None:
        """Send the evaluation ranks the end of the run, and wait until they have left.

        Args:
            stopped_at: step at which a signal stopped the run; 0 for a run that ended by itself.
        """
        if self._sender is not None:
            self._sender.end(stopped_at)
        if self._score_receiver is not None:
            self._score_receiver.wait_for_end()

    def close(self) -> None:
        """Do nothing: the threads end when they have no more to do, or with the process."""

    def _whole(self, weights: Weights) -> dict[str, Tensor]:
        """Return the weights without sharding over ``tp``, and without padding. Collective over ``tp``."""
        if self._tp_ranks is None:
            return without_padding(weights.tensors, self._splits)
        device = self._layout.device
        tensors: dict[str, Tensor] = gathered(weights.tensors, self._splits, self._tp_ranks, self._layout, device)
        return tensors

    def _score(self, message: ScoreMessage) -> Score | None:
        """Return the score in a message; None if it only reports that a signal asked the evaluation ranks to stop."""
        if message.values is None:
            self.interrupted = True
            return None
        samples, waited = self._waited.popleft()
        if message.samples != samples:
            raise RuntimeError(f"a score for {message.samples} samples came, the next one is of {samples}")
        return Score(samples, message.values, message.time_ms, message.seconds, waited)


@dataclass(frozen=True)
class ScoreMessage:
    """Message of evaluation rank 0 on one evaluation: its score, or the earlier notice that a signal asked to stop.

    Attributes:
        samples: training samples that the weights had seen.
        values: metric name to value; None for the notice of a signal, which the score still follows.
        seconds: duration of the evaluation, including the transfer of the weights.
        time_ms: time of arrival, milliseconds since 1970.
    """

    samples: int
    values: dict[str, float] | None
    seconds: float
    time_ms: int


class ScoreReceiver:
    """Receives the messages of evaluation rank 0 on training rank 0, in a thread."""

    def __init__(self, token: str) -> None:
        self._messages = MessageReceiver(f"scores/{token}")

    def collect(self) -> list[ScoreMessage]:
        """Return the messages that have arrived since the last call; does not wait. Raises as :meth:`next`."""
        return [ScoreMessage(**message.content, time_ms=message.time_ms) for message in self._messages.collect()]

    def next(self) -> ScoreMessage:
        """Wait for the next message.

        Raises:
            RuntimeError: the evaluation rank is gone.
        """
        message = self._messages.next()
        assert message is not None, "it waits for as long as it takes"
        return ScoreMessage(**message.content, time_ms=message.time_ms)

    def wait_for_end(self) -> None:
        """Wait until the evaluation ranks have sent their end, or are gone."""
        self._messages.wait_for_end()


class ScoreSender:
    """Sends scores from evaluation rank 0 to training rank 0."""

    def __init__(self, token: str) -> None:
        self._messages = MessageSender(f"scores/{token}")

    def report(self, samples: int, values: dict[str, float] | None, seconds: float) -> None:
        """Send a :class:`ScoreMessage` of training samples, metrics (None: stop notice) and evaluation seconds.

        Raises:
            RuntimeError: training rank 0 is gone.
        """
        self._messages.send(samples=samples, values=values, seconds=seconds)

    def end(self) -> None:
        """Send the message that no more scores follow."""
        self._messages.end()
