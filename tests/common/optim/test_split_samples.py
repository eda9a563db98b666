"""Test that four gloo ranks that split the samples of two replicas (dp 2 x cp 2) train as one rank with whole samples.

Each ``cp`` rank has its own positions of a sample.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import ITERATIONS, LANES, Trainee, difference
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.optim.learning_rate import constant
from common.optim.momentum import SGD
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.step.train_step import apply_gradients
from tests.gloo_ranks import on_ranks, results
from tests.shared_peers import shared_peers

WORLD = 4
SAMPLES, POSITIONS, WIDTH = 3, 8, 24
RATES = [0.5, 1.0, 0.25]
MAX_NORM = 0.05
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
    "copied": {"shard": "all", "exchange": "copy_engines"},
    "node_copied": {"shard": "node", "ranks_per_node": 2, "exchange": "copy_engines"},
}


class SumOverSample(torch.autograd.Function):
    """Sums over the ranks of a sample, for a layer that all of them compute."""

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
    """Passes a tensor that all ranks of a sample have to a layer that each computes for its own part."""

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
    """A layer per position, a layer of the sum over positions (which all ranks compute), and again a layer per
    position."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.whole = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.group = group
        self.blocks: list[tuple[str, nn.Module]] = []

    def forward(self, x_NPC: Tensor) -> Tensor:
        """Return the sum of squares over the positions of ``x_NPC``, which may be a part of all positions."""
        down_NPC = torch.tanh(self.down(x_NPC))
        sum_NC = SumOverSample.apply(down_NPC.sum(1), self.group)
        whole_NC = ToEachPart.apply(torch.tanh(self.whole(sum_NC)), self.group)
        squares: Tensor = self.up(down_NPC + whole_NC[:, None]).square().sum()
        return squares / (SAMPLES * POSITIONS * WIDTH)


def lanes(iteration: int) -> Tensor:
    """Return whole samples of all micro-batches of a step."""
    generator = torch.Generator().manual_seed(iteration)
    return torch.randn(LANES, SAMPLES, POSITIONS, WIDTH, generator=generator, dtype=torch.float64)


def schedule(step: Tensor) -> Tensor:
    """Return the rates of ``RATES``, one after another."""
    return torch.tensor(RATES)[step.clamp(max=len(RATES) - 1)]


class SplitTrainee(Trainee):
    """A trainee that also takes its share of the positions."""

    schedule = staticmethod(schedule)
    bucket_bytes = 5000

    def __init__(self, layout: Layout, rule: str = "nesterov", *given: Any, **options: Any) -> None:
        super().__init__(layout, rule, *given, **options)

    def network(self) -> nn.Module:
        return Network(self.layout.group("cp"))

    def groups(self, rule: str) -> list[ParameterGroup]:
        named = dict(self.model.named_parameters())
        redundant = {name for name in named if name.startswith("whole")}
        same: dict[str, Any] = {"trust_ratio": rule == "lamb", "learning_rate_in_momentum": False}
        return [
            ParameterGroup({n: p for n, p in named.items() if n not in redundant}, 0.01, **same),
            ParameterGroup({n: p for n, p in named.items() if n in redundant}, 0.01, replicated_over=("cp",), **same),
        ]

    def lanes(self, iteration: int) -> Tensor:
        return lanes(iteration).chunk(self.layout.size("cp"), dim=2)[self.layout.index("cp")]


def silenced(layout: Layout) -> list[int]:
    """Return the size of each all-reduce in a step that clips each micro-batch and sends no gradients."""
    trainee = SplitTrainee(layout, clip=CLIPS["before"])
    trainee.optimizer.stop_sending()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
        trainee.iterate(0)
    return [call.args[0].numel() for call in counted.call_args_list]


def overflow_in_one_part(layout: Layout, **options: Any) -> dict[str, Any]:
    """Return overflow flag and changed tensors of a step in which only a gradient of the last rank is not finite."""
    trainee = SplitTrainee(layout, **options)
    trainee.iterate(0)
    before = trainee.everything()
    hook = None
    if layout.rank == layout.world_size - 1:
        hook = trainee.model.up.weight.register_hook(lambda gradient: gradient * float("inf"))
    overflow = trainee.iterate(1)
    if hook is not None:
        hook.remove()
    return {"changed": trainee.changed(before), "overflow": overflow}


def held(layout: Layout, **options: Any) -> dict[str, Any]:
    """Return the sizes of the flat buffer, of this rank's state, and of the weights it updates, and the reduction's
    name."""
    optimizer = SplitTrainee(layout, **options).optimizer
    (buffer,) = optimizer.buffers
    state = {name: tensor.numel() for name, tensor in optimizer.named_state() if tensor.ndim}
    updated = sum(fragment.numel for fragment in buffer.shard.fragments)
    words = optimizer.choices["gradient reduction"]
    return {"buffer": buffer.parameters.numel(), "state": state, "updated": updated, "words": words}


