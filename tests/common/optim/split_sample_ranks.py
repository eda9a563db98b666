"""A network whose samples are split over ranks, in float64, and the ways to train it on dp 2 x cp 2 gloo ranks.

Of the positions of a sample each ``cp`` rank has its own; test_split_samples.py compares with whole samples.
"""

from __future__ import annotations

import functools
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
from common.optim.momentum import SGD
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.rules import Rule
from common.run import checkpoint
from common.run.checkpoint import Progress
from common.step.train_step import Losses, TrainStep, accumulate, apply_gradients

WORLD = 4
LANES = 4  # micro-batches of one iteration, over all replicas
ITERATIONS = 3
SAMPLES, POSITIONS, WIDTH = 3, 8, 24
RATES = [0.5, 1.0, 0.25]
MAX_NORM = 0.05
RULES: dict[str, Rule] = {"nesterov": SGD(0.9, nesterov=True), "lamb": LAMB(0.9, 0.99, 1e-6)}
CLIPS = {
    "before": ClipNorm(MAX_NORM, "before_reduction"),
    "after": ClipNorm(MAX_NORM, "after_reduction"),
}
SHARDED: dict[str, dict[str, Any]] = {
    "none": {},
    "late": {"overlap": False},
    "all": {"shard": "all"},
    "all_reduce": {"shard": "all", "reduction": "all_reduce"},
    "node": {"shard": "node", "ranks_per_node": 2},  # both ranks of one sample
}


class SumOverSample(torch.autograd.Function):
    """The sum over the ranks of a sample, for a layer that all of them compute from it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        whole = part.clone()
        if group is not None:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ToEachPart(torch.autograd.Function):
    """What all ranks of a sample have, for a layer that each computes for its own part."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        if ctx.group is not None:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Network(nn.Module):
    """A layer for each position, one for the sum over positions, which all ranks compute, and one for each position."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.whole = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.group = group

    def forward(self, x_NPC: Tensor) -> Tensor:
        """Sum of squares over the positions of ``x_NPC``, which may be a part of all."""
        down_NPC = torch.tanh(self.down(x_NPC))
        sum_NC = SumOverSample.apply(down_NPC.sum(1), self.group)
        whole_NC = ToEachPart.apply(torch.tanh(self.whole(sum_NC)), self.group)
        squares: Tensor = self.up(down_NPC + whole_NC[:, None]).square().sum()
        return squares / (SAMPLES * POSITIONS * WIDTH)


def lanes(iteration: int) -> Tensor:
    """Whole samples of all micro-batches of an iteration."""
    generator = torch.Generator().manual_seed(iteration)
    return torch.randn(LANES, SAMPLES, POSITIONS, WIDTH, generator=generator, dtype=torch.float64)


def schedule(step: Tensor) -> Tensor:
    """One rate of ``RATES`` after the other."""
    return torch.tensor(RATES)[step.clamp(max=len(RATES) - 1)]


class Trainee:
    """The network with its optimizer and iteration on one rank, which takes its share of lanes and positions."""

    def __init__(
        self, layout: Layout, rule: str = "nesterov", dtype: torch.dtype = torch.float64, **options: Any
    ) -> None:
        self.layout, self.dtype = layout, dtype
        self.model = Network(layout.group("cp")).to(dtype)
        self.micro_batches = LANES // layout.size("dp")
        named = dict(self.model.named_parameters())
        redundant = {name for name in named if name.startswith("whole")}
        trust = rule == "lamb"
        groups = [
            ParameterGroup(
                {n: p for n, p in named.items() if n not in redundant}, 0.01, trust_ratio=trust,
                learning_rate_in_momentum=False,
            ),
            ParameterGroup(
                {n: named[n] for n in named if n in redundant}, 0.01, trust_ratio=trust,
                learning_rate_in_momentum=False, replicated_over=("cp",),
            ),
        ]  # fmt: skip
        self.optimizer = Optimizer(
            groups, RULES[rule], schedule, layout, grad_divisor=LANES, bucket_bytes=5000,
            micro_batches=self.micro_batches, **options,
        )  # fmt: skip
        self.step = TrainStep(accumulate(self.loss), [self.optimizer], layout)

    def loss(self, batch: Batch) -> Losses:
        part = self.model(batch.tensors["x"])
        return Losses(part, {"loss": part})

    def iterate(self, iteration: int, spoil: Callable[[Tensor], None] = lambda x_NPC: None) -> bool:
        """One iteration; lane a * R + r is accumulation step a of replica r of R. ``spoil`` changes this rank's.

        Whether it reports an overflow.
        """
        replicas, replica = self.layout.size("dp"), self.layout.index("dp")
        every = lanes(iteration)
        batches = []
        for accumulated in range(self.micro_batches):
            whole_NPC = every[accumulated * replicas + replica]
            part_NPC = whole_NPC.chunk(self.layout.size("cp"), dim=1)[self.layout.index("cp")].clone()
            spoil(part_NPC)
            batches.append(Batch({"x": part_NPC.to(self.dtype)}, LANES))
        result = self.step(batches)
        return self.step.read(result.names, result.values.tolist()).overflow

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights as of the last update."""
        self.step.materialize()
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def everything(self) -> dict[str, Tensor]:
        """Copies of all that an iteration may write on this rank."""
        return self.weights() | {name: tensor.clone() for name, tensor in self.optimizer.named_state()}

    def changed(self, before: dict[str, Tensor]) -> list[str]:
        return [name for name, tensor in self.everything().items() if not torch.equal(tensor, before[name])]


