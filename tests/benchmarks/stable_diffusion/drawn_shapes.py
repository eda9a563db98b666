"""Pictures of one coloured shape on a coloured background, and what is in them in words."""

from __future__ import annotations

import random

import torch
from torch import Tensor

COLOURS = {"red": (0.9, 0.1, 0.1), "green": (0.1, 0.7, 0.2), "blue": (0.1, 0.2, 0.9), "yellow": (0.9, 0.8, 0.1)}
SHAPES = ("circle", "square", "triangle")


def drawn(count: int, size: int, seed: int) -> tuple[Tensor, list[str]]:
    """(N, 3, size, size) in [0, 1], and N captions."""
    generator = random.Random(seed)
    line = (torch.arange(size) + 0.5) / size
    y, x = line[:, None], line[None, :]
    pictures, captions = [], []
    for _ in range(count):
        inner, outer = generator.sample(list(COLOURS), 2)
        shape = generator.choice(SHAPES)
        u, v, radius = (generator.uniform(low, high) for low, high in ((0.35, 0.65), (0.35, 0.65), (0.2, 0.3)))
        if shape == "circle":
            mask = (x - u) ** 2 + (y - v) ** 2 < radius**2
        elif shape == "square":
            mask = ((x - u).abs() < radius * 0.9) & ((y - v).abs() < radius * 0.9)
        else:
            mask = (y - v < radius) & ((x - u).abs() * 2 < y - v + radius)
        front, back = (torch.tensor(COLOURS[name])[:, None, None] for name in (inner, outer))
        pictures.append(torch.where(mask, front, back))
        captions.append(f"a {inner} {shape} on a {outer} background")
    return torch.stack(pictures), captions
