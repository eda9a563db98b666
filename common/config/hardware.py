"""Rates, sizes, links and power of a machine: the section ``hardware`` of a system, from which runs are planned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from common.config.ranges import AtLeast, Between, NotNegative, Positive


@dataclass(frozen=True)
class Link:
    """A network that collectives use.

    Attributes:
        latency_us: microseconds of one message from GPU to GPU.
        gbs: GB/s that one GPU sends while it receives as much: the bus bandwidth of large collectives.
    """

    latency_us: Annotated[float, NotNegative]
    gbs: Annotated[float, Positive]


@dataclass(frozen=True)
class Hardware:
    """A kind of machine. `doctor --write-system` measures most of these values.

    Attributes:
        gpu: name of the GPU; results of measurements on other GPUs are ignored.
        tflops: sustained TFLOP/s of matrix products by precision.
        memory_gb, memory_gbs: size of a GPU's memory, and bandwidth of copies in it (bytes read and written), GB/s.
        collective_us: fixed launch cost of a collective, in microseconds.
        node_link: links between the GPUs of a node; None: unknown, or one GPU.
        network_link: links between nodes, per GPU; None: unknown, or one node.
        nodes_per_switch: nodes below one switch; beyond, a message between nodes passes `switch_us` more. None: all.
        switch_us: microseconds per further level of switches, for one message.
        gpu_watts, idle_gpu_watts: power of a GPU that trains, and of one that waits.
        node_watts: power of a node without its GPUs.
        overlap_slowdown: seconds by which computation is longer beside one second of communication inside the node.
        node_slowdown: fraction by which steps are longer if all GPUs of a node work together, in lock-step and at
            a common power limit, besides communication.
        gpu_spread: standard deviation of the step time over GPUs of this kind, as a fraction.
        step_spread: standard deviation of the time of a single step on one GPU, as a fraction.
    """

    gpu: str
    gpus_per_node: Annotated[int, AtLeast(1)]
    memory_gb: Annotated[float, Positive]
    memory_gbs: Annotated[float, Positive]
    tflops: dict[str, Annotated[float, Positive]] = field(default_factory=dict)
    collective_us: Annotated[float, NotNegative] = 0.0
    node_link: Link | None = None
    network_link: Link | None = None
    nodes_per_switch: Annotated[int, AtLeast(1)] | None = None
    switch_us: Annotated[float, NotNegative] = 0.0
    gpu_watts: Annotated[float, Positive] | None = None
    idle_gpu_watts: Annotated[float, NotNegative] = 0.0
    node_watts: Annotated[float, NotNegative] = 0.0
    overlap_slowdown: Annotated[float, Between(0, 1)] = 0.0
    node_slowdown: Annotated[float, NotNegative] = 0.0
    gpu_spread: Annotated[float, NotNegative] = 0.0
    step_spread: Annotated[float, NotNegative] = 0.0