def model_parallel(layout: Layout, when: str, **options: Any) -> dict[str, list[float]]:
    """Return four weights after one clipped step on cp 2 x tp 2: one sharded over tp, and three that all ranks have.

    Of these three, all ranks compute ``redundant``, the tp ranks compute ``shared`` redundantly, and each of the four
    ranks sees other samples for ``partial``. The gradients on the two cp ranks are 1 and 2 times (tp rank + 1) for
    ``own``, 3 and 4 for ``shared``, and 7 for ``redundant``. Those of ``partial`` are 1, 2, 3 and 4.
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


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Return the results of all cases on one of four ranks."""
    with shared_peers(Path(folder)):
        return run_cases(rank, world, folder)


def run_cases(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Return the results of all cases on one of four ranks that share memory."""
    layout = Layout({"dp": 2, "cp": 2}, rank, seed=7)
    train, resume = SplitTrainee.train, SplitTrainee.resume
    found: dict[str, Any] = {}
    for name, options in SHARDED.items():
        for rule in ("nesterov", "lamb"):
            found[f"train/{rule}/{name}"] = train(layout, rule=rule, **options)
        for when, clip in CLIPS.items():
            found[f"clip/{when}/{name}"] = train(layout, clip=clip, **options)
        found[f"norm/{name}"] = SplitTrainee.clipped_norm(layout, clip=CLIPS["after"], **options)
        found[f"overflow/{name}"] = overflow_in_one_part(layout, **options)
        found[f"half/{name}"] = SplitTrainee.in_half(layout, **options)
        found[f"held/{name}"] = held(layout, **options)
    found["half/before"] = SplitTrainee.in_half(layout, clip=CLIPS["before"], shard="all")
    found["held/before"] = held(layout, clip=CLIPS["before"], shard="all")
    found["silenced"] = silenced(layout)
    one_sample = Layout({"cp": world}, rank, seed=7)
    for name in ("all", "node", "copied", "node_copied"):  # a node of two has half of the ranks of a sample
        for when, clip in CLIPS.items():
            found[f"one_sample/{when}/{name}"] = train(one_sample, clip=clip, **SHARDED[name])
    split = Layout({"cp": 2, "tp": 2}, rank, seed=7)
    for name in ("none", "all", "all_reduce"):
        for when in ("before_reduction", "after_reduction"):
            found[f"model_parallel/{when}/{name}"] = model_parallel(split, when, **SHARDED[name])
    saved = Path(folder, "checkpoints", "step_00000002")
    SplitTrainee.save(layout, saved.parent, shard="all")
    found["resume/same"] = resume(layout, saved, shard="all")
    found["resume/dp"] = resume(Layout({"dp": world}, rank, seed=7), saved)
    found["resume/node"] = resume(one_sample, saved, **SHARDED["node"])
    found["resume/one"] = resume(layout, Path(folder, "of_one", saved.name), shard="all")
    return found


TOLERANCE = 1e-12  # of float64 sums in another order, relative to the norm


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of four ranks."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    SplitTrainee.save(Layout(seed=7), folder / "of_one")
    on_ranks(run_rank, WORLD, folder)
    return folder


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    """Return the results of each rank, by case."""
    return results(WORLD, root)


def with_pytorch(clip: str | None = None) -> dict[str, Tensor]:
    """Return the weights after torch.optim's Nesterov SGD on whole samples, clipped by torch.nn.utils."""
    model = Network().double()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=0.01, nesterov=True)
    for iteration in range(ITERATIONS):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for lane in lanes(iteration):
            optimizer.zero_grad()
            model(lane).backward()
            if clip == "before":
                torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            for total, parameter in zip(sums, parameters, strict=True):
                total += parameter.grad
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.grad = total / LANES
        if clip == "after":
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.param_groups[0]["lr"] = RATES[iteration]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Tensor]]:
    """Return the weights after training on whole samples: PyTorch's SGD, and this suite's LAMB on one rank."""
    return {"nesterov": with_pytorch(), "lamb": SplitTrainee.train(Layout(seed=7), rule="lamb")}


