"""Update rules on flat buffers: LARS and SGD.

A rule holds hyperparameters only. Bound to flat buffers it becomes an Update, which works in two halves: ``measure``
reads what the update depends on (norms, and whether all gradients are finite), ``apply`` writes. Between the two the
optimizer decides on the device whether anything may be written.

With g the gradient times the group's multiplier, w the float32 weight, lambda the weight decay, mu the momentum and
lr the learning rate times the group's scale:

    tau = eta * |w| / (|g| + lambda * |w| + epsilon)    trust ratio; 1 where |w| or |g| is 0, and without trust ratio
    d   = g + lambda * w
    learning rate in the momentum:   m <- mu * m - lr * tau * d;  w <- w + m
    outside:                         m <- mu * m + tau * d;       w <- w - lr * m

Both forms agree while the learning rate is constant. LARS: You, Gitman, Ginsburg, "Large Batch Training of
Convolutional Networks" (2017), algorithm 1; the first form is the MLPerf ResNet reference's, the second with LARS
equals the momentum correction of NVIDIA's submissions.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from common.ops.implementation import Implementation, OperationRequest, always, select
from common.optim.flat import FlatBuffer, Segment


@dataclass(frozen=True)
class GroupSettings:
    """What a rule needs to know of a parameter group.

    Attributes:
        grad_multiplier: turns the gradient in the buffer into the mean over the global batch.
        weight_decay, lr_scale, trust_ratio, learning_rate_in_momentum: see ``ParameterGroup``.
    """

    grad_multiplier: float
    weight_decay: float
    lr_scale: float
    trust_ratio: bool
    learning_rate_in_momentum: bool


class Update(Protocol):
    """A rule bound to flat buffers. Nothing in it waits for the device."""

    implementation: str

    @property
    def states(self) -> dict[str, list[Tensor]]:
        """Persistent state: for each kind one float32 flat tensor per buffer."""

    def measure(self, overflow: Tensor) -> None:
        """Read gradients and weights; set ``overflow`` (0-d float32) to 1 if a gradient is not finite, else to 0."""

    def apply(self, learning_rate: Tensor, write: Tensor) -> None:
        """Update weights, masters and state if ``write`` (0-d bool) is true; otherwise leave every bit as it is."""


class Rule(Protocol):
    """Hyperparameters of an update rule."""

    def bind(self, buffers: Sequence[FlatBuffer], settings: Sequence[GroupSettings], implementation: str) -> Update:
        """Allocate the state for ``buffers``; ``settings`` holds one entry for each parameter group."""


@dataclass(frozen=True)
class LARS:
    """Layer-wise adaptive rate scaling with momentum.

    Args:
        momentum: mu.
        eta: trust coefficient.
        epsilon: added to the denominator of the trust ratio.
        norm_of: take |w| of the float32 masters or of the weights that the model computes with.
    """

    momentum: float
    eta: float = 0.001
    epsilon: float = 0.0
    norm_of: Literal["master", "model"] = "master"

    def bind(self, buffers: Sequence[FlatBuffer], settings: Sequence[GroupSettings], implementation: str) -> Update:
        """See :class:`Rule`."""
        rule = Momentum(self.momentum, False, self.eta, self.epsilon, self.norm_of == "model")
        return _bind(rule, buffers, settings, implementation)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum; the weight decay is part of the gradient.

    Args:
        momentum: mu.
        nesterov: step along mu * (new buffer) plus the new term instead of the new buffer.
    """

    momentum: float
    nesterov: bool = False

    def bind(self, buffers: Sequence[FlatBuffer], settings: Sequence[GroupSettings], implementation: str) -> Update:
        """See :class:`Rule`.

        Raises:
            ValueError: a group asks for a trust ratio.
        """
        if any(group.trust_ratio for group in settings):
            raise ValueError("SGD has no trust ratio; use LARS for parameter groups with trust_ratio=True")
        return _bind(Momentum(self.momentum, self.nesterov, 0.0, 0.0, False), buffers, settings, implementation)


@dataclass(frozen=True)
class Momentum:
    """The hyperparameters that LARS and SGD come down to; see the formulas at the top."""

    momentum: float
    nesterov: bool
    eta: float
    epsilon: float
    norm_of_model: bool


