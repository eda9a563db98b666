"""Whether the ranks of a group can map each other's GPU memory: what every use of symmetric memory asks first."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory


def refusal(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why symmetric memory cannot be tried, as far as can be told without trying; the same on all ranks. Collective.

    Args:
        group: the ranks.
        device: this rank's.
    """
    if device.type != "cuda":
        return f"it needs CUDA devices, not {device.type}"
    backend = symmetric_memory.get_backend(device)
    if backend != "CUDA":
        return f"it needs PyTorch's CUDA backend for symmetric memory, not {backend}"
    if len(set(gathered(_machine(), group, device))) > 1:
        return "the ranks are on several machines"
    return None


def gathered(value: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """An integer of every rank, on the host. Collective."""
    values = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(values, torch.tensor([value], device=device), group=group)
    found: list[int] = values.tolist()
    return found


def _machine() -> int:
    """A number that the processes of one machine share: containers may have host names of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.exists() else socket.gethostname()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
