"""Bind a rank to the cores and the memory next to its GPU.

The kernel names the NUMA node and the local CPUs of each PCI device
(``/sys/bus/pci/devices/<id>/{numa_node,local_cpulist}``). A rank is bound only to CPUs and memory that its process may
already use, so a cpuset of the scheduler or of a container is respected.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from common.errors import DeviceError
from common.observe.nvml import pci_bus_ids

if TYPE_CHECKING:
    from common.config.system import BindingConfig
    from common.distributed.rank_info import RankInfo

UNBOUND = "ranks are not bound to their GPU's cores and memory"
CpuBinding = Literal["node", "exclusive", "none"]
MemoryBinding = Literal["node", "none"]

SYSFS = Path("/sys")
MPOL_BIND = 2
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call set_mempolicy by machine type (Linux, arch/*/include/asm/unistd)."""


@dataclass(frozen=True)
class RankBinding:
    """CPUs and memory that a rank is bound to.

    Attributes:
        memory_nodes: NUMA nodes that memory may come from; empty for all nodes.
        sharers: number of ranks on this machine that use the same CPUs, including this rank.
    """

    cpus: frozenset[int]
    memory_nodes: frozenset[int]
    sharers: int


@dataclass(frozen=True)
class Topology:
    """CPUs, NUMA nodes and GPUs of this machine, as the kernel reports them.

    Attributes:
        allowed_nodes: NUMA nodes whose memory this process may use.
        gpu_nodes: NUMA node of each GPU; None if the firmware does not report it.
        siblings: for each CPU, the lowest CPU number on the same physical core.
    """

    allowed_cpus: frozenset[int]
    allowed_nodes: frozenset[int]
    gpu_cpus: tuple[frozenset[int], ...]
    gpu_nodes: tuple[int | None, ...]
    siblings: dict[int, int]


def parse_list(text: str) -> frozenset[int]:
    """Return the numbers in a kernel list such as ``0-3,8,10-11``; empty text gives the empty set."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def read_topology(pci_ids: Sequence[str], sysfs: Path = SYSFS, status: Path = Path("/proc/self/status")) -> Topology:
    """Return the topology of this machine and of its GPUs, as far as this process may use its CPUs.

    Args:
        pci_ids: PCI addresses of the GPUs, such as ``0000:ab:00.0``.
        status: ``status`` file of this process in procfs, which lists the allowed NUMA nodes.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    match = re.search(r"^Mems_allowed_list:\s*(\S+)", status.read_text(), re.MULTILINE)
    gpu_cpus, gpu_nodes = [], []
    for pci_id in pci_ids:
        folder = sysfs / "bus" / "pci" / "devices" / pci_id
        gpu_cpus.append(parse_list(_read(folder / "local_cpulist")))
        node = int(_read(folder / "numa_node") or -1)
        gpu_nodes.append(node if node >= 0 else None)
    nodes = parse_list(match[1]) if match else frozenset()
    return Topology(allowed, nodes, tuple(gpu_cpus), tuple(gpu_nodes), read_siblings(allowed, sysfs))


