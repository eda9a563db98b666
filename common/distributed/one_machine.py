"""Check whether the ranks of a group can map each other's GPU memory, as symmetric memory requires."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory


def refusal(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why symmetric memory cannot be used, or None if it may work; the same on all ranks. Collective."""
    if device.type != "cuda":
        return f"it needs CUDA devices, not {device.type}"
    backend = symmetric_memory.get_backend(device)
    if backend != "CUDA":
        return f"it needs PyTorch's CUDA backend for symmetric memory, not {backend}"
    if len(set(gathered(_machine(), group, device))) > 1:
        return "the ranks are on several machines"
    return None


def gathered(value: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the ``value`` of every rank, on the host. Collective."""
    values = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(values, torch.tensor([value], device=device), group=group)
    found: list[int] = values.tolist()
    return found


def _machine() -> int:
    """Return a number that identifies this machine. Host names do not, because containers may have different ones."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.exists() else socket.gethostname()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
