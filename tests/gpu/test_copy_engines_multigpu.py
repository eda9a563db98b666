"""Gradients and weights moved by copy engines: two GPUs get the bits of NCCL's collectives, captured or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.optim.adaptive import LAMB, Adagrad, Adam, AdamW
from common.optim.learning_rate import constant
from common.optim.momentum import LARS, SGD
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.peer_exchange import add_pieces
from common.optim.precision import LossScale
from common.optim.rules import Rule
from common.run.kernel_profile import COMMUNICATION, kind_of, recorded
from common.step.graphs import StepRunner
from common.step.train_step import Losses, TrainStep, accumulate

pytestmark = pytest.mark.multigpu

WIDTH, LAYERS, ROWS = 1024, 6, 16
ITERATIONS, LONG = 5, 200
DELAY = 2_000_000  # cycles, about 1 ms
RULES: dict[str, Rule] = {
    "lars": LARS(0.9, eta=0.01),
    "sgd": SGD(0.9, nesterov=True),
    "lamb": LAMB(0.9, 0.99, 1e-6),
    "adamw": AdamW(),
    "adam": Adam(),
    "adagrad": Adagrad(),
}
BEFORE, AFTER = (ClipNorm(0.05, when) for when in ("before_reduction", "after_reduction"))
CASES: dict[str, dict[str, Any]] = {
    **{rule: {"rule": rule} for rule in RULES},
    "fp32": {"rule": "lamb", "dtype": torch.float32},
    "fp32 gradients": {"rule": "adamw", "gradients": "fp32", "masters": "remainder"},
    "fp16, clipped after": {"rule": "lamb", "dtype": torch.float16, "clip": AFTER},
    "clipped in the sum": {"rule": "lamb", "clip": BEFORE, "micro_batches": 1},
    "clipped in the sum, fp32": {"rule": "lamb", "clip": BEFORE, "micro_batches": 1, "dtype": torch.float32},
    "clipped before the sum": {"rule": "lamb", "clip": BEFORE},
    "after the passes": {"rule": "lamb", "overlap": False},
}
WAYS: dict[str, dict[str, Any]] = {
    "nccl": {"exchange": "collectives", "captured": True},
    "captured": {"exchange": "copy_engines", "captured": True},
    "eager": {"exchange": "copy_engines", "captured": False},
}


class Trainee:
    """A network whose forward pass is slower on the last rank, so that the other ranks are ahead."""

    def __init__(
        self,
        layout: Layout,
        rule: str,
        captured: bool,
        dtype: torch.dtype = torch.bfloat16,
        micro_batches: int = 2,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.layout, self.dtype, self.micro_batches = layout, dtype, micro_batches
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers).to(layout.device, dtype)
        named, trust = dict(self.model.named_parameters()), rule in ("lars", "lamb")
        groups = [
            ParameterGroup({n: p for n, p in named.items() if p.ndim > 1}, 1e-4, trust_ratio=trust),
            ParameterGroup({n: p for n, p in named.items() if p.ndim == 1}),
        ]
        scale = LossScale(layout.device, 1024.0) if dtype == torch.float16 else None
        self.optimizer = Optimizer(
            groups, RULES[rule], constant(0.01), layout, grad_divisor=float(micro_batches * layout.size("dp")),
            bucket_bytes=3_000_000, blocks=list(self.model.named_children()), micro_batches=micro_batches,
            loss_scale=scale, shard="all", **options,
        )  # fmt: skip
        step = TrainStep(accumulate(self.loss, scale), [self.optimizer], layout)
        self.runner = StepRunner(step, self.model, micro_batches, captured)
        self.runner.warm_up([self.batch(0, 0)])

    def batch(self, iteration: int, number: int) -> Batch:
        generator = torch.Generator(self.layout.device).manual_seed(1000 * iteration + 10 * number + self.layout.rank)
        x_BC = torch.randn(ROWS, WIDTH, generator=generator, device=self.layout.device)
        return Batch({"x": x_BC.to(self.dtype)}, ROWS)

    def loss(self, batch: Batch) -> Losses:
        if self.layout.rank == self.layout.world_size - 1:
            torch.cuda._sleep(DELAY)
        value = self.model(batch.tensors["x"]).float().square().sum() / ROWS
        return Losses(value, {"loss": value})

    def iterate(self, iteration: int) -> Tensor:
        """Run a step and return its result."""
        batches = [self.batch(iteration, number) for number in range(self.micro_batches)]
        with self.runner.on_stream():
            return self.runner(batches).values.clone()

    def close(self) -> dict[str, Tensor]:
        """Return the weights after the last update, and the optimizer's state."""
        with self.runner.on_stream():
            self.runner.step.materialize()
        torch.cuda.synchronize()
        named = [*self.model.named_parameters(), *self.optimizer.named_state()]
        found = {name: tensor.detach().cpu() for name, tensor in named}
        self.runner.close()
        self.optimizer.close()
        return found


