"""Placements of features: memory that each takes on GPUs and hosts, and choice among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.rgat.stores.partition import Partition
from common.distributed import one_machine
from common.distributed.environment import meminfo
from common.distributed.layout import AXES, Layout
from common.errors import ConfigError
from common.ops.operation import AUTO

LOCAL, PEERS, HOST, EXCHANGE = PLACEMENTS = ("local", "peers", "host", "exchange")
"""Placements of feature rows.

- ``local``: all rows on every device;
- ``peers``: shards on the GPUs of one node, read in place;
- ``host``: shards in the memory of one host, read in place;
- ``exchange``: shards on all devices, with rows sent on request."""

LEFT_FREE = 2e9
"""Bytes of each device, and of each host, that stores leave free."""

GB = 1e9


@dataclass(frozen=True)
class Room:
    """Free or needed memory.

    Attributes:
        device: bytes per GPU, the minimum over all; 0 if the ranks compute on CPUs.
        host: bytes per node.
    """

    device: float
    host: float

    @classmethod
    def measured(cls, layout: Layout, device: torch.device) -> Room:
        """Return the memory that is free now. Collective."""
        found = [0, meminfo().get("MemAvailable", 1 << 62)]
        if device.type == "cuda":
            torch.cuda.empty_cache()
            found[0] = torch.cuda.mem_get_info(device)[0]
        group = layout.group(*AXES)
        if group is not None:
            found = [min(one_machine.gathered(value, group, device)) for value in found]
        return cls(max(0.0, found[0] - LEFT_FREE), max(0.0, found[1] - LEFT_FREE))


@dataclass(frozen=True)
class Ranks:
    """Ranks that hold the features.

    Attributes:
        count: total number.
        per_node: number on each node.
        gpus: whether they compute on GPUs.
    """

    count: int
    per_node: int
    gpus: bool

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.count <= self.per_node

    def refusal(self, placement: str) -> str | None:
        """Return why the ranks cannot use a placement, regardless of memory; None if they can."""
        if placement == PEERS and not self.gpus:
            return "it needs GPUs"
        if placement in (PEERS, HOST) and not self.one_node:
            return f"it serves the ranks of one node, and there are {self.count}, {self.per_node} on each"
        if placement in (PEERS, EXCHANGE) and self.count == 1:
            return "it needs two ranks or more"
        return None

    def needs(self, placement: str, nodes: tuple[int, ...], row_bytes: int) -> Room:
        """Return the memory that the rows take.

        Args:
            placement: a name in the list of placements of this module.
            nodes: number of nodes of each type.
            row_bytes: bytes of a node's features.
        """
        shards = 1 if placement == LOCAL else self.count
        shard = float(Partition(nodes, shards).rows * row_bytes)
        on_node = min(self.count, self.per_node)
        if placement == HOST:
            return Room(0.0, on_node * shard)
        return Room(shard, 0.0) if self.gpus else Room(0.0, on_node * shard)

    def in_order(self) -> tuple[str, ...]:
        """Return the placements that ``auto`` tries, in this order."""
        if self.count == 1:
            return LOCAL, HOST
        # The rules let only one rank read a row, and forbid copies (training_rules.adoc, node classification).
        return (PEERS, EXCHANGE, HOST) if self.one_node else (EXCHANGE,)


def feature_bytes(nodes: tuple[int, ...], width: int, dtype: torch.dtype) -> int:
    """Return the bytes of all rows of features.

    Args:
        nodes: number of nodes of each type.
        width: features of a node.
    """
    return sum(nodes) * width * dtype.itemsize


def candidates(requested: str, ranks: Ranks, nodes: tuple[int, ...], row_bytes: int, room: Room) -> tuple[str, ...]:
    """Return the usable placements, best first: the requested one, or for ``auto`` all that fit.

    Raises:
        ConfigError: none is usable; the message has needed and free memory, and placements that would fit.
    """
    if requested not in (AUTO, *PLACEMENTS):
        raise ConfigError(
            f"unknown placement of features {requested!r}; choose one of {', '.join((AUTO, *PLACEMENTS))}"
        )
    fitting = []
    for name in ranks.in_order():
        needs = ranks.needs(name, nodes, row_bytes)
        if ranks.refusal(name) is None and needs.device <= room.device and needs.host <= room.host:
            fitting.append(name)
    if requested == AUTO and fitting:
        return tuple(fitting)
    if requested != AUTO:
        reason = ranks.refusal(requested)
        if reason is not None:
            raise ConfigError(f"features cannot be placed as {requested!r}: {reason}; {_advice(fitting)}")
        needs = ranks.needs(requested, nodes, row_bytes)
        if needs.device <= room.device and needs.host <= room.host:
            return (requested,)
    total = sum(nodes) * row_bytes
    where = [requested] if requested != AUTO else [name for name in ranks.in_order() if ranks.refusal(name) is None]
    told = " or ".join(f"{_told(ranks.needs(name, nodes, row_bytes))} ({name})" for name in where)
    raise ConfigError(
        f"features of {total / GB:.1f} GB do not fit: they need {told}, and {_free(ranks, room)}; {_advice(fitting)}"
    )


def _told(needs: Room) -> str:
    return f"{needs.device / GB:.1f} GB of each GPU" if needs.device else f"{needs.host / GB:.1f} GB of each host"


def _free(ranks: Ranks, room: Room) -> str:
    host = f"{room.host / GB:.1f} GB of each host are free"
    return f"{room.device / GB:.1f} GB of each GPU and {host}" if ranks.gpus else host


def _advice(fitting: list[str]) -> str:
    if fitting:
        return f"choose {' or '.join(repr(name) for name in fitting)}"
    return "use more GPUs, a smaller graph, or features of fewer bits"
