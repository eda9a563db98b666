"""Generators by name."""

from __future__ import annotations

import zlib

import torch


def generator_of(name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on ``device`` that depends on ``name`` alone."""
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
