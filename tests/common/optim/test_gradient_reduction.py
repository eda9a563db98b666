"""Test that sums of gradients over two gloo ranks equal one rank that accumulates the same micro-batches."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.optim.learning_rate import constant
from common.optim.momentum import LARS, SGD
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.precision import LossScale
from common.step.train_step import apply_gradients
from tests.gloo_ranks import on_ranks

CLIP = ClipNorm(0.5, "after_reduction")
SMALL_BUCKETS = 500  # bytes: two tensors, hence three buckets for each of the two groups


class Branches(nn.Module):
    """A trunk of four layers; the branch and the spare layer are used on request or never."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)
        self.trunk = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.branch = nn.Linear(8, 8)

    def forward(self, x_BC: Tensor, use_branch: bool) -> Tensor:
        for layer in self.trunk:
            x_BC = torch.tanh(layer(x_BC))
        return self.branch(x_BC) if use_branch else x_BC


def build_model() -> Branches:
    torch.manual_seed(0)
    return Branches()


def build_optimizer(model: nn.Module, layout: Layout, overlap: bool) -> Optimizer:
    named = dict(model.named_parameters())
    groups = [
        ParameterGroup({n: p for n, p in named.items() if p.ndim > 1}, 1e-4, trust_ratio=True),
        ParameterGroup({n: p for n, p in named.items() if p.ndim == 1}),
    ]
    rule, schedule = LARS(0.9, eta=0.1), constant(0.5)
    return Optimizer(groups, rule, schedule, layout, grad_divisor=8.0, bucket_bytes=SMALL_BUCKETS, overlap=overlap)


