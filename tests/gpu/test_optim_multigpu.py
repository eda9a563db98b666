"""Test reductions, shards and gathers over NCCL: overlapped and captured, they equal plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.optim.adaptive import LAMB
from common.optim.learning_rate import polynomial
from common.optim.momentum import LARS
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.precision import LossScale
from common.optim.rules import Rule
from common.step.graphs import StepRunner
from common.step.train_step import Losses, TrainStep, accumulate
from tests.common.optim.rounded_sums import difference_of_weights

pytestmark = pytest.mark.multigpu

ITERATIONS = 5
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.int64: 0.0}
"""Largest difference relative to a tensor's norm, by the dtype of the gradients: ranks sum in another order.

For LAMB's weights, :func:`allowed` adds the effect of these sums on the directions.
"""

SCHEDULE = polynomial(0.1, 0.01, 2, 2, 8, first_step=1)

OVERFLOWS_AT = 2  # in the run with a loss scale
DTYPES = [torch.float32, torch.bfloat16]
RULES: dict[str, Rule] = {"lars": LARS(0.9, eta=0.01), "lamb": LAMB(0.9, 0.99, 1e-6)}
MODES: dict[str, dict[str, Any]] = {
    "plain": {"overlap": False},
    "overlapped": {"overlap": True},
    "sharded": {"overlap": False, "shard": "all"},
    "sharded_overlapped": {"overlap": True, "shard": "all"},
    "all_reduce": {"overlap": True, "shard": "all", "reduction": "all_reduce"},
    "node": {"overlap": True, "shard": "node", "ranks_per_node": 2},
    "copied": {"overlap": True, "shard": "all", "exchange": "copy_engines"},
    "node_copied": {"overlap": True, "shard": "node", "ranks_per_node": 2, "exchange": "copy_engines"},
}
SPLIT = ", split samples"  # over cp, whose two ranks share shards, too
MODES |= {mode + SPLIT: MODES[mode] for mode in ("plain", "sharded_overlapped", "all_reduce", "node", "copied")}
CLIPS = {when: ClipNorm(0.05, when) for when in ("before_reduction", "after_reduction")}


class Trainee:
    """A small network with two micro-batches per step, by default."""

    width = 256
    schedule = staticmethod(SCHEDULE)

    def __init__(
        self, layout: Layout, dtype: torch.dtype, rule: Rule, captured: bool, micro_batches: int = 2, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.layout, self.dtype, self.micro_batches = layout, dtype, micro_batches
        layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(6)]
        self.model = nn.Sequential(*layers).to(layout.device, dtype)
        named = dict(self.model.named_parameters())
        weights = {n: p for n, p in named.items() if p.ndim > 1}
        groups = [
            ParameterGroup(weights, 1e-4, trust_ratio=not rule.instead, parts={"0.0.weight": 4}),
            ParameterGroup({n: p for n, p in named.items() if p.ndim == 1}),
        ]
        self.scale = LossScale(layout.device, 1024.0, growth_interval=2) if dtype == torch.float16 else None
        self.optimizer = Optimizer(
            groups, rule, self.schedule, layout,
            grad_divisor=float(micro_batches * layout.size("dp")), bucket_bytes=300_000,
            blocks=list(self.model.named_children()), micro_batches=micro_batches, loss_scale=self.scale, **options,
        )  # fmt: skip
        self.step = TrainStep(accumulate(self.loss, self.scale), [self.optimizer], layout)
        self.runner = StepRunner(self.step, self.model, micro_batches, captured)

    def warm_up(self) -> None:
        x_BC = torch.ones(16, self.width, device=self.layout.device, dtype=self.dtype)
        self.runner.warm_up([Batch({"x": x_BC}, 32)])

    def state(self) -> dict[str, Tensor]:
        """Return copies of the weights and of the optimizer's state."""
        torch.cuda.synchronize()
        named = [*self.model.named_parameters(), *self.optimizer.named_state()]
        return {name: tensor.detach().clone() for name, tensor in named}

    def loss(self, batch: Batch) -> Losses:
        value = self.model(batch.tensors["x"]).float().square().sum() / 16
        return Losses(value, {"loss": value})

    def iterate(self, iteration: int, factor: float = 1.0) -> Tensor:
        """Run a step and return a copy of its result."""
        generator = torch.Generator().manual_seed(10 * iteration + self.layout.rank)
        noise = factor * torch.randn(self.micro_batches, 16, self.width, generator=generator)
        batches = [Batch({"x": x_BC.to(self.layout.device, self.dtype)}, 32) for x_BC in noise]
        with self.runner.on_stream():
            return self.runner(batches).values.clone()

    def result(self) -> dict[str, Tensor]:
        """Return the weights after the last update, and the scalars of the optimizer."""
        with self.runner.on_stream():
            self.step.materialize()
        torch.cuda.synchronize()
        found = {name: parameter.detach().cpu() for name, parameter in self.model.named_parameters()}
        scalars = {name: tensor.cpu() for name, tensor in self.optimizer.named_state() if tensor.ndim == 0}
        assert not self.runner.uncaptured
        self.runner.close()
        self.optimizer.close()
        return found | scalars


