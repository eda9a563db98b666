"""The section ``system``: binding of ranks, NCCL, and the rates, links and power from which runs are planned."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from common.config.ranges import AtLeast, Between, NotNegative, Positive
from common.errors import ConfigError


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
        cores_per_node: physical processor cores that the ranks of a node share for their readers; None: unknown.
        storage_gbs: GB/s at which a node reads prepared data during training; None: unknown, or data in memory.
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
    cores_per_node: Annotated[int, AtLeast(1)] | None = None
    storage_gbs: Annotated[float, Positive] | None = None
    gpu_watts: Annotated[float, Positive] | None = None
    idle_gpu_watts: Annotated[float, NotNegative] = 0.0
    node_watts: Annotated[float, NotNegative] = 0.0
    overlap_slowdown: Annotated[float, Between(0, 1)] = 0.0
    node_slowdown: Annotated[float, NotNegative] = 0.0
    gpu_spread: Annotated[float, NotNegative] = 0.0
    step_spread: Annotated[float, NotNegative] = 0.0


@dataclass(frozen=True)
class BindingConfig:
    """CPU and memory binding of ranks (see :mod:`common.launch.binding`).

    Attributes:
        cpu: ``node``: the cores next to the rank's GPU; ``exclusive``: a separate share of them per rank; ``none``.
        memory: ``node``: the NUMA node of the rank's GPU; ``none``.
    """

    cpu: Literal["node", "exclusive", "none"] = "node"
    memory: Literal["node", "none"] = "node"


MOST_CTAS = 64
"""Largest number of NCCL channels; each uses one thread block."""

MOST_IN_A_CLUSTER = 8


@dataclass(frozen=True)
class Ctas:
    """Thread blocks (CTAs) that an NCCL operation uses on a GPU; None leaves the choice to NCCL.

    Pipeline links differ: :func:`common.distributed.groups.of_links`.

    Names and ranges: NCCL user guide, ``ncclConfig_t``: ``minCTAs``, ``maxCTAs``, ``cgaClusterSize``.

    Attributes:
        cluster: thread blocks per cluster, which run side by side; 0 uses no clusters.
    """

    min: Annotated[int, Between(1, MOST_CTAS)] | None = None
    max: Annotated[int, Between(1, MOST_CTAS)] | None = None
    cluster: Annotated[int, Between(0, MOST_IN_A_CLUSTER)] | None = None

    def __post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError(f"min={self.min}: more thread blocks than max={self.max}; give a smaller min")


@dataclass(frozen=True)
class CtasOfAxes:
    """Thread blocks of communicators, by layout axis. One over several axes uses ``dp``, else the outermost axis."""

    pp: Ctas = field(default_factory=Ctas)
    dp: Ctas = field(default_factory=Ctas)
    cp: Ctas = field(default_factory=Ctas)
    tp: Ctas = field(default_factory=Ctas)

    def by_axis(self) -> dict[str, Ctas]:
        """Return the thread blocks by name of the axis."""
        return {axis.name: getattr(self, axis.name) for axis in dataclasses.fields(self)}


@dataclass(frozen=True)
class NetworkConfig:
    """Network and GPU resources that NCCL may use.

    All settings except ``ctas`` become environment variables: :mod:`common.launch.nccl_settings`.

    Attributes:
        sharp: reduce gradients in InfiniBand switches; the job needs Slurm's ``--network=sharp``.
        sharp_nodes: smallest number of nodes for which SHARP is used; None leaves the choice to NCCL.
        user_buffers: register the buffers of captured collectives with the network; None leaves the choice to NCCL.
        nvls: reduce in NVLink switches, which needs multicast; None leaves the choice to NCCL.
        ctas: thread blocks of NCCL, which matrix products cannot use.
    """

    sharp: bool = False
    sharp_nodes: int | None = None
    user_buffers: bool | None = None
    nvls: bool | None = None
    ctas: CtasOfAxes = field(default_factory=CtasOfAxes)


@dataclass(frozen=True)
class SystemConfig:
    """Settings of the machine.

    Attributes:
        environment: variables set on every rank unless the user has set them.
        vboost: level of the GPU's power slider in favour of the tensor cores; None does not change it.
        limits: requirements on the machine that `doctor` checks.
        hardware: rates, links and power, from which `estimate` plans runs; None: unknown.
    """

    name: str = "auto"
    environment: dict[str, str] = field(default_factory=dict)
    binding: BindingConfig = field(default_factory=BindingConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    vboost: int | None = None
    limits: dict[str, Any] = field(default_factory=dict)
    hardware: Hardware | None = None