def train(layout: Layout, iterations: int, **options: Any) -> dict[str, Tensor]:
    """Return the results of all steps, without the measured waits, and the weights and state at the end."""
    trainee = Trainee(layout, **options)
    losses = [trainee.iterate(iteration)[2] for iteration in range(iterations)]
    return {"losses": torch.stack(losses).cpu(), **trainee.close()}


def kinds_of_copies(layout: Layout) -> dict[str, str]:
    """Return the kind of each copy and collective in a captured step, by its name in the profiler."""
    trainee = Trainee(layout, "lamb", captured=True, exchange="copy_engines")
    kernels, _ = recorded(lambda: trainee.iterate(0), lambda: trainee.iterate(1))
    trainee.close()
    wanted = ("memcpy", "nccl", "barrier")
    return {k.name: kind_of(k.name) for k in kernels if any(word in k.name.lower() for word in wanted)}


def sums(device: torch.device) -> list[bool]:
    """Return whether the kernel's sums have the bits of PyTorch's, for each dtype, without and with factors."""
    equal = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        draw = torch.Generator().manual_seed(0)
        own, slots = (torch.randn(size, generator=draw).to(dtype) for size in ((9792,), (7, 9792)))
        factors = torch.rand(8, generator=draw)
        for factor in (None, factors[0]):
            ours, given = slots.to(device), None if factor is None else factor.to(device)
            add_pieces(own.to(device), ours, ours[0], given, factors[1:].to(device))
            expected = slots.clone()
            add_pieces(own, expected, expected[0], factor, factors[1:])
            equal.append(torch.equal(ours.cpu(), expected))
    return equal


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    layout = Layout({"dp": world}, rank, device=f"cuda:{rank}")
    found: dict[str, Any] = {"sums": sums(layout.device), "kinds": kinds_of_copies(layout)}
    for name, case in CASES.items():
        found[name] = {way: train(layout, ITERATIONS, **case, **options) for way, options in WAYS.items()}
    ways = {way: WAYS[way] for way in ("nccl", "captured")}
    long = CASES["clipped in the sum"]
    found["long"] = {way: train(layout, LONG, **long, **options) for way, options in ways.items()}
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


@pytest.mark.parametrize("case", list(CASES))
def test_captured_copies_equal_eager_ones_bit_for_bit(ranks, case):
    assert [differing(rank[case]["captured"], rank[case]["eager"]) for rank in ranks] == [[]] * len(ranks)


@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_get_the_bits_of_nccl(ranks, case):
    if len(ranks) > 2:
        pytest.skip("a ring rounds each partial sum of more than two ranks")
    assert [differing(rank[case]["captured"], rank[case]["nccl"]) for rank in ranks] == [[]] * 2


def test_the_losses_of_two_hundred_steps_are_those_with_nccl(ranks):
    for rank in ranks:
        copied, expected = rank["long"]["captured"]["losses"], rank["long"]["nccl"]["losses"]
        assert len(expected.unique()) > LONG // 2
        assert torch.allclose(copied, expected, rtol=0.0 if len(ranks) == 2 else 1e-2, atol=0.0)


def test_all_ranks_have_the_same_weights(ranks):
    weights = [{n: t for n, t in rank["long"]["captured"].items() if n.startswith("0.")} for rank in ranks]
    assert all(differing(weights[0], other) == [] for other in weights[1:])


def test_copies_between_gpus_count_as_communication(ranks):
    for rank in ranks:
        print(rank["kinds"])
        copied = [name for name in rank["kinds"] if name.startswith("Memcpy PtoP")]
        assert [rank["kinds"][name] for name in copied] == [COMMUNICATION]
        assert not any("ReduceScatter" in name for name in rank["kinds"])


def test_the_kernel_adds_like_pytorch(ranks):
    assert [rank["sums"] for rank in ranks] == [[True] * 6] * len(ranks)
