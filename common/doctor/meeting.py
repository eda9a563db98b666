"""Exchange results between rank 0 and all ranks through the job's store, which works even if a collective hangs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from common.distributed.rank_info import RankInfo
from common.doctor.reading import first_line
from common.errors import RankFailure

POLL_SECONDS = 0.05


class Meeting:
    """Channel that sends results of all ranks to rank 0, and its verdict back. All waits have a timeout.

    With several ranks, the default process group must be initialized before.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        self._rank_info = rank_info
        self._alone: dict[str, str] = {}
        self._store: dist.Store | None = None
        self._late: set[int] = set()
        if rank_info.world_size > 1:
            self._store = dist.PrefixStore("doctor", dist.distributed_c10d._get_default_store())

    def post(self, topic: str, result: Any) -> None:
        """Send this rank's ``result``, a JSON value, to rank 0.

        Raises:
            RankFailure: the store does not answer, because its host (rank 0 or the launcher) ended.
        """
        self._set(f"{topic}/{self._rank_info.rank}", json.dumps(result))

    def collect(self, topic: str, timeout_seconds: float) -> list[Any]:
        """Return the results of all ranks, in their order; None for a rank that did not answer in time. For rank 0.

        Later calls do not wait for a rank that was late once.

        Args:
            timeout_seconds: time to wait for all ranks together.

        Raises:
            RankFailure: the store does not answer.
        """
        deadline = time.monotonic() + timeout_seconds
        waiting = {f"{topic}/{rank}": rank for rank in range(self._rank_info.world_size)}
        results: list[Any] = [None] * self._rank_info.world_size
        while waiting:
            for name in [name for name in waiting if self._has([name])]:
                results[waiting.pop(name)] = json.loads(self._get(name))
            if self._late.issuperset(waiting.values()) or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        self._late.update(waiting.values())
        return results

    def announce(self, topic: str, result: Any) -> None:
        """Send ``result``, a JSON value, from rank 0 to all ranks."""
        self._set(topic, json.dumps(result))

    def receive(self, topic: str, timeout_seconds: float) -> Any:
        """Return the value that rank 0 announced for ``topic``; wait for it at most ``timeout_seconds``.

        Raises:
            RankFailure: rank 0 did not announce a value in time.
        """
        try:
            if self._store is not None:
                self._store.wait([topic], timedelta(seconds=timeout_seconds))
            return json.loads(self._get(topic))
        except dist.DistError as error:
            raise RankFailure(
                f"rank {self._rank_info.rank}: rank 0 did not answer within {timeout_seconds:.0f} s"
            ) from error

    def everyone_arrives(self, topic: str, timeout_seconds: float) -> None:
        """Wait for all ranks, so that the next measurement starts at the same time.

        After ``timeout_seconds``, rank 0 lets all others continue without the late ranks.

        Raises:
            RankFailure: the store or rank 0 does not answer.
        """
        self.post(topic, True)
        if self._rank_info.rank == 0:
            self.collect(topic, timeout_seconds)
            self.announce(f"{topic} begins", True)
        self.receive(f"{topic} begins", 2 * timeout_seconds)

    def leave(self, timeout_seconds: float) -> None:
        """Wait on rank 0, which may host the store, until the other ranks have received the verdict.

        It waits at most ``timeout_seconds``; other ranks do not wait.
        """
        self.post("left", True)
        if self._rank_info.rank == 0:
            self.collect("left", timeout_seconds)

    def _set(self, name: str, value: str) -> None:
        if self._store is None:
            self._alone[name] = value
            return
        try:
            self._store.set(name, value)
        except dist.DistError as error:
            raise self._gone(error) from error

    def _has(self, names: Sequence[str]) -> bool:
        if self._store is None:
            return all(name in self._alone for name in names)
        try:
            return bool(self._store.check(list(names)))
        except dist.DistError as error:
            raise self._gone(error) from error

    def _get(self, name: str) -> str:
        return self._alone[name] if self._store is None else self._store.get(name).decode()

    def _gone(self, error: BaseException) -> RankFailure:
        return RankFailure(
            f"rank {self._rank_info.rank} lost the job's store, at rank 0 or the launcher: {first_line(error)}"
        )
