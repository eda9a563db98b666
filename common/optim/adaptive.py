"""LAMB, AdamW and Adam on shards.

With g the gradient times the group's multiplier and the factor, w the float32 weight, lambda the weight decay, lr the
learning rate times the group's scale and t = 1, 2, ... the number of the update:

    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    u  = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + lambda * w
    r  = |w| / |u|    by tensor; 1 where |w| or |u| is 0, and without trust ratio
    w <- w - lr * r * u

LAMB: You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2, with the identity as phi. A group
without decay still has its ratio unless that is switched off too: MLPerf BERT excludes biases and norms from both.
AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), without r. Adam: Kingma and Ba (2015),
without r, and with the decay in the gradient (g + lambda * w) instead of in u.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.ops.implementation import Implementation, OperationRequest, always, select
from common.optim.rules import GroupSettings, SumOverShards, Update, triton_unsupported
from common.optim.shard import Fragment, Shard

SMALLEST_EPSILON = torch.finfo(torch.float32).tiny
"""Below this epsilon is 0 in float32, and a weight that never had a gradient becomes 0 / 0."""


@dataclass(frozen=True)
class LAMB:
    """Adam with decoupled weight decay and one trust ratio for each tensor.

    Args:
        beta1, beta2: decay of the moments, in [0, 1).
        epsilon: added outside the square root.
        bias_correction: divide the moments by 1 - beta^t.
        norm_of: take |w| of the float32 masters or of the weights that the model computes with.

    Raises:
        ValueError: a beta or epsilon is out of its range.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    bias_correction: bool = True
    norm_of: Literal["master", "model"] = "master"

    def __post_init__(self) -> None:
        _check(self.beta1, self.beta2, self.epsilon)

    def bind(
        self,
        shards: Sequence[Shard],
        settings: Sequence[GroupSettings],
        tensors: int,
        sum_over_shards: SumOverShards,
        implementation: str,
    ) -> Update:
        """See :class:`common.optim.rules.Rule`."""
        rule = Moments(
            self.beta1, self.beta2, self.epsilon, self.bias_correction, norm_of_model=self.norm_of == "model"
        )
        return _bind(rule, shards, settings, tensors, sum_over_shards, implementation)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay.

    Args:
        beta1, beta2: decay of the moments, in [0, 1).
        epsilon: added outside the square root.

    Raises:
        ValueError: a beta or epsilon is out of its range.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check(self.beta1, self.beta2, self.epsilon)

    def bind(
        self,
        shards: Sequence[Shard],
        settings: Sequence[GroupSettings],
        tensors: int,
        sum_over_shards: SumOverShards,
        implementation: str,
    ) -> Update:
        """See :class:`common.optim.rules.Rule`.

        Raises:
            ValueError: a group asks for a trust ratio.
        """
        _refuse_trust_ratio("AdamW", settings)
        rule = Moments(self.beta1, self.beta2, self.epsilon)
        return _bind(rule, shards, settings, tensors, sum_over_shards, implementation)


@dataclass(frozen=True)
class Adam:
    """Adam; the weight decay is part of the gradient.

    Args:
        beta1, beta2: decay of the moments, in [0, 1).
        epsilon: added outside the square root.

    Raises:
        ValueError: a beta or epsilon is out of its range.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check(self.beta1, self.beta2, self.epsilon)

    def bind(
        self,
        shards: Sequence[Shard],
        settings: Sequence[GroupSettings],
        tensors: int,
        sum_over_shards: SumOverShards,
        implementation: str,
    ) -> Update:
        """See :class:`common.optim.rules.Rule`.

        Raises:
            ValueError: a group asks for a trust ratio.
        """
        _refuse_trust_ratio("Adam", settings)
        rule = Moments(self.beta1, self.beta2, self.epsilon, decay_in_gradient=True)
        return _bind(rule, shards, settings, tensors, sum_over_shards, implementation)


@dataclass(frozen=True)
class Moments:
    """The hyperparameters that LAMB, AdamW and Adam come down to; see the formulas at the top."""

    beta1: float
    beta2: float
    epsilon: float
    bias_correction: bool = True
    decay_in_gradient: bool = False
    norm_of_model: bool = False


@dataclass(frozen=True)
class _Run:
    """Neighbouring fragments of one group: what one chain of flat operations updates."""

    part: slice
    settings: GroupSettings
    fragments: tuple[Fragment, ...]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The fragments in ``flat``, a tensor that starts where the run starts."""
        first = self.part.start
        return [flat[f.start - first : f.start - first + f.numel] for f in self.fragments]


