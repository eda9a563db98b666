"""Train a small network in float64 on several gloo ranks, for test_sharded_optimizer.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.optim.adaptive import LAMB
from common.optim.learning_rate import constant
from common.optim.momentum import LARS, SGD
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.rules import Rule
from common.run import checkpoint
from common.run.checkpoint import Progress
from common.step.train_step import Losses, TrainStep, accumulate, apply_gradients
from tests.shared_peers import shared_peers

TRITON_DTYPES = (torch.float32, torch.float16)
LANES = 4  # micro-batches of one iteration, over all ranks
ITERATIONS = 3
WIDTH = 24
RULES: dict[str, Rule] = {
    "lars": LARS(0.9, eta=0.1),
    "lamb": LAMB(0.9, 0.99, 1e-6),
    "nesterov": SGD(0.9, nesterov=True),
}
CLIPS = {
    "before": ClipNorm(0.5, "before_reduction"),
    "after": ClipNorm(0.5, "after_reduction"),
}
SHARDED: dict[str, dict[str, Any]] = {
    "none": {},
    "all": {"shard": "all"},
    "all_late": {"shard": "all", "overlap": False},
    "all_reduce": {"shard": "all", "reduction": "all_reduce"},
    "node": {"shard": "node", "ranks_per_node": 2},
    "copied": {"shard": "all", "exchange": "copy_engines"},
    "copied_late": {"shard": "all", "exchange": "copy_engines", "overlap": False},
    "node_copied": {"shard": "node", "ranks_per_node": 2, "exchange": "copy_engines"},
    "node_all_reduce": {"shard": "node", "ranks_per_node": 2, "reduction": "all_reduce"},
}


class Layer(nn.Module):
    """Three projections in one weight, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x_BC: Tensor) -> Tensor:
        q_BC, k_BC, v_BC = self.qkv(x_BC).chunk(3, dim=-1)
        return self.norm(x_BC + torch.sigmoid(q_BC * k_BC) * v_BC)


