"""Where the ranks hand their results to rank 0: the job's store, which answers although a collective hangs."""

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
    """Results of all ranks at rank 0, and its verdict at all ranks; a rank that does not answer holds nobody up.

    Args:
        rank_info: this rank's place; the process group is set up if it has other ranks.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        self._place = rank_info
        self._alone: dict[str, str] = {}
        self._store: dist.Store | None = None
        self._late: set[int] = set()
        if rank_info.world_size > 1:
            self._store = dist.PrefixStore("doctor", dist.distributed_c10d._get_default_store())

    def post(self, topic: str, result: Any) -> None:
        """Hand in this rank's ``result``, anything that JSON has.

        Raises:
            RankFailure: rank 0, or whoever hosts the store, is gone.
        """
        self._set(f"{topic}/{self._place.rank}", json.dumps(result))

    def collect(self, topic: str, timeout_seconds: float) -> list[Any]:
        """On rank 0: the results of all ranks in their order; None of one that has not answered in time.

        A rank that was late once is not waited for again.

        Raises:
            RankFailure: whoever hosts the store is gone.
        """
        deadline = time.monotonic() + timeout_seconds
        waiting = {f"{topic}/{rank}": rank for rank in range(self._place.world_size)}
        results: list[Any] = [None] * self._place.world_size
        while waiting:
            for name in [name for name in waiting if self._has([name])]:
                results[waiting.pop(name)] = json.loads(self._get(name))
            if self._late.issuperset(waiting.values()) or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        self._late.update(waiting.values())
        return results

    def announce(self, topic: str, result: Any) -> None:
        """On rank 0: tell all ranks."""
        self._set(topic, json.dumps(result))

    def hear(self, topic: str, timeout_seconds: float) -> Any:
        """What rank 0 tells.

        Raises:
            RankFailure: it tells nothing within the time.
        """
        try:
            if self._store is not None:
                self._store.wait([topic], timedelta(seconds=timeout_seconds))
            return json.loads(self._get(topic))
        except dist.DistError as error:
            raise RankFailure(
                f"rank {self._place.rank}: rank 0 did not answer within {timeout_seconds:.0f} s"
            ) from error

    def everyone_arrives(self, topic: str, timeout_seconds: float) -> None:
        """Wait until all ranks are here, so that what follows is measured at the same time; late ranks are left."""
        self.post(topic, True)
        if self._place.rank == 0:
            self.collect(topic, timeout_seconds)
            self.announce(f"{topic} begins", True)
        self.hear(f"{topic} begins", 2 * timeout_seconds)

    def leave(self, timeout_seconds: float) -> None:
        """Wait, on the rank that may host the store, until the others have heard the verdict."""
        self.post("left", True)
        if self._place.rank == 0:
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
            f"rank {self._place.rank} lost the job's store, at rank 0 or the launcher: {first_line(error)}"
        )
