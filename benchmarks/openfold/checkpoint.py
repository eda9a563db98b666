"""The published checkpoint that training continues: weights, and the state of Adam.

It is a file of ``torch.save`` with two entries. ``alphafold_state_dict`` maps names, which :func:`own_name` translates,
to tensors. ``optimizer_state_dict`` is the state of ``torch.optim.Adam``; its parameters have the order of
the first entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.errors import CheckpointError
from common.optim.optimizer import Optimizer
from common.untrusted.tensor_file import read_values

WEIGHTS, STATE = "alphafold_state_dict", "optimizer_state_dict"
MOMENTS = ("exp_avg", "exp_avg_sq")


RENAMED = (
    (re.compile(r"^((?:evoformer|extra_msa)_stack\.blocks\.\d+)\.core\."), r"\1."),
    (re.compile(r"^structure_module\.transition\.linear_"), "structure_module.transition.layers.0.linear_"),
)
"""Beginnings of published names, and their replacements in :class:`benchmarks.openfold.model.AlphaFold`."""


def own_name(published: str) -> str:
    """Return the name of a parameter in the network from its name in the checkpoint."""
    for pattern, own in RENAMED:
        published = pattern.sub(own, published)
    return published


class StartingPoint(NamedTuple):
    """The content of a checkpoint.

    Attributes:
        tensors: for each parameter its weight and both moments, fp32 on the CPU.
        steps: updates that Adam has done.
    """

    tensors: dict[str, tuple[Tensor, Tensor, Tensor]]
    steps: int


def read_checkpoint(path: Path, digest: str, model: nn.Module) -> StartingPoint:
    """Read a checkpoint for the parameters of ``model``.

    Args:
        digest: SHA-256 of the file.

    Raises:
        CheckpointError: the file is missing or damaged, or has another digest, or other tensors than the network.
    """
    content = read_values(path, "weights and a state of Adam", digest)
    try:
        weights, adam = content[WEIGHTS], content[STATE]
        numbers = [number for group in adam["param_groups"] for number in group["params"]]
        states = [adam["state"][number] for number in numbers]
        steps = {int(state["step"]) for state in states}
        tensors = {
            own_name(name): (weight, *(state[kind] for kind in MOMENTS))
            for (name, weight), state in zip(weights.items(), states, strict=True)
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: it is not a checkpoint of OpenFold with the state of Adam ({error!r})"
        ) from error
    _check(path, tensors, {name: parameter.shape for name, parameter in model.named_parameters()})
    if len(steps) != 1:
        raise CheckpointError(f"{path}: parameters have different numbers of updates, {min(steps)} to {max(steps)}")
    return StartingPoint(tensors, steps.pop())


def _check(path: Path, tensors: Mapping[str, tuple[Any, ...]], shapes: Mapping[str, torch.Size]) -> None:
    if different := sorted(tensors.keys() ^ shapes.keys()):
        raise CheckpointError(
            f"{path}: it has {len(tensors)} parameters, and the network {len(shapes)}; the first difference is "
            f"{different[0]}"
        )
    for name, parts in tensors.items():
        for part in parts:
            if not isinstance(part, Tensor) or part.shape != shapes[name] or part.dtype != torch.float32:
                raise CheckpointError(f"{path}: {name} is not fp32 of the shape {tuple(shapes[name])}")


def load(start: StartingPoint, optimizer: Optimizer) -> None:
    """Set parameters, masters and moments of ``optimizer``, and its counter of updates."""
    for name, parts in start.tensors.items():
        optimizer.put(name, **dict(zip(("masters", *MOMENTS), parts, strict=True)))
    optimizer.set_step(start.steps)
