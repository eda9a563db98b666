"""Tensors of a model that never change while it trains, such as a base below low-rank adapters.

They may be most of the memory, so that nobody copies or sends them: not the optimizer, not a checkpoint (which stores
the digest of the base), not the transfer to ranks that evaluate, not what is put back after warm-up. A module says of
its own tensors that they are frozen, and whoever has the model at hand asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

_MARK = "_frozen_tensor_names"


def mark_frozen(module: nn.Module, names: Iterable[str]) -> None:
    """Say that parameters or buffers of ``module`` are frozen; parameters stop asking for gradients.

    Args:
        module: a layer, or a whole model.
        names: of its tensors, as ``named_parameters`` and ``named_buffers`` have them.

    Raises:
        ValueError: the module has no such tensor.
    """
    wanted = set(names)
    found = {name: tensor for name, tensor in _tensors(module) if name in wanted}
    if missing := sorted(wanted - found.keys()):
        raise ValueError(f"{type(module).__name__} has no parameter and no buffer {missing[0]!r} that could be frozen")
    for tensor in found.values():
        tensor.requires_grad_(False)
    setattr(module, _MARK, getattr(module, _MARK, frozenset()) | wanted)


def frozen_names(model: nn.Module) -> frozenset[str]:
    """The names of all tensors of ``model`` that it or a module in it marked, by every name that they have in it."""
    marked = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in getattr(module, _MARK, ())
    }
    if not marked:
        return frozenset()
    every = list(_tensors(model))
    frozen = {id(tensor) for name, tensor in every if name in marked}
    return frozenset(name for name, tensor in every if id(tensor) in frozen)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def frozen_digest(model: nn.Module) -> str:
    """Identity of the frozen tensors of ``model``: the SHA-256 of their names and bytes, in the order of names."""
    made, frozen = hashlib.sha256(), frozen_names(model)
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        if name in frozen:
            made.update(name.encode())
            made.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()