class TorchMomentum:
    """LARS and SGD in plain PyTorch: one chain of operations per tensor with a trust ratio, per group without."""

    implementation = "torch"

    def __init__(self, rule: Momentum, buffers: Sequence[FlatBuffer], settings: Sequence[GroupSettings]) -> None:
        self._rule = rule
        self._buffers = buffers
        self._settings = settings
        self._momenta = [buffer.new_state() for buffer in buffers]
        self._trusted = [(b, s) for b in buffers for s in b.segments if settings[s.group].trust_ratio]
        self._ratios: dict[str, Tensor] = {}

    @property
    def states(self) -> dict[str, list[Tensor]]:
        """See :class:`Update`."""
        return {"momentum": self._momenta}

    def measure(self, overflow: Tensor) -> None:
        """See :class:`Update`."""
        finite = torch.stack([torch.isfinite(buffer.gradients).all() for buffer in self._buffers]).all()
        overflow.copy_(~finite)
        for buffer, segment in self._trusted:
            weights = buffer.parameters if self._rule.norm_of_model else buffer.masters
            settings = self._settings[segment.group]
            grad_norm = _norm(buffer.gradients, segment) * settings.grad_multiplier
            self._ratios[segment.name] = self._trust_ratio(_norm(weights, segment), grad_norm, settings.weight_decay)

    def apply(self, learning_rate: Tensor, write: Tensor) -> None:
        """See :class:`Update`."""
        for buffer, momenta in zip(self._buffers, self._momenta, strict=True):
            for group, settings in enumerate(self._settings):
                members = [s for s in buffer.segments if s.group == group]
                rate = learning_rate * settings.lr_scale
                parts: list[tuple[slice, Tensor | None]]
                if settings.trust_ratio:
                    parts = [(slice(s.start, s.stop), self._ratios[s.name]) for s in members]
                else:
                    parts = [(slice(members[0].start, members[-1].stop), None)] if members else []
                for part, ratio in parts:
                    self._update(buffer, momenta, part, settings, rate, ratio, write)

    def _trust_ratio(self, weight_norm: Tensor, grad_norm: Tensor, weight_decay: float) -> Tensor:
        ratio = self._rule.eta * weight_norm / (grad_norm + weight_decay * weight_norm + self._rule.epsilon)
        return torch.where((weight_norm > 0) & (grad_norm > 0), ratio, torch.ones_like(ratio))

    def _update(
        self,
        buffer: FlatBuffer,
        momenta: Tensor,
        part: slice,
        settings: GroupSettings,
        rate: Tensor,
        ratio: Tensor | None,
        write: Tensor,
    ) -> None:
        mu = self._rule.momentum
        weights, momentum = buffer.masters[part], momenta[part]
        step = buffer.gradients[part].to(weights.dtype) * settings.grad_multiplier
        if settings.weight_decay:
            step = step + settings.weight_decay * weights
        if ratio is not None:
            step = step * ratio
        step = -rate * step if settings.learning_rate_in_momentum else step
        new_momentum = mu * momentum + step
        direction = mu * new_momentum + step if self._rule.nesterov else new_momentum
        new_weights = weights + (direction if settings.learning_rate_in_momentum else -rate * direction)
        momentum.copy_(torch.where(write, new_momentum, momentum))
        weights.copy_(torch.where(write, new_weights, weights))
        if buffer.has_masters:
            parameters = buffer.parameters[part]
            parameters.copy_(torch.where(write, new_weights.to(buffer.dtype), parameters))


def _norm(buffer: Tensor, segment: Segment) -> Tensor:
    dtype = torch.promote_types(buffer.dtype, torch.float32)
    return torch.linalg.vector_norm(buffer[segment.start : segment.stop], dtype=dtype)


def _triton_momentum(rule: Momentum, buffers: Sequence[FlatBuffer], settings: Sequence[GroupSettings]) -> Update:
    from common.optim.rules_triton import TritonMomentum  # triton is imported only where it is used

    return TritonMomentum(rule, buffers, settings)


def _triton_unsupported(request: OperationRequest) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if request.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"a Triton kernel needs a GPU, not {request.device.type}"
    if request.dtype == torch.float64:
        return "the kernel computes in float32, the parameters are float64"
    return None


IMPLEMENTATIONS: dict[str, Implementation] = {
    "triton": Implementation("triton", _triton_momentum, _triton_unsupported),
    "torch": Implementation("torch", TorchMomentum, always),
}
"""How LARS and SGD run: multi-tensor kernels, or plain PyTorch."""


def _bind(
    rule: Momentum, buffers: Sequence[FlatBuffer], settings: Sequence[GroupSettings], implementation: str
) -> Update:
    request = OperationRequest(buffers[0].device, buffers[0].dtype, channels=0)
    update: Update = select(IMPLEMENTATIONS, implementation, request).function(rule, buffers, settings)
    return update
