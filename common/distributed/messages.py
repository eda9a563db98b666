"""Occasional small JSON messages between two ranks of a job, whatever their roles, outside of the training steps.

A thread of the receiver takes the messages. Sending waits until the message has reached the receiver's machine.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.distributed.groups import HostGroup

SENDER, RECEIVER = 0, 1
"""Ranks in the group of two."""


@dataclass(frozen=True)
class Message:
    """Received message.

    Attributes:
        content: JSON object of the message.
        time_ms: time of arrival in milliseconds since the epoch, by the receiver's clock.
    """

    content: dict[str, Any]
    time_ms: int


class MessageSender:
    """Sender of messages to the receiver of the same name.

    Args:
        name: name that is unique in the job's store, over all runs.
    """

    def __init__(self, name: str) -> None:
        self._group = HostGroup(f"messages/{name}", SENDER, 2)

    def send(self, **content: Any) -> None:
        """Send a message. Raises RuntimeError when the receiver is gone."""
        data = json.dumps(content).encode()
        self._group.send(torch.tensor([len(data)]), RECEIVER)
        self._group.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), RECEIVER)

    def end(self) -> None:
        """Tell the receiver that no more messages follow."""
        self._group.send(torch.zeros(1, dtype=torch.int64), RECEIVER)


class MessageReceiver:
    """Receiver of the messages from the sender of the same name."""

    def __init__(self, name: str) -> None:
        self._messages: queue.SimpleQueue[Message | RuntimeError] = queue.SimpleQueue()
        self._group = HostGroup(f"messages/{name}", RECEIVER, 2)
        self._thread = threading.Thread(target=self._receive, name=f"messages {name}", daemon=True)
        self._thread.start()

    def collect(self) -> list[Message]:
        """Return the messages that have arrived since the last call, without waiting. Raises as :meth:`next`."""
        found = []
        while not self._messages.empty():
            message = self.next()
            assert message is not None, "nobody else takes messages"
            found.append(message)
        return found

    def next(self, seconds: float | None = None) -> Message | None:
        """Return the next message, or None if none arrives within ``seconds`` (None: no limit).

        Raises:
            RuntimeError: the sender is gone.
        """
        try:
            message = self._messages.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(message, RuntimeError):
            raise message
        return message

    def wait_for_end(self) -> None:
        """Wait until the sender has announced its end, or is gone."""
        self._thread.join()

    def _receive(self) -> None:
        length: Tensor = torch.zeros(1, dtype=torch.int64)
        try:
            while True:
                self._group.receive(length, SENDER)
                if not length.item():
                    return
                data = torch.zeros(int(length.item()), dtype=torch.uint8)
                self._group.receive(data, SENDER)
                now = time.time_ns() // 1_000_000
                self._messages.put(Message(json.loads(data.numpy().tobytes()), now))
        except RuntimeError as error:
            self._messages.put(error)
