"""Simulated CUDA graphs for a CPU: a replay repeats the recorded work into the same memory.

They have the limits of CUDA graphs: recording computes nothing; a replay overwrites the results of other graphs of its
pool; and a replay does not run Python code such as hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def _tensors(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result.values())


def _spoil(result: Any) -> None:
    for tensor in _tensors(result):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


class _Played:
    def __init__(self, graphs: PlayedGraphs, work: Callable[[], Any], pool: Hashable, result: Any) -> None:
        self._graphs, self._work, self._pool, self._result = graphs, work, pool, result
        self.alive = True

    def replay(self) -> None:
        """Do the work again, and copy its result into the recorded result."""
        assert self.alive, "a graph was replayed after its end"
        self._graphs.replays += 1
        for other in self._graphs.results[self._pool]:
            _spoil(other)
        with self._graphs.at_work(), self._graphs.without_hooks():
            again = self._work()
        with torch.no_grad():
            for to, made in zip(_tensors(self._result), _tensors(again), strict=True):
                to.copy_(made)

    def reset(self) -> None:
        """Forbid further replays."""
        self.alive = False


class PlayedGraphs:
    """Recorder of simulated graphs. Replays do not run the hooks of ``modules``."""

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        self.recorded: list[tuple[str, Hashable]] = []
        self.replays = 0
        self.busy = False
        self.results: dict[Hashable, list[Any]] = {}

    def record(self, work: Callable[[], Any], what: str, pool: Hashable) -> tuple[_Played, Any]:
        """See :class:`common.step.capture.Recorder`."""
        with self.at_work():
            made = work()
        named = isinstance(made, dict)
        result = {n: v.detach().clone() for n, v in made.items()} if named else None if made is None else made.clone()
        if isinstance(result, Tensor):
            result = result.detach()
        _spoil(result)
        self.recorded.append((what, pool))
        self.results.setdefault(pool, []).append(result)
        return _Played(self, work, pool, result), result

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Mark the work in the block as part of a graph."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    @contextlib.contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Disable the hooks of modules and parameters in the block."""
        hooks: list[Any] = []
        for module in self._modules:
            hooks += [member._forward_pre_hooks for member in module.modules()]
            hooks += [parameter._post_accumulate_grad_hooks for parameter in module.parameters()]
        hooks = [entries for entries in {id(entries): entries for entries in hooks}.values() if entries]
        kept = [list(entries.items()) for entries in hooks]
        for entries in hooks:
            entries.clear()
        try:
            yield
        finally:
            for entries, items in zip(hooks, kept, strict=True):
                entries.update(items)