class Network(nn.Module):
    """A network with blocks, a parameter outside of them, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), *((f"layers.{i}", layer) for i, layer in enumerate(self.layers))]

    def forward(self, x_BC: Tensor) -> Tensor:
        x_BC = torch.tanh(self.first(x_BC))
        for layer in self.layers:
            x_BC = layer(x_BC)
        return ((x_BC * self.gain) @ self.first.weight).square().mean()


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its norm."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())


def schedule(step: Tensor) -> Tensor:
    """Return a learning rate that changes every step."""
    return 0.125 / (1 + step.to(torch.float32))


class Trainee:
    """A network with its optimizer and step on one rank, which trains on its share of the micro-batches.

    Subclasses train another network.
    """

    schedule = staticmethod(schedule)
    bucket_bytes = 6000

    def __init__(
        self,
        layout: Layout,
        rule: str = "lars",
        dtype: torch.dtype = torch.float64,
        blocks: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.layout, self.dtype = layout, dtype
        self.model: Any = self.network().to(dtype)
        self.micro_batches = LANES // layout.size("dp")
        self.optimizer = Optimizer(
            self.groups(rule), RULES[rule], self.schedule, layout, grad_divisor=LANES, bucket_bytes=self.bucket_bytes,
            blocks=self.model.blocks if blocks else (), micro_batches=self.micro_batches, **options,
        )  # fmt: skip
        self.step = TrainStep(accumulate(self.loss), [self.optimizer], layout)

    def network(self) -> nn.Module:
        return Network()

    def groups(self, rule: str) -> list[ParameterGroup]:
        named = dict(self.model.named_parameters())
        weights = {n: p for n, p in named.items() if p.ndim > 1}
        return [
            ParameterGroup(weights, 0.01, trust_ratio=rule != "nesterov", parts={n: 3 for n in weights if "qkv" in n}),
            ParameterGroup({n: p for n, p in named.items() if p.ndim == 1}, grad_scale=0.5),
        ]

    def lanes(self, iteration: int) -> Tensor:
        """Return this rank's part of each micro-batch of a step."""
        return torch.randn(LANES, 4, WIDTH, generator=torch.Generator().manual_seed(iteration), dtype=torch.float64)

    def loss(self, batch: Batch) -> Losses:
        value = self.model(batch.tensors["x"])
        return Losses(value, {"loss": value})

    def iterate(self, iteration: int, change: Callable[[int, Tensor], Tensor] = lambda lane, x_BC: x_BC) -> bool:
        """Run one step and return whether it overflowed. Micro-batch a * R + r is number a of replica r of R."""
        lanes, replicas, replica = self.lanes(iteration), self.layout.size("dp"), self.layout.index("dp")
        mine = [a * replicas + replica for a in range(self.micro_batches)]
        result = self.step([Batch({"x": change(lane, lanes[lane]).to(self.dtype)}, LANES) for lane in mine])
        return self.step.read(result.names, result.values.tolist()).overflow

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the weights after the last update."""
        self.step.materialize()
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def everything(self) -> dict[str, Tensor]:
        """Return copies of all tensors that a step may write on this rank."""
        return self.weights() | {name: tensor.clone() for name, tensor in self.optimizer.named_state()}

    def changed(self, before: dict[str, Tensor]) -> list[str]:
        """Return the names of tensors that differ from ``before``, an earlier result of :meth:`everything`."""
        return [name for name, tensor in self.everything().items() if not torch.equal(tensor, before[name])]

    @classmethod
    def train(cls, layout: Layout, iterations: int = ITERATIONS, **options: Any) -> dict[str, Tensor]:
        """Return the weights after some steps."""
        trainee = cls(layout, **options)
        for iteration in range(iterations):
            trainee.iterate(iteration)
        return trainee.weights()

    @classmethod
    def in_half(cls, layout: Layout, **options: Any) -> dict[str, Tensor]:
        """Return the weights after training in bf16, as fp32."""
        return {n: w.float() for n, w in cls.train(layout, dtype=torch.bfloat16, **options).items()}

    @classmethod
    def clipped_norm(cls, layout: Layout, **options: Any) -> float:
        """Return the norm of the averaged gradient that clipping after the reduction measured in the first step."""
        trainee = cls(layout, **options)
        trainee.iterate(0)
        return trainee.optimizer.metrics["gradient_norm"].item()

    @classmethod
    def skipped(cls, layout: Layout, **options: Any) -> list[str]:
        """Return the names of the tensors that a skipped step changed."""
        trainee = cls(layout, **options)
        trainee.iterate(0)
        before = trainee.everything()
        trainee.step.skip.fill_(1)
        trainee.iterate(1)
        trainee.step.skip.fill_(0)
        return trainee.changed(before)

    @classmethod
    def save(cls, layout: Layout, folder: Path, **options: Any) -> None:
        """Write a checkpoint after two steps, with the rank's number + 1 in a buffer."""
        trainee = cls(layout, "lamb", **options)
        for iteration in range(2):
            trainee.iterate(iteration)
        trainee.model.seen.fill_(layout.rank + 1.0)
        checkpoint.save(folder, Progress(step=2, position=2), 7, {}, trainee.model, trainee.step.updaters, layout)

    @classmethod
    def resume(cls, layout: Layout, folder: Path, **options: Any) -> dict[str, Any]:
        """Resume and run one step. Return weights, the restored buffer, the next random number, and the remarks."""
        trainee = cls(layout, "lamb", **options)
        trainee.iterate(9)  # what was there before must not matter
        content = checkpoint.read(folder, {}, layout)
        progress = checkpoint.restore(content, trainee.model, trainee.step.updaters, layout)
        trainee.iterate(progress.step)
        noise, seen = torch.rand(()), trainee.model.seen.clone()
        return {"weights": trainee.weights(), "seen": seen, "noise": noise, "remarks": content["remarks"]}


def stale_without_materialize(layout: Layout) -> dict[str, bool]:
    """Return whether the model's weights are those of the last update, before and after ``materialize``."""
    trainee = Trainee(layout, shard="all")
    start = trainee.weights()
    trainee.iterate(0)
    before = trainee.model.gain.detach().clone()
    first, second = trainee.weights(), trainee.weights()
    return {
        "before": not torch.equal(before, start["gain"]),
        "after": not torch.equal(first["gain"], start["gain"]),
        "idempotent": all(torch.equal(first[name], second[name]) for name in first),
    }


def overflow_on_one(layout: Layout, **options: Any) -> dict[str, Any]:
    """Return the tensors that a step changed in which one micro-batch overflows, and whether the next step trains."""
    trainee = Trainee(layout, **options)
    trainee.iterate(0)
    before = trainee.everything()
    overflow = trainee.iterate(1, lambda lane, x_BC: x_BC * float("inf") if lane == LANES - 1 else x_BC)
    changed = trainee.changed(before)
    trainee.iterate(2)
    finite = all(bool(tensor.isfinite().all()) for tensor in trainee.everything().values())
    moved = not torch.equal(trainee.weights()["gain"], before["gain"])
    return {"changed": changed, "overflow": overflow, "trains again": finite and moved}