def train(layout: Layout, **options: Any) -> dict[str, Tensor]:
    """The weights after some iterations."""
    trainee = Trainee(layout, **options)
    for iteration in range(ITERATIONS):
        trainee.iterate(iteration)
    return trainee.weights()


def in_half(layout: Layout, **options: Any) -> dict[str, Tensor]:
    """The same in bfloat16."""
    return {n: w.float() for n, w in train(layout, dtype=torch.bfloat16, **options).items()}


def first_norm(layout: Layout, **options: Any) -> float:
    """The norm of the averaged gradient of the first iteration."""
    trainee = Trainee(layout, clip=CLIPS["after"], **options)
    trainee.iterate(0)
    return trainee.optimizer.metrics["gradient_norm"].item()


def skipped(layout: Layout, **options: Any) -> list[str]:
    """What a skipped iteration changed."""
    trainee = Trainee(layout, **options)
    trainee.iterate(0)
    before = trainee.everything()
    trainee.step.skip.fill_(1)
    trainee.iterate(1)
    return trainee.changed(before)


def silenced(layout: Layout) -> list[int]:
    """Elements of each all-reduce in an iteration that clips gradients one by one and sends none."""
    trainee = Trainee(layout, clip=CLIPS["before"])
    trainee.optimizer.stop_sending()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
        trainee.iterate(0)
    return [call.args[0].numel() for call in counted.call_args_list]


def overflow_in_one_part(layout: Layout, **options: Any) -> dict[str, Any]:
    """What an iteration changed in which only the last rank's own layer has a gradient that is not finite."""
    trainee = Trainee(layout, **options)
    trainee.iterate(0)
    before = trainee.everything()
    hook = None
    if layout.rank == layout.world_size - 1:
        hook = trainee.model.up.weight.register_hook(lambda gradient: gradient * float("inf"))
    told = trainee.iterate(1)
    if hook is not None:
        hook.remove()
    return {"changed": trainee.changed(before), "overflow": told}


def held(layout: Layout, **options: Any) -> dict[str, Any]:
    """Elements of the flat buffer, of what this rank holds of each kind of state, and of the weights that it updates.

    Beside them the reduction in words.
    """
    optimizer = Trainee(layout, **options).optimizer
    (buffer,) = optimizer.buffers
    state = {name: tensor.numel() for name, tensor in optimizer.named_state() if tensor.ndim}
    updated = sum(fragment.numel for fragment in buffer.shard.fragments)
    words = optimizer.choices["gradient reduction"]
    return {"buffer": buffer.parameters.numel(), "state": state, "updated": updated, "words": words}


def save(layout: Layout, folder: Path, **options: Any) -> None:
    """A checkpoint after two iterations."""
    trainee = Trainee(layout, "lamb", **options)
    for iteration in range(2):
        trainee.iterate(iteration)
    trainee.model.seen.fill_(layout.rank + 1.0)
    checkpoint.save(folder, Progress(step=2, position=2), 7, {}, trainee.model, trainee.step.updaters, layout)


