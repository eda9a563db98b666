"""The optimizer: flat buffers, reduction of gradients, and one update rule, driven from the device.

Nothing here waits for the device: learning rate, step counter, overflow flag and the decision to write are device
tensors, so the whole iteration can be captured in a CUDA graph. With one rank it is simply a fused optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed.layout import AXES, Layout
from common.errors import CheckpointError
from common.optim.flat import build_flat_buffers
from common.optim.reduce import GradientReducer
from common.optim.rules import GroupSettings, Rule


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated alike.

    Attributes:
        parameters: name to parameter, in the order of the model.
        weight_decay: lambda; part of the gradient.
        lr_scale: factor on the schedule's learning rate.
        trust_ratio: scale the learning rate by layer (LARS).
        grad_scale: what the gradient, summed over ranks and micro-batches, is multiplied with before anything else,
            beside the optimizer's own ``grad_divisor``.
        learning_rate_in_momentum: whether the momentum buffer holds steps (m <- mu m - lr tau d; w <- w + m) or
            directions (v <- mu v + tau d; w <- w - lr v).
        replicated_over: axes of the layout whose ranks compute these layers redundantly; over them the gradients are
            averaged, not summed.
    """

    parameters: Mapping[str, nn.Parameter]
    weight_decay: float = 0.0
    lr_scale: float = 1.0
    trust_ratio: bool = False
    grad_scale: float = 1.0
    learning_rate_in_momentum: bool = True
    replicated_over: tuple[str, ...] = ()


class Updater(Protocol):
    """What a training step drives: ``begin``, the micro-batches, ``arm`` before the last backward pass, ``update``."""

    def begin(self) -> None:
        """Start an iteration: zero the gradients in place."""

    def arm(self) -> None:
        """Called before the backward pass of the last micro-batch: reductions may start from now on."""

    def update(self, skip: Tensor) -> None:
        """Wait for the reduction and update; ``skip`` (0-d float32 device tensor) != 0 writes nothing at all."""

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """All persistent device tensors: masters, momentum, step counter."""

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter name, as tensors of the parameters' shapes."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Name to 0-d device tensor, about the last update."""


