"""Time of collectives: latency + bytes / bandwidth, by algorithm.

A group has the same number of ranks on each of its nodes. Large collectives run as rings in which every GPU sends to
one GPU, and each GPU has its own port to the network. So the ranks of a node together send to the next node, and the
bandwidth of a group over several nodes is ``min(node link, ranks per node x network link)``. Of n ranks a ring sends
``2 (n - 1) / n`` of the buffer for an all-reduce, and half of that for a reduce-scatter or an all-gather. Small
collectives pass the nodes as a tree, in ``log2(nodes)`` messages each way.

References: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005);
NCCL tests, "Performance reported by NCCL tests".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from common.config.system import Hardware, Link
from common.errors import ConfigError


@dataclass(frozen=True)
class RankGroup:
    """Ranks of a collective.

    Attributes:
        ranks: number of ranks.
        per_node: ranks on each node; divides ``ranks``.
    """

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes with ranks of the group."""
        return self.ranks // self.per_node


def group_of(ranks: int, stride: int, gpus_per_node: int) -> RankGroup:
    """Return the group of ``ranks`` ranks whose numbers differ by ``stride``, on nodes of ``gpus_per_node`` GPUs."""
    return RankGroup(ranks, math.gcd(ranks, max(1, gpus_per_node // stride)))


def require_links(hardware: Hardware, system: str, gpus: int) -> None:
    """Check that the links which ``gpus`` GPUs use are known.

    Raises:
        ConfigError: a link is missing.
    """
    missing = []
    if gpus > 1 and hardware.gpus_per_node > 1 and hardware.node_link is None:
        missing.append("node_link")
    if gpus > hardware.gpus_per_node and hardware.network_link is None:
        missing.append("network_link")
    if missing:
        raise ConfigError(
            f"system {system}: hardware.{missing[0]} is missing, and {gpus} GPUs communicate through it: set it, or "
            "measure it with `mlperf-suite doctor --write-system FILE`"
        )


def inside_node(hardware: Hardware) -> Hardware:
    """Return the hardware with links on which only bytes take time, between nodes as little as inside a node."""
    node = hardware.node_link
    network = hardware.network_link if node is None else node
    return replace(
        hardware,
        collective_us=0.0,
        switch_us=0.0,
        node_link=None if node is None else Link(0.0, node.gbs),
        network_link=None if network is None else Link(0.0, network.gbs),
    )


def all_reduce(size: float, group: RankGroup, hardware: Hardware) -> float:
    """Return the seconds of an all-reduce of ``size`` bytes on each rank."""
    return _ring(size, group, hardware, passes=2)


def reduce_scatter(size: float, group: RankGroup, hardware: Hardware) -> float:
    """Return the seconds of a reduce-scatter of ``size`` bytes on each rank, or of the all-gather to that size."""
    return _ring(size, group, hardware, passes=1)


def all_to_all(size: float, group: RankGroup, hardware: Hardware) -> float:
    """Return the seconds of an all-to-all in which each rank sends ``size`` bytes, its own part included.

    Transfers inside the node and between nodes run at the same time.
    """
    if group.ranks == 1 or not size:
        return 0.0
    inside = size * (group.per_node - 1) / group.ranks
    outside = size * (group.ranks - group.per_node) / group.ranks
    seconds = hardware.collective_us / 1e6
    transfers = [0.0]
    if group.per_node > 1:
        link = _node_link(hardware)
        transfers.append(link.latency_us / 1e6 + inside / (link.gbs * 1e9))
    if group.nodes > 1:
        transfers.append(_hop(group.nodes, hardware) + outside / (_network_link(hardware).gbs * 1e9))
    return seconds + max(transfers)


def transfer(size: float, crosses_nodes: bool, hardware: Hardware) -> float:
    """Return the seconds in which ``size`` bytes go from one GPU to another."""
    if crosses_nodes:
        return _hop(2, hardware) + size / (_network_link(hardware).gbs * 1e9)
    link = _node_link(hardware)
    return link.latency_us / 1e6 + size / (link.gbs * 1e9)


def _ring(size: float, group: RankGroup, hardware: Hardware, passes: int) -> float:
    if group.ranks == 1 or not size:
        return 0.0
    sent = passes * size * (group.ranks - 1) / group.ranks
    bandwidths, latency = [], 0.0
    if group.per_node > 1:
        link = _node_link(hardware)
        bandwidths.append(link.gbs)
        latency += passes * (group.per_node - 1) * link.latency_us / 1e6
    if group.nodes > 1:
        bandwidths.append(group.per_node * _network_link(hardware).gbs)
        latency += passes * math.ceil(math.log2(group.nodes)) * _hop(group.nodes, hardware)
    return hardware.collective_us / 1e6 + latency + sent / (min(bandwidths) * 1e9)


def _hop(nodes: int, hardware: Hardware) -> float:
    """Return the seconds of a small message between two of ``nodes`` nodes that may be below different switches."""
    levels, below = 0, hardware.nodes_per_switch
    if below is not None and below > 1:
        while nodes > below:
            levels, nodes = levels + 1, math.ceil(nodes / below)
    return (_network_link(hardware).latency_us + 2 * levels * hardware.switch_us) / 1e6


def _node_link(hardware: Hardware) -> Link:
    if hardware.node_link is None:
        raise ConfigError("hardware.node_link: missing")
    return hardware.node_link


def _network_link(hardware: Hardware) -> Link:
    if hardware.network_link is None:
        raise ConfigError("hardware.network_link: missing")
    return hardware.network_link