def resume(layout: Layout, place: Path, **options: Any) -> dict[str, Any]:
    """The weights after one more iteration, the buffer as restored, and what is said."""
    trainee = Trainee(layout, "lamb", **options)
    trainee.iterate(9)  # what was there before must not matter
    content = checkpoint.read(place, {}, layout)
    progress = checkpoint.restore(content, trainee.model, trainee.step.updaters, layout)
    trainee.iterate(progress.step)
    return {"weights": trainee.weights(), "seen": trainee.model.seen.item(), "remarks": content["remarks"]}


def model_parallel(layout: Layout, when: str, **options: Any) -> dict[str, list[float]]:
    """One clipped step on cp 2 x tp 2: a weight of which each tp rank has its own part, and three that all have.

    ``options`` say who shares. One of the three is computed redundantly by all four ranks, one by the tp ranks alone,
    and of one all four see parts of the samples. The parts of gradients on the two cp ranks are 1 and 2 times the tp
    rank's number + 1, 3 and 4, for the redundant one 7 on both, and for the last 1, 2, 3 and 4 on the four ranks.
    """
    own, shared, redundant, partial = (nn.Parameter(torch.zeros(size)) for size in (100, 10, 5, 3))
    groups = [
        ParameterGroup({"own": own}),
        ParameterGroup({"shared": shared}, replicated_over=("tp",)),
        ParameterGroup({"redundant": redundant}, replicated_over=("cp", "tp")),
        ParameterGroup({"partial": partial}, summed_over=("tp",)),
    ]
    clip = ClipNorm(1.0, when)
    optimizer = Optimizer(groups, SGD(0.0), constant(1.0), layout, grad_divisor=1.0, clip=clip, **options)
    optimizer.begin()
    own.grad.fill_((1.0 + layout.index("cp")) * (1.0 + layout.index("tp")))
    shared.grad.fill_(3.0 + layout.index("cp"))
    redundant.grad.fill_(7.0)
    partial.grad.fill_(1.0 + layout.rank)
    optimizer.arm()
    optimizer.collect()
    apply_gradients([optimizer], torch.tensor(0.0))
    found = {"own": own, "shared": shared, "redundant": redundant, "partial": partial}
    return {name: weight.tolist() for name, weight in found.items()}


def cases_of(layout: Layout, rank: int, folder: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, options in SHARDED.items():
        for rule in RULES:
            yield f"train/{rule}/{name}", functools.partial(train, layout, rule=rule, **options)
        for when, clip in CLIPS.items():
            yield f"clip/{when}/{name}", functools.partial(train, layout, clip=clip, **options)
        yield f"norm/{name}", functools.partial(first_norm, layout, **options)
        yield f"skip/{name}", functools.partial(skipped, layout, **options)
        yield f"overflow/{name}", functools.partial(overflow_in_one_part, layout, **options)
        yield f"half/{name}", functools.partial(in_half, layout, **options)
        yield f"held/{name}", functools.partial(held, layout, **options)
    yield "half/before", functools.partial(in_half, layout, clip=CLIPS["before"], shard="all")
    yield "held/before", functools.partial(held, layout, clip=CLIPS["before"], shard="all")
    yield "silenced", functools.partial(silenced, layout)
    one_sample = Layout({"cp": WORLD}, rank, seed=7)
    for name in ("all", "node"):  # a node of two has half of the ranks of a sample
        yield f"one_sample/after/{name}", functools.partial(train, one_sample, clip=CLIPS["after"], **SHARDED[name])
        yield f"one_sample/before/{name}", functools.partial(train, one_sample, clip=CLIPS["before"], **SHARDED[name])
    split = Layout({"cp": 2, "tp": 2}, rank, seed=7)
    for name in ("none", "all", "all_reduce"):
        for when in ("before_reduction", "after_reduction"):
            yield f"model_parallel/{when}/{name}", functools.partial(model_parallel, split, when, **SHARDED[name])
    place = Path(folder, "checkpoints", "step_00000002")
    yield "save", functools.partial(save, layout, place.parent, shard="all")
    yield "resume/same", functools.partial(resume, layout, place, shard="all")
    yield "resume/dp", functools.partial(resume, Layout({"dp": WORLD}, rank, seed=7), place)
    yield "resume/node", functools.partial(resume, one_sample, place, **SHARDED["node"])
    yield "resume/one", functools.partial(resume, layout, Path(folder, "of_one", place.name), shard="all")


def run_rank(rank: int, folder: str) -> None:
    """Everything that is to be compared, on one of four ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    layout = Layout({"dp": 2, "cp": 2}, rank, seed=7)
    torch.save({name: case() for name, case in cases_of(layout, rank, folder)}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