@pytest.mark.parametrize("rule", ["nesterov", "lamb"])
@pytest.mark.parametrize("name", list(SHARDED))
def test_split_samples_train_as_whole_ones(ranks, expected, name, rule):
    for rank in ranks:
        assert difference(rank[f"train/{rule}/{name}"], expected[rule]) < TOLERANCE


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", list(SHARDED))
def test_split_samples_clip_as_whole_ones(ranks, expected, name, when):
    clipped = with_pytorch(when)
    assert difference(clipped, expected["nesterov"]) > 1e-3, "clipping must do something"
    for rank in ranks:
        assert difference(rank[f"clip/{when}/{name}"], clipped) < TOLERANCE


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["all", "node", "copied", "node_copied"])
def test_one_sample_over_all_ranks_clips_as_whole_ones(ranks, name, when):
    clipped = with_pytorch(when)
    for rank in ranks:
        assert difference(rank[f"one_sample/{when}/{name}"], clipped) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "sharing"), [("none", 1), ("all", WORLD), ("all_reduce", WORLD), ("before", WORLD), ("node", 2)]
)
def test_the_ranks_that_share_hold_equal_parts_and_update_every_weight_once(ranks, name, sharing):
    weights = sum(parameter.numel() for parameter in Network().parameters())
    found = [rank[f"held/{name}"] for rank in ranks]
    for one in found:
        assert set(one["state"].values()) == {one["buffer"] // sharing}
        assert any(kind.startswith("momentum") for kind in one["state"])
    for first in range(0, WORLD, sharing):
        assert sum(one["updated"] for one in found[first : first + sharing]) == weights


def test_the_log_says_over_how_many_ranks_gradients_are_scattered(ranks):
    assert ranks[0]["held/all"]["words"] == "scatter over 4 ranks during the backward pass"
    assert ranks[0]["held/before"]["words"] == "scatter over 2 ranks after the backward pass, as clipping comes before"


@pytest.mark.parametrize("name", [*SHARDED, "before"])
def test_ranks_end_with_the_same_bits(ranks, name):
    first, *others = (rank[f"half/{name}"] for rank in ranks)
    for other in others:
        assert all(torch.equal(other[weight], first[weight]) for weight in first)


@pytest.mark.parametrize("name", list(SHARDED))
def test_the_norm_counts_every_weight_once(ranks, name):
    model = Network().double()
    sum(model(lane) for lane in lanes(0)).backward()
    norm = math.sqrt(sum(float((p.grad / LANES).square().sum()) for p in model.parameters()))
    assert [rank[f"norm/{name}"] for rank in ranks] == [pytest.approx(norm, rel=1e-6)] * WORLD


def test_parts_of_a_gradient_are_not_sent_either_but_activations_are(ranks):
    activations = SAMPLES * WIDTH  # there and back, for each of two micro-batches
    for rank in ranks:
        *passes, result = rank["silenced"]
        assert passes == [activations] * 4
        assert result < WIDTH


@pytest.mark.parametrize("name", list(SHARDED))
def test_overflow_in_one_part_of_a_sample_leaves_every_bit_on_all_ranks(ranks, name):
    assert [rank[f"overflow/{name}"] for rank in ranks] == [{"changed": [], "overflow": True}] * WORLD


@pytest.mark.parametrize("name", ["none", "all", "all_reduce"])
@pytest.mark.parametrize("when", ["before_reduction", "after_reduction"])
def test_beside_split_layers_too_a_weight_counts_once(ranks, when, name):
    # sums over cp: 3 and 6 on the parts of tp 0 and 1, 7 where the tp ranks are redundant, and 7 where all are; over cp
    # and tp 10 where all four have parts
    norm = math.sqrt(100 * 3.0**2 + 100 * 6.0**2 + 10 * 7.0**2 + 5 * 7.0**2 + 3 * 10.0**2)
    for rank, cases in enumerate(ranks):
        moved = cases[f"model_parallel/{when}/{name}"]
        assert moved["own"] == pytest.approx([-3.0 * (1 + rank % 2) / norm] * 100)
        assert moved["shared"] == pytest.approx([-7.0 / norm] * 10)
        assert moved["redundant"] == pytest.approx([-7.0 / norm] * 5)
        assert moved["partial"] == pytest.approx([-10.0 / norm] * 3)


def test_the_same_ranks_go_on_with_their_own_buffers(ranks, expected):
    for rank, cases in enumerate(ranks):
        assert difference(cases["resume/same"]["weights"], expected["lamb"]) < TOLERANCE
        assert cases["resume/same"]["seen"] == rank + 1.0
        assert cases["resume/same"]["remarks"] == []


def test_ranks_that_do_not_split_samples_may_go_on(ranks, expected):
    for cases in ranks:
        resumed = cases["resume/dp"]
        assert difference(resumed["weights"], expected["lamb"]) < TOLERANCE
        assert resumed["seen"] == 1.0
        (remark,) = resumed["remarks"]
        assert "of 2 replicas, this run has 4, and layout.cp=1 instead of 2" in remark


def test_a_node_with_a_part_of_a_samples_ranks_may_go_on(ranks, expected):
    for cases in ranks:
        assert difference(cases["resume/node"]["weights"], expected["lamb"]) < TOLERANCE


def test_four_ranks_go_on_with_what_one_has_saved(ranks, expected):
    for cases in ranks:
        assert difference(cases["resume/one"]["weights"], expected["lamb"]) < TOLERANCE


def test_one_rank_goes_on_with_what_four_have_saved(root, expected):
    resumed = SplitTrainee.resume(Layout(seed=7), root / "checkpoints" / "step_00000002")
    assert difference(resumed["weights"], expected["lamb"]) < TOLERANCE