class TorchAdaptive:
    """LAMB, AdamW and Adam in plain PyTorch: flat operations by run, norms and ratios by tensor."""

    implementation = "torch"

    def __init__(
        self,
        rule: Moments,
        shards: Sequence[Shard],
        settings: Sequence[GroupSettings],
        tensors: int,
        sum_over_shards: SumOverShards,
    ) -> None:
        self._rule = rule
        self._shards = shards
        self._sum_over_shards = sum_over_shards
        self._runs = [_runs(shard, settings) for shard in shards]
        self._any_trust = any(group.trust_ratio for group in settings)
        self._averages = [shard.new_state() for shard in shards]
        self._square_averages = [shard.new_state() for shard in shards]
        widest = torch.float64 if any(s.masters.dtype == torch.float64 for s in shards) else torch.float32
        # Sums of squares by tensor: all weights, then all directions u. One tensor, so that one collective sums both.
        self._squares = torch.zeros(2 * tensors, dtype=widest, device=shards[0].masters.device)

    @property
    def states(self) -> dict[str, list[Tensor]]:
        """See :class:`common.optim.rules.Update`."""
        return {"exp_avg": self._averages, "exp_avg_sq": self._square_averages}

    def measure(self, report: Tensor) -> None:
        """See :class:`common.optim.rules.Update`."""
        for shard, runs in zip(self._shards, self._runs, strict=True):
            report[0] += ~torch.isfinite(shard.gradients).all()
            for run in runs:
                norm = torch.linalg.vector_norm(shard.gradients[run.part], dtype=shard.masters.dtype)
                report[1] += (norm * run.settings.grad_multiplier).square() * run.settings.norm_share

    def apply(self, learning_rate: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        """See :class:`common.optim.rules.Update`."""
        corrections = self._corrections(step)
        directions = []
        self._squares.zero_()
        for shard, runs, m, v in zip(self._shards, self._runs, self._averages, self._square_averages, strict=True):
            for run in runs:
                direction = self._direction(shard, run, m[run.part], v[run.part], corrections, grad_factor, write)
                if run.settings.trust_ratio:
                    self._add_squares(shard, run, direction)
                directions.append((shard, run, direction))
        if self._any_trust:
            self._sum_over_shards(self._squares)
        ratios = self._ratios()
        for shard, run, direction in directions:
            if run.settings.trust_ratio:
                torch._foreach_mul_(run.views(direction), [ratios[f.tensor] for f in run.fragments])
            weights = shard.masters[run.part]
            moved = weights - (learning_rate * run.settings.lr_scale) * direction
            _write_where(write, weights, moved)
            if shard.has_masters:
                _write_where(write, shard.parameters[run.part], moved.to(shard.parameters.dtype))

    def _corrections(self, step: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """What m and sqrt(v) are multiplied with; float64, since 1 - beta cancels."""
        if not self._rule.bias_correction:
            return 1.0, 1.0
        count = (step + 1).double()
        return 1.0 / (1.0 - self._rule.beta1**count), (1.0 - self._rule.beta2**count).rsqrt()

    def _direction(
        self,
        shard: Shard,
        run: _Run,
        average: Tensor,
        square_average: Tensor,
        corrections: tuple[Tensor | float, Tensor | float],
        grad_factor: Tensor,
        write: Tensor,
    ) -> Tensor:
        """Update the moments of one run; returns its u."""
        rule, decay, weights = self._rule, run.settings.weight_decay, shard.masters[run.part]
        gradient = shard.gradients[run.part].to(weights.dtype) * (run.settings.grad_multiplier * grad_factor)
        if rule.decay_in_gradient and decay:
            gradient = gradient + decay * weights
        moved = rule.beta1 * average + (1.0 - rule.beta1) * gradient
        moved_square = rule.beta2 * square_average + (1.0 - rule.beta2) * gradient.square()
        direction = (moved * corrections[0]) / (moved_square.sqrt() * corrections[1] + rule.epsilon)
        if decay and not rule.decay_in_gradient:
            direction = direction + decay * weights
        _write_where(write, average, moved)
        _write_where(write, square_average, moved_square)
        return direction

    def _add_squares(self, shard: Shard, run: _Run, direction: Tensor) -> None:
        weights = (shard.parameters if self._rule.norm_of_model else shard.masters)[run.part]
        tensors = self._squares.numel() // 2
        for offset, flat in ((0, weights), (tensors, direction)):
            norms = torch._foreach_norm(run.views(flat), dtype=shard.masters.dtype)
            for fragment, norm in zip(run.fragments, norms, strict=True):
                self._squares[offset + fragment.tensor] = norm.square()

    def _ratios(self) -> Tensor:
        weight_norms, direction_norms = self._squares.sqrt().chunk(2)
        defined = (weight_norms > 0) & (direction_norms > 0)
        return torch.where(defined, weight_norms / direction_norms, torch.ones_like(weight_norms))


def _runs(shard: Shard, settings: Sequence[GroupSettings]) -> list[_Run]:
    runs: list[_Run] = []
    for fragment in shard.fragments:
        group = settings[fragment.group]
        if runs and runs[-1].settings is group and runs[-1].part.stop == fragment.start:
            last = runs.pop()
            runs.append(_Run(slice(last.part.start, fragment.stop), group, (*last.fragments, fragment)))
        else:
            runs.append(_Run(slice(fragment.start, fragment.stop), group, (fragment,)))
    return runs


def _write_where(write: Tensor, target: Tensor, value: Tensor) -> None:
    target.copy_(torch.where(write, value, target))


def _check(beta1: float, beta2: float, epsilon: float) -> None:
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name}={beta}: it must be at least 0 and below 1")
    if not epsilon >= SMALLEST_EPSILON:
        raise ValueError(f"epsilon={epsilon}: it must be at least {SMALLEST_EPSILON:.2g}")


def _refuse_trust_ratio(rule: str, settings: Sequence[GroupSettings]) -> None:
    if any(group.trust_ratio for group in settings):
        raise ValueError(f"{rule} has no trust ratio; use LAMB for parameter groups with trust_ratio=True")


def _triton_adaptive(
    rule: Moments,
    shards: Sequence[Shard],
    settings: Sequence[GroupSettings],
    tensors: int,
    sum_over_shards: SumOverShards,
) -> Update:
    from common.optim.adaptive_triton import TritonAdaptive  # triton is imported only where it is used

    return TritonAdaptive(rule, shards, settings, tensors, sum_over_shards)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "triton": Implementation("triton", _triton_adaptive, triton_unsupported),
    "torch": Implementation("torch", TorchAdaptive, always),
}
"""How LAMB, AdamW and Adam run: multi-tensor kernels, or plain PyTorch."""


def _bind(
    rule: Moments,
    shards: Sequence[Shard],
    settings: Sequence[GroupSettings],
    tensors: int,
    sum_over_shards: SumOverShards,
    implementation: str,
) -> Update:
    dtypes = [shard.parameters.dtype for shard in shards]
    widest = torch.float64 if torch.float64 in dtypes else dtypes[0]  # the kernels refuse float64 in any shard
    request = OperationRequest(shards[0].parameters.device, widest, channels=0)
    chosen = select(IMPLEMENTATIONS, implementation, request).function
    update: Update = chosen(rule, shards, settings, tensors, sum_over_shards)
    return update
