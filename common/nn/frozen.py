"""Frozen tensors: parameters and buffers that never change in training, such as the base below low-rank adapters.

They may take most of the memory. Therefore the optimizer, checkpoints (which store only their digest), the transfer
to evaluation ranks and the restore after warm-up leave them out. Each module marks its own frozen tensors with
:func:`mark_frozen`, and :func:`frozen_names` collects them for a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

_MARK = "_frozen_tensor_names"


def mark_frozen(module: nn.Module, names: Iterable[str]) -> None:
    """Mark parameters or buffers of ``module`` as frozen, and set ``requires_grad`` to False.

    Args:
        module: a layer or a whole model.
        names: names of the tensors, as in ``named_parameters`` and ``named_buffers``.

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
    """Return the names of all frozen tensors of ``model``; a tensor with several names is listed with each."""
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
    """Return the SHA-256 of the names and bytes of all frozen tensors, sorted by name."""
    made, frozen = hashlib.sha256(), frozen_names(model)
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        if name in frozen:
            made.update(name.encode())
            made.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()