def train(layout: Layout, dtype: torch.dtype, rule: str, captured: bool, **options: Any) -> dict[str, Tensor]:
    trainee = Trainee(layout, dtype, RULES[rule], captured, **options)
    trainee.warm_up()
    for iteration in range(ITERATIONS):
        trainee.iterate(iteration)
    return trainee.result()


def train_with_an_overflow(layout: Layout, captured: bool, **options: Any) -> dict[str, Tensor]:
    """Train in fp16 with a loss scale; in one step, the gradients of the last rank are not finite."""
    trainee = Trainee(layout, torch.float16, RULES["lamb"], captured, **options)
    trainee.warm_up()
    for iteration in range(ITERATIONS):
        last = layout.rank == layout.world_size - 1
        trainee.iterate(iteration, float("inf") if last and iteration == OVERFLOWS_AT else 1.0)
    return trainee.result()


def warm_up_traces(layout: Layout, captured: bool) -> list[str]:
    """Return the names of the tensors of a sharded, overlapped optimizer that warm-up has changed."""
    trainee = Trainee(layout, torch.float16, RULES["lamb"], captured, shard="all", clip=CLIPS["after_reduction"])
    before = trainee.state()
    trainee.warm_up()
    after = trainee.state()
    trainee.runner.close()
    trainee.optimizer.close()
    return [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    replicas = Layout({"dp": world}, rank, device=f"cuda:{rank}")
    results: dict[str, Any] = {}
    for mode, options in MODES.items():
        if (mode.startswith("node") and world < 4) or (mode.endswith(SPLIT) and world % 2):
            continue
        layout = replicas
        if mode.endswith(SPLIT):
            layout = Layout({"dp": world // 2, "cp": 2}, rank, device=f"cuda:{rank}")
        for captured in (False, True):
            for dtype in DTYPES:
                for rule in RULES:
                    results[f"{mode}.{captured}.{dtype}.{rule}"] = train(layout, dtype, rule, captured, **options)
            for when, clip in CLIPS.items():
                key = f"{mode}.{captured}.{when}"
                results[key] = train_with_an_overflow(layout, captured, clip=clip, **options)
    results["warm-up"] = {captured: warm_up_traces(replicas, captured) for captured in (False, True)}
    return results


def cases(ranks: list[dict[str, Any]], mode: str, captured: bool) -> dict[str, dict[str, Tensor]]:
    """Return the results of a mode on the first rank; skip the test if the mode was not run."""
    found = {k.split(".", 2)[2]: v for k, v in ranks[0].items() if k.startswith(f"{mode}.{captured}.")}
    if not found:
        pytest.skip("needs more GPUs")
    return found


def allowed(case: str, wanted: Tensor, ranks: int) -> float:
    """Return the largest allowed norm of the difference from ``wanted``, the value of the plain mode."""
    norm = wanted.double().norm().item()
    bound = ROUNDING[wanted.dtype] * norm
    if wanted.ndim > 0 and not case.endswith("lars"):
        rates = [SCHEDULE(torch.tensor(step)).item() for step in range(ITERATIONS)]
        bound += difference_of_weights(wanted.dtype, ranks, rates, norm, wanted.numel(), wanted.ndim > 1)
    return bound


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("mode", list(MODES))
def test_every_way_equals_the_reference(ranks, mode, captured):
    expected = cases(ranks, "plain" + SPLIT * mode.endswith(SPLIT), captured=False)
    for case, found in cases(ranks, mode, captured).items():
        for name, tensor in found.items():
            wanted = expected[case][name]
            off, bound = (tensor.double() - wanted.double()).norm().item(), allowed(case, wanted, len(ranks))
            assert off <= bound, f"{case} {name} differs by {off}, {bound} is allowed; its norm is {wanted.norm()}"


# Without shards, ranks with the same part of samples sum what was clipped before, and may do so in another order than
# those with another part.
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "plain" + SPLIT])
def test_ranks_agree_bit_for_bit(ranks, mode):
    cases(ranks, mode, captured=True)
    for key in (key for key in ranks[0] if key.startswith(f"{mode}.True.")):
        for other in ranks[1:]:
            assert all(torch.equal(tensor, other[key][name]) for name, tensor in ranks[0][key].items()), key


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("when", list(CLIPS))
@pytest.mark.parametrize("mode", list(MODES))
def test_an_overflow_on_one_rank_costs_one_step_and_half_the_scale(ranks, mode, when, captured):
    found = cases(ranks, mode, captured)[when]
    # 1024, doubled after two good updates, halved again by the overflow, and doubled after two more
    assert found["step"].item() == ITERATIONS - 1
    assert found["loss_scale"].item() == 2048.0
    assert found["loss_scale_good_steps"].item() == 0
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_warm_up_and_capture_leave_no_trace(ranks):
    assert [rank["warm-up"] for rank in ranks] == [{False: [], True: []}] * len(ranks)