def micro_batches(iteration: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(iteration)
    return list(torch.randn(4, 2, 8, generator=generator).unbind())


def train(layout: Layout, overlap: bool, mine: list[int]) -> dict[str, Tensor]:
    """Return the weights after three steps over the micro-batches ``mine``. The first half of them uses the branch."""
    model = build_model()
    optimizer = build_optimizer(model, layout, overlap)
    for iteration in range(3):
        batches = micro_batches(iteration)
        optimizer.begin()
        for index in mine:
            if index == mine[-1]:
                optimizer.arm()
            model(batches[index], use_branch=index < 2).square().sum().backward()
        apply_gradients([optimizer], torch.tensor(0.0))
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def launched_in_backward(layout: Layout) -> dict[str, int]:
    model = build_model()
    optimizer = build_optimizer(model, layout, overlap=True)
    reducer = optimizer._reducer
    optimizer.begin()
    model(micro_batches(0)[0], use_branch=True).sum().backward()
    unarmed = reducer.launched
    optimizer.arm()
    model(micro_batches(0)[0], use_branch=True).sum().backward()
    armed = reducer.launched
    apply_gradients([optimizer], torch.tensor(0.0))
    return {"unarmed": unarmed, "armed": armed, "finished": reducer.launched, "buckets": reducer.buckets}


def second_backward(layout: Layout) -> str:
    weight = nn.Parameter(torch.ones(2))
    optimizer = Optimizer([ParameterGroup({"w": weight})], SGD(0.0), constant(1.0), layout, grad_divisor=1.0)
    optimizer.begin()
    optimizer.arm()
    weight.sum().backward()
    try:
        weight.sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        apply_gradients([optimizer], torch.tensor(1.0))
    return ""


def half_sum(layout: Layout, dtype: torch.dtype) -> Tensor:
    weight = nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = Optimizer([ParameterGroup({"w": weight})], SGD(0.0), constant(1.0), layout, grad_divisor=4.0)
    optimizer.begin()
    weight.grad.fill_(layout.rank + 1)
    apply_gradients([optimizer], torch.tensor(0.0))
    return weight.detach().float()


def large_sum(layout: Layout, predivide: float = 1.0, **options: Any) -> dict[str, Any]:
    """Return the results of a step in which the sum of fp16 gradients exceeds 65,504; another weight is in fp32."""
    scale = LossScale("cpu", 1.0, growth=1.0, backoff=1.0, predivide=predivide)
    half = nn.Parameter(torch.zeros(64, dtype=torch.float16))
    beside, single = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    groups = [ParameterGroup({"half": half, "beside": beside}), ParameterGroup({"single": single})]
    clip = ClipNorm(1e9, "after_reduction")
    optimizer = Optimizer(
        groups, SGD(0.0), constant(2.0**-10), layout, grad_divisor=2.0, clip=clip, loss_scale=scale, **options
    )
    optimizer.begin()
    of_rank = {half: 40000.0, beside: 2.0 + layout.rank, single: 4.0 + layout.rank}
    scale.scale(sum((weight.float() * value).sum() for weight, value in of_rank.items())).backward()
    overflow = bool(apply_gradients([optimizer], torch.tensor(0.0)))
    found = {"overflow": overflow, "gradient_norm": optimizer.metrics["gradient_norm"].item()}
    return found | {"half": half.tolist(), "beside": beside.tolist(), "single": single.tolist()}


def wide_sum(layout: Layout, dtype: torch.dtype = torch.bfloat16, **options: Any) -> list[list[float]]:
    """Return the masters of half-precision weights after one step; gradients come from autograd.

    They are 256 on the first rank and 1 on the second: bf16 cannot represent 257, and fp16 not 2 * 40,000. Each weight
    has a bucket.
    """
    of_rank = {torch.bfloat16: (256.0, 1.0), torch.float16: (40000.0, 40000.0)}[dtype][layout.rank]
    named = {name: nn.Parameter(torch.zeros(512, dtype=dtype)) for name in ("first", "second")}
    optimizer = Optimizer(
        [ParameterGroup(named)], SGD(0.0), constant(1.0), layout, grad_divisor=1.0, bucket_bytes=2048,
        gradients="fp32", **options,
    )  # fmt: skip
    optimizer.begin()
    optimizer.arm()
    sum((weight * of_rank).sum() for weight in named.values()).backward()
    launched = optimizer._reducer.launched
    overflow = apply_gradients([optimizer], torch.tensor(0.0))
    assert not overflow
    assert launched == optimizer._reducer.buckets == 2
    masters = optimizer.state_dict().get("masters", {})
    return [masters[name].unique().tolist() for name in named if masters]


def divided(layout: Layout, by_hand: bool = False, **options: Any) -> dict[str, Any]:
    """Run four steps in fp16 with fp32 biases. The loss scale, or this function, divides gradients by 4.

    Rank 1 overflows in the second step; the loss scale grows after two steps without an overflow.
    """
    model = build_model()
    named = {n: p for n, p in model.named_parameters() if not n.startswith("spare")}
    for name, parameter in named.items():
        parameter.data = parameter.data.half() if name.endswith("weight") else parameter.data
    scale = LossScale("cpu", 1024.0, growth_interval=2, predivide=1.0 if by_hand else 4.0)
    optimizer = Optimizer(
        [ParameterGroup(named, 1e-4)], SGD(0.9), constant(0.5), layout, grad_divisor=2.0 if by_hand else 8.0,
        bucket_bytes=SMALL_BUCKETS, loss_scale=scale, **options,
    )  # fmt: skip
    overflows, scales = [], []
    for iteration in range(4):
        optimizer.begin()
        for index in range(4)[2 * layout.rank :][:2]:
            if index % 2:
                optimizer.arm()
            x_BC = micro_batches(iteration)[index]
            for layer in [*model.trunk, model.branch]:
                x_BC = torch.tanh(nn.functional.linear(x_BC.half(), layer.weight).float() + layer.bias)
            spoilt = torch.inf if (iteration, index) == (1, 3) else 1.0
            scale.scale((x_BC.square() * spoilt).sum()).backward()
        for parameter in named.values() if by_hand else ():
            parameter.grad.mul_(0.25)
        overflows.append(bool(apply_gradients([optimizer], torch.tensor(0.0))))
        scales.append(optimizer.metrics["loss_scale"].item())
    optimizer.materialize()
    return {"weights": {n: p.detach().clone() for n, p in named.items()}, "overflows": overflows, "loss_scales": scales}


def replicated(layout: Layout) -> Tensor:
    """Return a weight whose gradient two tp ranks compute redundantly; the optimizer uses their mean."""
    weight = nn.Parameter(torch.zeros(3))
    group = ParameterGroup({"w": weight}, replicated_over=("tp",))
    optimizer = Optimizer([group], SGD(0.0), constant(1.0), layout, grad_divisor=2.0)
    optimizer.begin()
    weight.grad.fill_(4.0 + layout.rank)
    apply_gradients([optimizer], torch.tensor(0.0))
    return weight.detach().clone()


def overflow_elsewhere(layout: Layout) -> tuple[bool, list[float]]:
    """Return overflow flag and weight of a split layer; only the gradient of the second rank is not finite."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = Optimizer([ParameterGroup({"w": weight})], SGD(0.0), constant(1.0), layout, grad_divisor=1.0)
    optimizer.begin()
    weight.grad.fill_(float("inf") if layout.rank == 1 else 1.0)
    overflow = bool(apply_gradients([optimizer], torch.tensor(0.0)))
    return overflow, weight.tolist()


def run_rank(rank: int, world: int, _: str) -> dict[str, Any]:
    replicas, split = Layout({"dp": world}, rank), Layout({"tp": world}, rank)
    mine = [[0, 1], [2, 3]][rank]  # so that only rank 0 uses the branch
    return {
        "overlap": train(replicas, True, mine),
        "no_overlap": train(replicas, False, mine),
        "launched": launched_in_backward(replicas),
        "second_backward": second_backward(replicas),
        "float16": half_sum(replicas, torch.float16),
        "bfloat16": half_sum(replicas, torch.bfloat16),
        "large": large_sum(replicas),
        "large/none": large_sum(replicas, 4.0),
        "large/all": large_sum(replicas, 4.0, shard="all"),
        "large/all_reduce": large_sum(replicas, 4.0, shard="all", reduction="all_reduce"),
        "wide/none": wide_sum(replicas),
        "wide/all": wide_sum(replicas, shard="all"),
        "wide/all_reduce": wide_sum(replicas, shard="all", reduction="all_reduce"),
        "wide/float16": wide_sum(replicas, torch.float16),
        "divided/by_hand": divided(replicas, by_hand=True, overlap=False),
        "divided/by_hand, clipped": divided(replicas, by_hand=True, overlap=False, clip=CLIP),
        "divided/overlap": divided(replicas),
        "divided/no_overlap": divided(replicas, overlap=False),
        "divided/shards": divided(replicas, shard="all"),
        "divided/clipped": divided(replicas, clip=CLIP),
        "replicated": replicated(split),
        "overflow": overflow_elsewhere(split),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return on_ranks(run_rank, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("mode", ["overlap", "no_overlap"])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_equal_one_that_accumulates(ranks, rank, mode):
    expected = train(Layout(), True, [0, 1, 2, 3])
    for name, weight in ranks[rank][mode].items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def test_overlap_changes_no_bit(ranks):
    for name, weight in ranks[0]["overlap"].items():
        assert torch.equal(weight, ranks[0]["no_overlap"][name])


def test_ranks_agree_bit_for_bit(ranks):
    for name, weight in ranks[0]["overlap"].items():
        assert torch.equal(weight, ranks[1]["overlap"][name])


def test_unused_parameter_only_decays(ranks):
    start = build_model().spare.bias.detach()
    assert torch.equal(ranks[0]["overlap"]["spare.bias"], start)


def test_buckets_start_during_the_armed_backward_only(ranks):
    launched = ranks[0]["launched"]
    assert launched["unarmed"] == 0
    assert launched["armed"] == 4  # of 6: the last of each group waits for the spare layer
    assert launched["finished"] == launched["buckets"] == 6


def test_a_second_backward_after_arm_is_an_error(ranks):
    assert "arm the optimizer before the last backward pass" in ranks[0]["second_backward"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_gradients_are_summed(ranks, dtype):
    assert ranks[1][dtype].tolist() == [-0.75] * 3  # -(1 + 2) / 4


def test_a_sum_beyond_float16_is_an_overflow(ranks):
    assert [rank["large"]["overflow"] for rank in ranks] == [True, True]


@pytest.mark.parametrize("name", ["none", "all", "all_reduce"])
def test_divided_before_the_reduction_the_same_sum_is_exact(ranks, name):
    for rank in ranks:
        found = rank[f"large/{name}"]
        assert not found["overflow"]
        assert found["half"] == [-40000.0 / 1024] * 64
        assert found["beside"] == [-2.5 / 1024] * 3
        assert found["single"] == [-4.5 / 1024] * 3
        norm = math.sqrt(64 * 40000.0**2 + 3 * 2.5**2 + 3 * 4.5**2)
        assert found["gradient_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("name", ["none", "all", "all_reduce", "float16"])
def test_float32_gradients_of_half_weights_are_reduced_in_float32(ranks, name):
    expected = -80000.0 if name == "float16" else -257.0
    assert ranks[0][f"wide/{name}"] == [[expected], [expected]]


@pytest.mark.parametrize("mode", ["overlap", "no_overlap", "shards", "clipped"])
@pytest.mark.parametrize("rank", [0, 1])
def test_dividing_the_loss_scale_changes_no_bit_of_dividing_the_gradients(ranks, rank, mode):
    divided, by_hand = ranks[rank][f"divided/{mode}"], ranks[rank]["divided/by_hand"]
    if mode == "clipped":
        by_hand = ranks[rank]["divided/by_hand, clipped"]
    assert divided["loss_scales"] == by_hand["loss_scales"] == [1024.0, 512.0, 512.0, 1024.0]
    assert divided["overflows"] == by_hand["overflows"] == [False, True, False, False]
    for name in by_hand["weights"]:
        assert torch.equal(divided["weights"][name], by_hand["weights"][name]), name


def test_gradients_of_a_replicated_layer_are_averaged(ranks):
    assert ranks[0]["replicated"].tolist() == [-2.25] * 3  # -((4 + 5) / 2) / 2


def test_overflow_on_another_rank_of_a_split_layer_writes_nothing(ranks):
    assert ranks[0]["overflow"] == (True, [0.0] * 3)