def read_siblings(cpus: Iterable[int], sysfs: Path = SYSFS) -> dict[int, int]:
    """Return for each CPU the lowest CPU number on the same physical core; the CPU itself if the kernel has no list."""
    siblings = {}
    for cpu in cpus:
        together = parse_list(_read(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        siblings[cpu] = min(together, default=cpu)
    return siblings


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def locate(topology: Topology, gpu: int, cpu: CpuBinding, memory: MemoryBinding, bound: Sequence[int]) -> RankBinding:
    """Return the binding of the rank that uses GPU number ``gpu``.

    Args:
        cpu: ``node``: all allowed CPUs local to the GPU; ``exclusive``: a separate share of them, in whole physical
            cores with their hyperthreads; ``none``: all allowed CPUs.
        memory: ``node``: the GPU's NUMA node; ``none``: all nodes.
        bound: GPU of each rank on this machine, in the order of the ranks.
    """
    near = [topology.gpu_cpus[index] & topology.allowed_cpus or topology.allowed_cpus for index in bound]
    position = list(bound).index(gpu)
    own = near[position]
    together = [index for index, cpus in enumerate(near) if cpus == own]
    node = topology.gpu_nodes[gpu]
    nodes = frozenset({node}) & topology.allowed_nodes if memory == "node" and node is not None else frozenset()
    if cpu == "none":
        return RankBinding(topology.allowed_cpus, nodes, len(bound))
    if cpu == "node":
        return RankBinding(own, nodes, len(together))
    return _share(topology, own, together.index(position), len(together), nodes)


def _share(topology: Topology, cpus: frozenset[int], index: int, count: int, nodes: frozenset[int]) -> RankBinding:
    """Return share ``index`` of ``count`` of ``cpus``, or all of ``cpus`` if there are fewer cores than shares."""
    cores = sorted({topology.siblings[cpu] for cpu in cpus})
    if len(cores) < count:
        return RankBinding(cpus, nodes, count)
    first, last = index * len(cores) // count, (index + 1) * len(cores) // count
    mine = set(cores[first:last])
    return RankBinding(frozenset(cpu for cpu in cpus if topology.siblings[cpu] in mine), nodes, 1)


def bind_rank(rank_info: RankInfo, config: BindingConfig) -> int | None:
    """Bind this rank to the cores and memory next to its GPU. Call this before anything initializes CUDA.

    Failures are reported on standard error, once per machine.

    Returns:
        the number of ranks that share the cores; None if the rank was not bound: binding is off, there is no GPU, or
        the order of the GPUs is unknown.
    """
    if config.cpu == "none" and config.memory == "none":
        return None
    try:
        pci_ids = pci_bus_ids()
    except DeviceError as error:
        _report(rank_info, f"{UNBOUND}: {error}")
        return None
    if not pci_ids:
        return None
    topology = read_topology(pci_ids)
    if len(pci_ids) < rank_info.local_world_size:  # The scheduler shows each rank its own GPU only.
        if config.cpu == "exclusive":
            _report(
                rank_info,
                f"system.binding.cpu=exclusive needs all {rank_info.local_world_size} GPUs visible to every rank; "
                f"a rank sees {len(pci_ids)}, so that ranks share the cores next to their GPUs",
            )
        binding = locate(topology, 0, "node" if config.cpu == "exclusive" else config.cpu, config.memory, [0])
        halves = len(topology.allowed_cpus) // max(1, len(binding.cpus))
        binding = replace(binding, sharers=-(-rank_info.local_world_size // max(1, halves)))
    else:
        binding = locate(topology, rank_info.local_rank, config.cpu, config.memory, range(rank_info.local_world_size))
    if problems := apply(binding):
        _report(rank_info, f"{UNBOUND}: {'; '.join(problems)}")
    return binding.sharers


def spare_cpus(rank_info: RankInfo, config: BindingConfig) -> frozenset[int]:
    """Return CPUs that no rank on this machine will use, for an additional process. Call this before binding the rank.

    The result is empty if ranks do not get exclusive CPUs, or if their CPUs cannot be determined.
    """
    if config.cpu != "exclusive":
        return frozenset()
    try:
        pci_ids = pci_bus_ids()
    except DeviceError:  # `bind_rank` reports it
        return frozenset()
    if len(pci_ids) < max(1, rank_info.local_world_size):
        return frozenset()
    return left_over(read_topology(pci_ids), range(rank_info.local_world_size))


def left_over(topology: Topology, bound: Sequence[int]) -> frozenset[int]:
    """Return the allowed CPUs outside the exclusive shares of the ranks that use the GPUs ``bound``."""
    shares = [locate(topology, gpu, "exclusive", "none", bound).cpus for gpu in bound]
    return topology.allowed_cpus.difference(*shares)


def _report(rank_info: RankInfo, problem: str) -> None:
    """Print a problem once per machine."""
    if rank_info.local_rank == 0:
        print(f"mlperf-suite: {problem}", file=sys.stderr)


def apply(binding: RankBinding) -> list[str]:
    """Bind this process and its future children; return a message for each part that failed."""
    problems = []
    try:
        os.sched_setaffinity(0, binding.cpus)
    except OSError as error:
        problems.append(f"CPUs could not be bound ({error.strerror})")
    if binding.memory_nodes and (reason := _set_memory_policy(binding.memory_nodes)):
        problems.append(f"memory could not be bound ({reason})")
    return problems


def _set_memory_policy(nodes: frozenset[int]) -> str:
    """Restrict the memory of this thread and its future threads to ``nodes``; return the reason if that fails."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"not supported on {platform.machine()}"
    width = max(nodes) + 1
    words = (ctypes.c_ulong * (width // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, MPOL_BIND, words, len(words) * 64 + 1) == 0:
        return ""
    error = os.strerror(ctypes.get_errno())
    return f"{error}; a container needs the capability SYS_NICE"