@contextlib.contextmanager
def collectives() -> Iterator[list[int]]:
    """Record the number of elements that each collective in the block sends or receives, whichever is larger."""
    sizes: list[int] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor, **options: Any) -> Any:
            sizes.append(max(tensor.numel() for tensor in tensors))
            return function(*tensors, **options)

        return call

    names = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
    with mock.patch.multiple(dist, **{name: counted(getattr(dist, name)) for name in names}):
        yield sizes


def silenced(layout: Layout, **options: Any) -> tuple[list[int], list[int]]:
    """Return the sizes of the collectives of a step, and of a step after ``stop_sending``."""
    trainee = Trainee(layout, **options)
    with collectives() as usual:
        trainee.iterate(0)
    trainee.optimizer.stop_sending()
    with collectives() as silent:
        trainee.iterate(1)
    return usual, silent


def model_parallel(layout: Layout, when: str, **options: Any) -> dict[str, Any]:
    """Return two weights after a step of SGD: one sharded over tp ranks, one that all tp ranks have.

    The gradients are 1 and 2 on the shards, and 3 and 4 on the two replicas of the other weight.
    """
    own, common = nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(10))
    groups = [ParameterGroup({"own": own}), ParameterGroup({"common": common}, replicated_over=("tp",))]
    clip = ClipNorm(1.0, when)
    optimizer = Optimizer(groups, SGD(0.0), constant(1.0), layout, grad_divisor=2.0, clip=clip, **options)
    optimizer.begin()
    own.grad.fill_(1.0 + layout.index("tp"))
    common.grad.fill_(3.0 + layout.index("dp"))
    optimizer.arm()
    optimizer.collect()
    apply_gradients([optimizer], torch.tensor(0.0))
    return {"own": own.tolist(), "common": common.tolist()}


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Return the results of all cases on one of ``world`` ranks."""
    with shared_peers(Path(folder)):
        return run_cases(rank, world, folder)


def run_cases(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Return the results of all cases on one of ``world`` ranks that share memory."""
    layout = Layout({"dp": world}, rank, seed=7)
    found: dict[str, Any] = {}
    for name, options in SHARDED.items():
        if world != 4 and name.startswith("node"):
            continue
        for rule in RULES:
            found[f"train/{rule}/{name}"] = Trainee.train(layout, rule=rule, **options)
        for when, clip in CLIPS.items():
            found[f"clip/{when}/{name}"] = Trainee.train(layout, clip=clip, **options)
        found[f"norm/{name}"] = Trainee.clipped_norm(layout, clip=CLIPS["after"], **options)
        found[f"skip/{name}"] = Trainee.skipped(layout, **options)
        found[f"overflow/{name}"] = overflow_on_one(layout, **options)
        found[f"half/{name}"] = Trainee.in_half(layout, **options)
        found[f"silenced/{name}"] = silenced(layout, **options)
    found["overflow/before"] = overflow_on_one(layout, shard="all", clip=CLIPS["before"])
    found["overflow/copied_before"] = overflow_on_one(layout, clip=CLIPS["before"], **SHARDED["copied"])
    found["silenced/before"] = silenced(layout, shard="all", clip=CLIPS["before"])
    found["no_blocks"] = Trainee.train(layout, blocks=False, shard="all")
    found["stale"] = stale_without_materialize(layout)
    if world == 4:
        split = Layout({"dp": 2, "tp": 2}, rank, seed=7)
        for name in ("none", "all", "all_reduce"):
            for when in ("before_reduction", "after_reduction"):
                found[f"{when}/{name}"] = model_parallel(split, when, **SHARDED[name])
        Trainee.save(layout, Path(folder, "checkpoints"), shard="all")
    saved = Path(folder).parent / "4" / "checkpoints" / "step_00000002"
    found["resume"] = Trainee.resume(layout, saved, shard="all")
    return found


def run_triton_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Train with interpreted Triton kernels; :mod:`tests.preloaded` has imported Triton for interpretation."""
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    layout = Layout({"dp": world}, rank, seed=7)
    options: dict[str, Any] = {"shard": "all", "implementation": "triton", "clip": CLIPS["after"]}
    return {
        f"{rule}/{dtype}": Trainee.train(layout, 2, rule=rule, dtype=dtype, **options)
        for rule in RULES
        for dtype in TRITON_DTYPES
    }