class Optimizer:
    """The one concrete updater: groups of parameters under one rule and one schedule.

    Building it moves all parameters into flat buffers; cast and move the model before. Every rank builds it with the
    same groups in the same order.

    Args:
        groups: the parameters; no parameter and no name may occur twice.
        rule: LARS or SGD.
        schedule: learning rate (0-d float32) from the step counter (0-d int64), on the device.
        layout: gradients are summed over its ``dp`` axis.
        grad_divisor: the gradients, summed over all micro-batches and ``dp`` ranks, divided by this are the mean over
            the global batch.
        bucket_bytes: size from which on a bucket of gradients is reduced.
        overlap: reduce buckets during the last backward pass rather than after it.
        implementation: of the rule: ``auto`` or a name of ``common.optim.rules.IMPLEMENTATIONS``.

    Attributes:
        implementation: the implementation that was chosen.

    Raises:
        ValueError: no parameters, one that occurs twice or cannot lie in a flat buffer, an unknown axis, or a
            ``grad_divisor`` that is not positive.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        rule: Rule,
        schedule: Callable[[Tensor], Tensor],
        layout: Layout,
        *,
        grad_divisor: float,
        bucket_bytes: int = 32 << 20,
        overlap: bool = True,
        implementation: str = "auto",
    ) -> None:
        if not grad_divisor > 0:
            raise ValueError(f"grad_divisor={grad_divisor}: it must be positive")
        _check_groups(groups)
        self._schedule = schedule
        self._buffers = build_flat_buffers([group.parameters for group in groups])
        settings = [_settings(group, layout, grad_divisor) for group in groups]
        self._update = rule.bind(self._buffers, settings, implementation)
        self.implementation = self._update.implementation
        process_groups = [layout.group(*dict.fromkeys(("dp", *group.replicated_over))) for group in groups]
        self._reducer = GradientReducer(self._buffers, process_groups, bucket_bytes, overlap)
        self._other_ranks = layout.group(*(axis for axis in AXES if axis != "dp"))
        device = self._buffers[0].device
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._learning_rate = torch.zeros((), dtype=torch.float32, device=device)
        self._overflow = torch.zeros((), dtype=torch.float32, device=device)

    def begin(self) -> None:
        """Start an iteration: zero the gradients in place.

        Raises:
            RuntimeError: a parameter or gradient was detached from its flat buffer.
        """
        self.check_views()
        for buffer in self._buffers:
            buffer.zero_gradients()
        self._reducer.begin()

    def arm(self) -> None:
        """Let the next backward pass start reductions: it is the last of the iteration."""
        self._reducer.arm()

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Wait for the reduction, then update.

        Nothing is written, not even the step counter, if ``skip`` is not 0 or a gradient is not finite on any rank.

        Args:
            skip: 0-d float32 tensor on the device of the parameters.
        """
        self._reducer.finish()
        self._learning_rate.copy_(self._schedule(self._step))
        self._update.measure(self._overflow)
        if self._other_ranks is not None:
            dist.all_reduce(self._overflow, op=dist.ReduceOp.MAX, group=self._other_ranks)
        write = (skip == 0) & (self._overflow == 0)
        self._update.apply(self._learning_rate, write)
        self._step.add_(write)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """``learning_rate`` of the last update; ``overflow``: 1 if a gradient was not finite: nothing was written."""
        return {"learning_rate": self._learning_rate, "overflow": self._overflow}

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """The step counter and the flat tensors of masters (half parameters only) and state."""
        named = [("step", self._step)]
        for index, buffer in enumerate(self._buffers):
            dtype = str(buffer.dtype).removeprefix("torch.")
            if buffer.has_masters:
                named.append((f"masters.{dtype}", buffer.masters))
            named.extend((f"{kind}.{dtype}", flats[index]) for kind, flats in self._update.states.items())
        return named

    def state_dict(self) -> dict[str, Any]:
        """Copies of the state: ``step``, and per kind (``masters`` of half parameters, ``momentum``) name to tensor."""
        entries: dict[str, Any] = {"step": self._step.clone()}
        for (kind, name), view in self._views().items():
            entries.setdefault(kind, {})[name] = view.clone()
        return entries

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; half parameters are set to their rounded masters.

        Raises:
            CheckpointError: an entry is missing, unexpected, or has another shape. Nothing is changed then.
        """
        views = self._views()
        loaded = {(kind, name): t for kind, named in state.items() if kind != "step" for name, t in named.items()}
        _check_state(views, loaded, "step" in state)
        self._step.copy_(state["step"])
        for key, view in views.items():
            view.copy_(loaded[key])
        for buffer in self._buffers:
            if buffer.has_masters:
                buffer.parameters.copy_(buffer.masters)

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Set the masters to the model's weights, after these were loaded without a state of the optimizer."""
        for buffer in self._buffers:
            buffer.reset_masters()

    def check_views(self) -> None:
        """Compare pointers on the host.

        Raises:
            RuntimeError: a parameter or gradient was detached from its flat buffer.
        """
        for buffer in self._buffers:
            buffer.check()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._reducer.close()

    def _views(self) -> dict[tuple[str, str], Tensor]:
        """Kind and parameter name to the view of the state that has the parameter's shape."""
        views = {}
        for index, buffer in enumerate(self._buffers):
            kinds = {kind: flats[index] for kind, flats in self._update.states.items()}
            if buffer.has_masters:
                kinds["masters"] = buffer.masters
            for kind, flat in kinds.items():
                views.update({(kind, s.name): buffer.view(flat, s) for s in buffer.segments})
        return views


def _settings(group: ParameterGroup, layout: Layout, grad_divisor: float) -> GroupSettings:
    return GroupSettings(
        grad_multiplier=group.grad_scale / (grad_divisor * layout.size(*dict.fromkeys(group.replicated_over))),
        weight_decay=group.weight_decay,
        lr_scale=group.lr_scale,
        trust_ratio=group.trust_ratio,
        learning_rate_in_momentum=group.learning_rate_in_momentum,
    )


def _check_groups(groups: Sequence[ParameterGroup]) -> None:
    names: dict[str, int] = {}
    owners: dict[int, str] = {}
    for index, group in enumerate(groups):
        for axis in group.replicated_over:
            if axis not in AXES:
                raise ValueError(f"replicated_over names an unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        for name, parameter in group.parameters.items():
            if name in names:
                raise ValueError(f"parameter {name!r} is in groups {names[name]} and {index}")
            if id(parameter) in owners:
                raise ValueError(f"{name!r} and {owners[id(parameter)]!r} are the same parameter: list it once")
            names[name] = index
            owners[id(parameter)] = name


def _check_state(
    views: Mapping[tuple[str, str], Tensor], loaded: Mapping[tuple[str, str], Tensor], has_step: bool
) -> None:
    missing = [".".join(key) for key in views if key not in loaded] + ([] if has_step else ["step"])
    unexpected = [".".join(key) for key in loaded if key not in views]
    reshaped = [
        f"{'.'.join(key)} {tuple(loaded[key].shape)} instead of {tuple(view.shape)}"
        for key, view in views.items()
        if key in loaded and loaded[key].shape != view.shape
    ]
    problems = [
        f"{what}: {', '.join(entries[:5])}{f' and {len(entries) - 5} more' if len(entries) > 5 else ''}"
        for what, entries in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        if entries
    ]
    if problems:
        raise CheckpointError(f"the optimizer's state does not fit the model: {'; '.join(problems)}")
