"""The optimizer: flat buffers, gradient reduction, one update rule on shards, and gathering of the weights.

Nothing here waits for the device. Learning rate, step counter, overflow flag, clip factor, loss scale and the
decision to write are device tensors, so the whole iteration can be captured in a CUDA graph. On one rank it is a
fused optimizer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.errors import ConfigError
from common.ops.operation import asked_for
from common.optim import state
from common.optim.buffers import build_flat_buffers
from common.optim.clip import MicroBatchClipper
from common.optim.communication import GradientReducer, WeightGatherer, sum_in_order
from common.optim.groups import ParameterGroup as ParameterGroup
from common.optim.groups import ShardPlan, check_groups, micro_batch_axes, redundant_ranks, settings_of
from common.optim.peer_exchange import COPY_ENGINES, build_exchange
from common.optim.precision import GradientPrecision, LossScale
from common.optim.rules import Binding, Rule
from common.optim.updater import Updater as Updater

NORM_EPSILON = 1e-6  # as in apex's distributed optimizer


@dataclass(frozen=True)
class ClipNorm:
    """Options for clipping by the global norm over all parameters: a factor of min(1, max_norm / (norm + 1e-6)).

    Args:
        max_norm: largest norm of the mean gradient, without loss scale.
        when: ``after_reduction`` clips the mean over the global batch. ``before_reduction`` clips the mean over each
            micro-batch of each replica; the reduction can then start only after the last backward pass.

    Raises:
        ValueError: ``max_norm`` is not positive, or ``when`` is unknown.
    """

    max_norm: float
    when: Literal["before_reduction", "after_reduction"]

    def __post_init__(self) -> None:
        if not (self.max_norm > 0 and math.isfinite(self.max_norm)):
            raise ValueError(f"max_norm={self.max_norm}: the norm to clip to is positive")
        if self.when not in ("before_reduction", "after_reduction"):
            raise ValueError(f"when={self.when!r}: clip before_reduction or after_reduction")

    def factor(self, norm: Tensor) -> Tensor:
        """Return the factor for gradients of this norm. It is NaN if the norm is not finite; then no rank updates."""
        factor = (self.max_norm / (norm + NORM_EPSILON)).clamp(max=1.0)
        return torch.where(torch.isfinite(norm), factor, torch.full_like(norm, float("nan")))


class Optimizer:
    """The updater that applies one update rule to groups of parameters.

    Building it moves all parameters into flat buffers, so cast and move the model before. Every rank builds it with
    the same groups in the same order; pipeline stages (``pp``) list different parameters in them.

    Args:
        groups: the parameters; each parameter and each name may occur once.
        rule: LARS, SGD, LAMB, Adam, AdamW or Adagrad.
        schedule: maps the step counter (0-d int64) to the learning rate (0-d fp32) on the device; used by all groups
            without a schedule.
        layout: gradients are summed over its ``dp`` and ``cp`` axes, whose ranks hold the same weights. Each rank of
            ``cp`` has a part of every sample and of its gradient. Groups can add axes (``summed_over``).
        grad_divisor: divisor that turns the gradients, summed over all micro-batches and all ranks of ``dp`` and
            ``cp``, into the mean over the global batch. Splitting samples over ``cp`` does not change it.
        bucket_bytes: a bucket of gradients is closed when it has at least this many bytes.
        overlap: reduce buckets during the last backward pass rather than after it, and gather updated weights during
            the next forward pass rather than after the update.
        implementation: name of an implementation of the rule, or ``auto``.
        shard: ``none``: every rank updates all parameters. ``all``: the ranks of ``dp`` and ``cp`` share the
            parameters. ``node``: the ranks of ``dp`` and ``cp`` on one node share them, and each node holds all.
        reduction: with shards, ``scatter`` or ``all_reduce`` (see :mod:`common.optim.communication`).
        exchange: with shards, ``collectives``, or ``copy_engines`` between the ranks that share, on one machine (see
            :mod:`common.optim.peer_exchange`). Ranks with the same shard use collectives.
        ranks_per_node: number of consecutive ranks in a node, for ``shard="node"``.
        blocks: parts of the model in the order of the forward pass, whose weights are gathered just before they run
            (see :class:`common.optim.communication.WeightGatherer`). Without them gathers are not overlapped.
        clip: options for clipping by the global norm.
        micro_batches: micro-batches per iteration; used only for clipping before the reduction.
        loss_scale: scale of the loss. Several optimizers of one loss share it.
        masters: master weights of bfloat16 parameters. ``fp32``: fp32 tensors. ``remainder``: the other 16 bits of
            the fp32 master, which with the parameter give the exact master
            (:func:`common.optim.buffers.split_masters`).
        gradients: precision in which gradients of half-precision parameters are added up over micro-batches and
            ranks. ``same``: the parameters' dtype; ``fp32``: fp32.

    Attributes:
        implementation: name of the chosen implementation.
        choices: text for the log about how gradients are reduced and weights gathered.
        plan: which ranks share the parameters.
        buffers: the flat buffers with this rank's shards. Other updaters may read them.

    Raises:
        ValueError: no parameters, one that occurs twice or does not fit a flat buffer, an unknown axis, or an
            argument out of its range.
        UnsupportedImplementation: the implementation does not exist or does not support these parameters.
        ConfigError: the ranks of a node do not divide the ranks of ``dp`` and ``cp``, or copy engines cannot be used.
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
        shard: Literal["none", "node", "all"] = "none",
        reduction: Literal["scatter", "all_reduce"] = "scatter",
        exchange: Literal["collectives", "copy_engines"] = "collectives",
        ranks_per_node: int | None = None,
        blocks: Sequence[tuple[str, nn.Module]] = (),
        clip: ClipNorm | None = None,
        micro_batches: int = 1,
        loss_scale: LossScale | None = None,
        masters: Literal["fp32", "remainder"] = "fp32",
        gradients: GradientPrecision = "same",
    ) -> None:
        positive = {"grad_divisor": grad_divisor, "bucket_bytes": bucket_bytes, "micro_batches": micro_batches}
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: it must be positive and finite")
        if reduction not in ("scatter", "all_reduce"):
            raise ValueError(f"reduction={reduction!r}: use scatter or all_reduce")
        if gradients not in get_args(GradientPrecision):
            raise ValueError(f"gradients={gradients!r}: use same or fp32")
        if exchange == COPY_ENGINES and (shard == "none" or reduction == "all_reduce"):
            raise ConfigError(
                f"optimizer.exchange={exchange} replaces a scatter to shards: set optimizer.shard to node or all, and "
                "optimizer.reduction=scatter"
            )
        check_groups(groups)
        self.plan = plan = ShardPlan(layout, shard, ranks_per_node)
        self._schedule, self._clip, self.loss_scale = schedule, clip, loss_scale
        self._groups = tuple(groups)
        parts = {name: count for group in groups for name, count in group.parts.items()}
        members = [group.parameters for group in groups]
        self.buffers = buffers = build_flat_buffers(
            members, parts, plan.ranks, plan.index, bucket_bytes, gradients, masters == "remainder"
        )
        self._exchange = build_exchange(buffers, plan.group) if exchange == COPY_ENGINES else None
        clip_first = clip is not None and clip.when == "before_reduction"
        routes = [plan.route(group, done=micro_batch_axes(group) if clip_first else ()) for group in groups]
        settings = [settings_of(group, layout, grad_divisor) for group in groups]
        tensors = sum(buffer.tensors for buffer in buffers)
        sum_over_shards = functools.partial(sum_in_order, group=plan.group)
        binding = Binding([buffer.shard for buffer in buffers], settings, tensors, sum_over_shards)
        with asked_for("optimizer.implementation", implementation):
            self._update = rule.bind(binding, implementation)
        self.implementation = self._update.implementation
        self._clipper: MicroBatchClipper | None = None
        parts_of_samples = {axis for group in groups for axis in micro_batch_axes(group)}
        # The only micro-batch of a rank can be clipped in the sum over ranks, so its gradient is sent before.
        self._clips_in_sum = (
            clip_first and self._exchange is not None and micro_batches == 1 and layout.size(*parts_of_samples) == 1
        )
        self._clip_factor: Tensor | None = None
        if clip is not None and clip_first:
            micro = micro_batches * layout.size("dp") / grad_divisor
            means = [group.grad_scale * micro / redundant_ranks(group, layout, ["cp"]) for group in groups]
            shares = [entry.norm_share for entry in settings]
            others, sharing = plan.other_ranks, [plan.parts_of_a_micro_batch(group) for group in groups]
            in_place = not self._clips_in_sum
            self._clipper = MicroBatchClipper(
                clip.factor, buffers, means, shares, micro_batches, others, sharing, in_place
            )
        plan.check_tied(groups, routes, buffers[0].device)
        early = overlap and (not clip_first or self._clips_in_sum)
        self._reducer = GradientReducer(buffers, routes, early, reduction == "all_reduce", self._exchange)
        self._gatherer = WeightGatherer(buffers, plan.group, blocks if overlap else (), self._exchange)
        self.choices = self._in_words(reduction, plan.ranks // routes[0].pieces, early)
        # Some pipeline stages may have nothing to reduce. They must report the same metrics as the others.
        tied = any(layout.size(*group.tied_over) > 1 for group in groups)
        self._reports_wait = self._reducer.wait_ms is not None or tied
        self._armed = False
        self._allocate_scalars()

    def _allocate_scalars(self) -> None:
        device = self.buffers[0].device
        widest = torch.float64 if any(b.dtype == torch.float64 for b in self.buffers) else torch.float32
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._learning_rate = torch.zeros((), dtype=torch.float32, device=device)
        self._rate_scales_G = torch.tensor([g.lr_scale for g in self._groups], dtype=torch.float32, device=device)
        self._rates_G = torch.zeros_like(self._rate_scales_G)
        self._no_wait = torch.zeros((), dtype=torch.float32, device=device)
        self._gradient_norm = torch.zeros((), dtype=torch.float32, device=device)
        self._stats = torch.zeros(2, dtype=widest, device=device)
        self._factor = torch.ones((), dtype=widest, device=device)

    def begin(self) -> None:
        """Start an iteration: zero the gradients in place, and start to gather the weights of the last update.

        Raises:
            RuntimeError: a parameter or gradient was detached from its flat buffer.
        """
        self.check_views()
        if self._exchange is not None:
            self._exchange.meet()
        self._gatherer.begin()
        for buffer in self.buffers:
            buffer.zero_gradients()
        self._reducer.begin()
        self._armed = False
        self._clip_factor = None
        if self._clipper is not None:
            self._clipper.begin()

    def arm(self, part: nn.Module | None = None) -> None:
        """Let the next backward pass start reductions: it is the last of the iteration, or the last of ``part``."""
        self._gatherer.start_all()  # blocks that did not run would start gathers between reductions, in other orders
        if part is None:
            self._armed = True
        self._reducer.arm(None if part is None else part.parameters())

    @torch.no_grad()
    def collect(self) -> None:
        """Clip a micro-batch's gradient after its backward pass if clipping precedes the reduction; else do nothing."""
        if self._clipper is not None:
            factor = self._clipper.collect(self._armed, None if self.loss_scale is None else self.loss_scale.applied)
            self._clip_factor = factor if self._clips_in_sum else None

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Let the stream wait for the reduction; return whether a gradient is not finite on any rank (0-d bool)."""
        self._gatherer.join()
        self._reducer.finish(self._clip_factor)
        self._set_rates()
        self._stats.zero_()
        self._update.measure(self._stats)
        for group in (self.plan.group, self.plan.other_ranks):  # together they hold the parameters of one replica
            sum_in_order(self._stats, group)
        self._factor, overflow = self._judge()
        return overflow

    @torch.no_grad()
    def write(self, allowed: Tensor) -> None:
        """Update the weights. Where ``allowed`` (0-d bool) is false nothing changes, not even the step counter."""
        self._update.apply(self._rates_G, self._step, self._factor, allowed)
        self._step.add_(allowed)
        if not self._gatherer.overlapped:
            self._gatherer.gather()

    def _set_rates(self) -> None:
        """Compute the learning rate of the next update, for the optimizer and for each group."""
        self._learning_rate.copy_(self._schedule(self._step))
        self._rates_G.copy_(self._learning_rate)
        for index, group in enumerate(self._groups):
            if group.schedule is not None:
                self._rates_G[index].copy_(group.schedule(self._step))
        self._rates_G.mul_(self._rate_scales_G)

    def _judge(self) -> tuple[Tensor, Tensor]:
        """Return the factor for every gradient, and whether a gradient is not finite: 0-d tensors."""
        factor = torch.ones_like(self._stats[0])
        overflow = self._stats[0] > 0
        if self.loss_scale is not None:
            factor = factor / self.loss_scale.applied
        if self._clip is not None and self._clipper is None:
            norm = self._stats[1].sqrt() * factor
            self._gradient_norm.copy_(norm)
            clipped = self._clip.factor(norm)
            overflow = overflow | ~torch.isfinite(clipped)  # the norm can overflow even if every gradient is finite
            factor = factor * clipped
        return factor, overflow

    def materialize(self) -> None:
        """Bring the model's weights up to date with the last update. Collective over the ranks that share shards."""
        if self._gatherer.overlapped:
            self._gatherer.gather()

    @property
    def updates(self) -> Tensor:
        """Number of finished updates, 0-d int64 on the device."""
        return self._step

    @property
    def metrics(self) -> dict[str, Tensor]:
        """``learning_rate`` of the last update, from the optimizer's schedule, and optional metrics.

        - ``comm_wait_ms``, with several ranks: milliseconds that the update waited for the reduction.
        - ``gradient_norm``, with clipping after the reduction: the norm before clipping.
        - ``loss_scale``, if there is one: the scale for the next iteration.
        """
        found = {"learning_rate": self._learning_rate}
        wait = self._reducer.wait_ms
        if self._reports_wait:
            found["comm_wait_ms"] = self._no_wait if wait is None else wait
        if self._clip is not None and self._clipper is None:
            found["gradient_norm"] = self._gradient_norm
        if self.loss_scale is not None:
            found["loss_scale"] = self.loss_scale.value
        return found

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """Return the step counter, loss scale and flat tensors: state, masters of half parameters, shard parameters."""
        named = [("step", self._step), *(self.loss_scale.named_state() if self.loss_scale is not None else ())]
        for index, buffer in enumerate(self.buffers):
            dtype = str(buffer.dtype).removeprefix("torch.")
            if not buffer.is_whole:
                named.append((f"shard.{dtype}", buffer.shard.parameters))
            if buffer.shard.has_masters:
                named.append((f"masters.{dtype}", buffer.shard.masters))
            named.extend((f"{kind}.{dtype}", flats[index]) for kind, flats in self._update.states.items())
        return named

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state on the CPU: ``step``, and for each kind the full tensors by parameter name.

        Kinds are ``masters`` and those of the rule, such as ``momentum``. Collective over the ranks that share
        shards. Only the first rank of ``dp`` and ``cp`` at each model-parallel position receives the state; on the
        others it is empty.
        """
        plan = self.plan
        if not plan.near_writer:
            return {}
        named = state.collect(self.buffers, self._kinds(), plan.group, plan.ranks, plan.writes)
        if not plan.writes:
            return {}
        return {**{name: tensor.cpu().clone() for name, tensor in self._scalars().items()}, **named}

    @torch.no_grad()
    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, which may come from any number of ranks; load the model before.

        Half-precision parameters are set to their rounded masters; the others are taken from the model.

        Raises:
            CheckpointError: an entry is missing, unexpected, or has another shape. Nothing is changed then.
        """
        scalars = self._scalars()
        named = {kind: entries for kind, entries in loaded.items() if isinstance(entries, Mapping)}
        state.complain(
            {
                "missing": [name for name in scalars if name not in loaded],
                "unexpected": [name for name in loaded if name not in named and name not in scalars],
                "no number": [name for name in scalars if name in loaded and not _fits(loaded[name], scalars[name])],
            }
        )
        state.check(self.buffers, self._kinds(), named)
        for name, scalar in scalars.items():
            scalar.copy_(loaded[name])
        state.distribute(self.buffers, self._kinds(), named)

    @torch.no_grad()
    def put(self, name: str, **tensors: Tensor) -> None:
        """Set one parameter and its state from full tensors, for example from another checkpoint format.

        Every rank that has the parameter must call this. Nothing is communicated.

        Args:
            tensors: ``masters``, to which the parameter is also set, and every kind of the rule's state, in the
                parameter's shape.

        Raises:
            CheckpointError: there is no such parameter, a kind is missing or unknown, or a tensor has another shape.
        """
        state.put(self.buffers, self._kinds(), name, tensors)

    @torch.no_grad()
    def set_step(self, step: int) -> None:
        """Set the counter of updates, which schedules and the rule read."""
        self._step.fill_(step)

    def average_into(self, averages: Sequence[Tensor], share: Tensor) -> bool:
        """Let updates also average the weights; see :meth:`common.optim.rules.Update.average_into`."""
        return self._update.average_into(averages, share)

    def check_views(self) -> None:
        """Check by pointers, on the host, that parameters and gradients still are views of the flat buffers.

        Raises:
            RuntimeError: a parameter or gradient was detached from its flat buffer.
        """
        for buffer in self.buffers:
            buffer.check()

    def stop_sending(self) -> None:
        """Send no gradients and weights from the next iteration on. Sums of single numbers still synchronise ranks."""
        self._reducer.sends = self._gatherer.sends = False
        if self._clipper is not None:
            self._clipper.sends = False

    def close(self) -> None:
        """Remove the hooks from parameters and blocks."""
        self._reducer.close()
        self._gatherer.close()

    def _kinds(self) -> dict[str, list[Tensor]]:
        masters = [buffer.shard.masters for buffer in self.buffers]
        return {**self._update.states, "masters": masters}

    def _scalars(self) -> dict[str, Tensor]:
        return {"step": self._step, **dict(self.loss_scale.named_state() if self.loss_scale is not None else ())}

    def _in_words(self, reduction: str, scattering: int, early: bool) -> dict[str, str]:
        in_fp32 = any(buffer.gradients.dtype != buffer.dtype for buffer in self.buffers)
        chosen = {"gradients": "added up in fp32"} if in_fp32 else {}
        if not self._reducer.buckets:
            return chosen
        when = "during the backward pass" if early else "after the backward pass"
        because = ", as clipping comes before" if self._clipper is not None and not self._clips_in_sum else ""
        how = "all-reduce" if scattering == 1 or reduction == "all_reduce" else f"scatter over {scattering} ranks"
        if self._exchange is not None:
            how += f" by copy engines, through {self._exchange.size / 1e9:.2f} GB of memory on each,"
        chosen["gradient reduction"] = f"{how} {when}{because}"
        if self.plan.ranks > 1:
            chosen["weight gathering"] = "during the forward pass" if self._gatherer.overlapped else "after the update"
        return chosen


def _fits(value: object, scalar: Tensor) -> bool:
    """Return whether a loaded value has a scalar's shape. A damaged file may contain any type."""
    return isinstance(value, Tensor) and value.shape == scalar.shape
